"""The profiles in a store: traces of earlier starts, and the hot pack and page list made of them.

Keys: ``profiles/<tree digest>/<job>/<trace digest>.trace``, and beside these ``hot-<digest>.pack`` and its page list;
``profiles/owned/<tree digest>/<owner>/<job>/...`` of starts that a service mounts for others. Everything here is
advice: any trouble is one log line and an empty answer, never an error for the job."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeVar

import msgspec

from bootseer import ranks
from bootseer.backends.interface import Source
from bootseer.blocks.formats import hotpack
from bootseer.blocks.formats.hotpack import HotPack
from bootseer.blocks.formats.pagelist import MAX_STORED, PageList
from bootseer.blocks.formats.trace import MAX_BYTES, Trace
from bootseer.blocks.profiles.merge import blocks_of
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap
from bootseer.errors import BootseerError, DataError, UnavailableError, logged
from bootseer.objects import ObjectInfo, Store

log = logging.getLogger(__name__)
T = TypeVar("T")

OWNED = "profiles/owned"
"""Below it are the profiles that have an owner."""
MAX_TRACES = 32
"""Traces kept and merged per profile; more add nothing that shows in a median."""

DAY = 86_400.0
_ENOUGH = 3
_NEWS = 0.01
"""A start of whose blocks a larger share is in no trace is published also where there are `_ENOUGH`."""
SMALL_TREE = 64 << 20
"""Bytes of data up to which a start may well read everything."""
_FIRST_READ = 64 << 10
"""Bytes: header and index of a hot pack of 1 GB of blocks in one request."""
LOOKED_AT = 128
"""Objects of a kind in a profile: what others put there is not read without end."""
_READERS = 4
_PUBLISHERS = 8
"""Nodes of a job that publish what they recorded: three traces without news are enough, and a node that is not like the
others should have a chance."""
_TURN_SECONDS = 1.0


OWNED_PROFILES = 8
"""That an owner has of one tree, in as many bytes as the tree is stored in, or `SMALL_TREE`. Older ones make room."""


class ProfileKey(msgspec.Struct, frozen=True):
    """Whose starts are alike: traces of one job signature (any text; empty means ``default``) are merged. ``owner``:
    for whom a service with rights at the store mounts, who chose ``job`` and what is read: a name of `owner_of`, or of
    a site's kind of tenants. Only starts of this owner use the profile. Empty: who mounts for itself."""

    job: str = "default"
    owner: str = ""

    @property
    def folder(self) -> str:
        """``job`` as one part of a store key."""
        return _part(self.job, "job") if self.job else "default"

    def prefix(self, tree: str) -> str:
        """The store folder of this profile of ``tree``."""
        return f"{self.all_of(tree)}/{self.folder}"

    def all_of(self, tree: str) -> str:
        """The store folder of all profiles of ``tree`` that are this owner's."""
        return f"{OWNED}/{tree}/{_part(self.owner, 'owner')}" if self.owner else f"profiles/{tree}"

    def others(self, tree: str) -> tuple[str, ...]:
        """The store folders of profiles that a start without one of its own uses: of its owner, then of who mounts for
        itself."""
        return tuple(dict.fromkeys((self.all_of(tree), f"profiles/{tree}")))


def _part(text: str, kind: str) -> str:
    """``text`` as one part of a store key."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text)
    return text if plain else f"{kind}-{hashing.hexdigest(text.encode())[:32]}"


def owner_of(uid: int) -> str:
    """The owner of what is mounted for user ``uid``; root has none."""
    return f"uid-{uid}" if uid else ""


class Target(msgspec.Struct, frozen=True):
    """A tree that profiles are of: its digest, that of its block map (both hexadecimal), and the map."""

    tree: str
    map_digest: str
    map: BlockMap


class StoredPack(NamedTuple):
    """A hot pack in a store."""

    key: str
    pack: HotPack


def packs(store: Store, folder: str, target: Target) -> Iterator[StoredPack]:
    """The hot packs in ``folder`` (of a job, or of all jobs) that fit ``target``, the newest first. Of several the
    headers are read before: who wants the newest reads no other index. A bad one is a line in the log. Raises
    `UnavailableError`."""
    found = list(itertools.islice((info for info in store.list(folder) if hotpack.is_pack(info.key)), LOOKED_AT))
    if len(found) > 1:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="packs") as pool:
            ages = list(pool.map(partial(_looked_at, store, look=_read_age), found))
        aged = [(age, info) for age, info in zip(ages, found, strict=True) if age is not None]
        found = [info for _, info in sorted(aged, key=itemgetter(0), reverse=True)]
    for info in found:
        if (pack := _looked_at(store, info, look=partial(_read_index, target=target))) is not None:
            yield StoredPack(info.key, pack)


def newest_pack(store: Store, folder: str, target: Target) -> StoredPack | None:
    """The newest of `packs`. A store that does not answer is a line in the log."""
    with logged(log.warning, "cannot look for a hot pack in %s", folder, kinds=BootseerError):
        return next(packs(store, folder, target), None)
    return None


def _looked_at(store: Store, info: ObjectInfo, *, look: Callable[[Source], T]) -> T | None:
    """What ``look`` finds in a hot pack; None, and a line in the log, for a bad one. Raises `UnavailableError`."""
    try:
        with store.open(info.key) as reader:
            return look(reader)
    except UnavailableError:
        raise
    except BootseerError as exc:
        log.warning("ignoring hot pack %s: %s", info.key, exc)
        return None


def _read_age(reader: Source) -> int:
    return hotpack.age_of(reader.read(0, min(reader.size, hotpack.HEADER_SIZE)))


def _read_index(reader: Source, target: Target) -> HotPack:
    size = reader.size
    raw = reader.read(0, min(size, _FIRST_READ))
    whole = min(hotpack.index_size(*hotpack.shape_of(raw)), size)
    if whole > len(raw):
        raw += reader.read(len(raw), whole - len(raw))
    return HotPack.decode(raw, size, target.tree, target.map_digest, target.map)


def load_pages(store: Store, key: str, tree: str, size: int) -> PageList:
    """The page list ``key`` of a store, for the tree ``tree`` with ``size`` bytes of data. Raises `NotFoundError`,
    `UnavailableError`, and `DataError` for what is no such list."""
    return PageList.decode(store.get(key, most=MAX_STORED), tree, size)


def load(store: Store, tree: str, key: ProfileKey, size: int) -> list[Trace]:
    """Traces for ``tree`` by ``key``; when there are none, those of any job in `ProfileKey.others`."""
    with logged(log.warning, "no profile for tree %s", tree[:12], kinds=BootseerError):
        for folder in (key.prefix(tree), *key.others(tree)):
            if found := list(_read(store, folder, tree, size)):
                return found
    return []


def load_own(store: Store, tree: str, key: ProfileKey, size: int) -> list[Trace]:
    """Traces by ``key`` only. Raises `UnavailableError` and kin."""
    return list(_read(store, key.prefix(tree), tree, size))


def _read(store: Store, prefix: str, tree: str, size: int) -> Iterator[Trace]:
    taken = 0
    # A few at once: 32 traces one after the other would be as many round trips.
    with ThreadPoolExecutor(_READERS, thread_name_prefix="traces") as pool:
        traces = (info for info in store.some(prefix) if info.key.endswith(".trace"))
        found = itertools.islice(traces, LOOKED_AT)
        while taken < MAX_TRACES and (some := list(itertools.islice(found, MAX_TRACES - taken))):
            for trace in pool.map(lambda info: read_trace(store, info, tree, size), some):
                if trace is not None:
                    taken += 1
                    yield trace


def has_traces(store: Store, folder: str) -> bool:
    """Whether the profile in this store folder is still there. Raises `UnavailableError` and kin."""
    return any(info.key.endswith(".trace") for info in store.some(folder))


def read_trace(store: Store, info: ObjectInfo, tree: str, size: int) -> Trace | None:
    """A trace of ``tree``, whose data has ``size`` bytes; None, and a line in the log, for what is no such trace."""
    with logged(log.warning, "ignoring trace %s", info.key, kinds=BootseerError):
        raw = store.get(info.key, most=MAX_BYTES)
        if info.key.rpartition("/")[2] != f"{hashing.hexdigest(raw)}.trace":
            raise DataError("its name is not its digest")
        trace = Trace.decode(raw)
        if trace.tree != tree or trace.size != size:
            raise DataError("it is of another tree")
        return trace
    return None


def publish(store: Store, key: ProfileKey, trace: Trace, blocks: BlockMap) -> str:
    """Add ``trace`` to the profile if it says something new. Returns what happened, in a few words for the status. A
    start of which only scans were recorded ``reads everything``: of such a trace nothing is learnt."""
    try:
        mine = blocks_of(trace, blocks)
        if not mine:
            return "reads everything" if trace.left_out else "empty"
        known = list(_read(store, key.prefix(trace.tree), trace.tree, trace.size))
        complete = [other for other in known if other.complete]
        # one a day is news by itself: what jobs no longer read must leave the profile, too
        old = trace.complete and trace.began - max((other.began for other in complete), default=0) > DAY
        if (len(known) >= MAX_TRACES and not old) or (complete and not trace.complete):
            return "not needed"
        seen = {block for other in complete for block in blocks_of(other, blocks)}
        if len(complete) >= _ENOUGH and not old and len(mine.keys() - seen) <= _NEWS * len(mine):
            return "not needed"
        if len(known) >= MAX_TRACES:
            oldest = min(known, key=lambda other: other.began)
            store.delete(f"{key.prefix(trace.tree)}/{hashing.hexdigest(oldest.encode())}.trace")
        raw = trace.encode()
        if not make_room(store, key, trace.tree, blocks, len(raw)):
            return "over budget"
        store.put(f"{key.prefix(trace.tree)}/{hashing.hexdigest(raw)}.trace", raw)
        for other in known if trace.complete else ():
            if other.source:  # only predicted, until now
                store.delete(f"{key.prefix(trace.tree)}/{hashing.hexdigest(other.encode())}.trace")
    except BootseerError as exc:
        log.warning("cannot publish the trace of tree %s: %s", trace.tree[:12], exc)
        return "failed"
    return "published" if trace.complete else "published incomplete"


def record_next(store: Store, key: ProfileKey, tree: str) -> None:
    """Have the next start by ``key`` recorded in full: without a page list it is not read ahead of."""
    with logged(log.warning, "the next start of tree %s may be read ahead of, too", tree[:12], kinds=BootseerError):
        for info in [info for info in store.some(key.prefix(tree)) if info.key.endswith(".pages")][:LOOKED_AT]:
            store.delete(info.key)


def make_room(store: Store, key: ProfileKey, tree: str, blocks: BlockMap, size: int) -> bool:
    """Whether the budget of an owner has room for ``size`` bytes more in the profile ``key``: the profiles of ``tree``
    that are the owner's and had no start for longest are deleted for it. Raises `UnavailableError` and kin."""
    if not key.owner:
        return True
    budget, mine = max(SMALL_TREE, sum(blocks.lengths)), key.prefix(tree)
    found: dict[str, list[ObjectInfo]] = {mine: []}
    for info in store.list(key.all_of(tree)):
        found.setdefault(info.key.rpartition("/")[0], []).append(info)
    sizes = {folder: sum(info.size for info in infos) for folder, infos in found.items()}
    sizes[mine] += size

    def newest(folder: str) -> int:
        return max((trace.began for trace in _read(store, folder, tree, blocks.size)), default=0)

    if len(sizes) > OWNED_PROFILES or sum(sizes.values()) > budget:
        for folder in sorted(sizes.keys() - {mine}, key=newest):
            log.warning("%s is deleted, to make room for %s: its owner's budget is used up", folder, mine)
            for info in found[folder]:
                store.delete(info.key)
            del sizes[folder]
            if len(sizes) <= OWNED_PROFILES and sum(sizes.values()) <= budget:
                break
    if fits := sum(sizes.values()) <= budget:
        return fits
    log.warning("%s gets nothing more: it has all of the %d bytes of its owner's budget", mine, budget)
    return False


def publishes(environ: Mapping[str, str]) -> bool:
    """Whether this node is one of the few of its job whose recordings are published."""
    return _node_rank(environ) < _PUBLISHERS


def await_turn(environ: Mapping[str, str], hurry: threading.Event) -> bool:
    """Whether this node is to publish. Nodes of a job, which end their recordings together, do so one after the other,
    so that each sees what is there already; ``hurry`` ends the wait."""
    if publishes(environ):
        hurry.wait(_TURN_SECONDS * _node_rank(environ))
        return True
    return False


def _node_rank(environ: Mapping[str, str]) -> int:
    """The number of this node in its job, as the job's launcher says; 0 where it says nothing."""
    return ranks.first(environ, ranks.NODE_RANKS) or 0


def trim(store: Store, prefix: str) -> int:
    """Delete the traces in the store folder ``prefix`` that nobody would read: nodes that publish at the same moment do
    not see one another. Returns how many. Raises `UnavailableError` and kin."""
    extra = sorted(info.key for info in store.some(prefix) if info.key.endswith(".trace"))[MAX_TRACES:]
    for key in extra:
        store.delete(key)
    return len(extra)
