"""Profiles: traces of earlier starts in a store, and the hot list they merge to.

Keys: ``profiles/<tree digest>/<job>/<trace digest>.trace``, beside the hot pack made of them. Everything here is
advice: any trouble is one log line and an empty answer, never an error for the job.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
import socket
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from bootseer.blocks import _hash
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.trace import MAX_BYTES, UNIT, Trace
from bootseer.errors import BootseerError, DataError
from bootseer.store import ObjectInfo, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

MAX_TRACES = 32
"""Traces kept and merged per profile; more add nothing that shows in a median."""

DAY = 86_400.0
_ENOUGH = 3
_NEWS = 0.01
_RARE = 8
_READERS = 4
_PUBLISHERS = 8
"""Nodes of a job that publish what they recorded, about: three traces without news are enough, and a node that is not
like the others should have a chance."""
_LONGEST_DELAY = 8.0


class ProfileKey(msgspec.Struct, frozen=True):
    """Whose starts are alike: traces of one job signature (any text; empty means ``default``) are merged."""

    job: str = "default"

    @property
    def folder(self) -> str:
        """``job`` as one part of a store key."""
        if not self.job:
            return "default"
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.job):
            return self.job
        return "job-" + _hash.hexdigest(self.job.encode())[:32]

    def prefix(self, tree: str) -> str:
        """The store folder of this profile of ``tree``."""
        return f"profiles/{tree}/{self.folder}"


class Nodes(msgspec.Struct, frozen=True):
    """This node among the ``count`` of its job, in this ``attempt``: all of them end their recordings together."""

    node: str = ""
    attempt: str = ""
    count: int = 1

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Nodes:
        """As the job's launcher says; one node where it says nothing."""

        def first(*names: str) -> str:
            return next((value for name in names if (value := environ.get(name))), "")

        count = first("BOOTSEER_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE")
        return cls(
            first("BOOTSEER_NODE", "SLURMD_NODENAME") or socket.gethostname(),
            first("SLURM_JOB_ID")
            + "/"
            + first("BOOTSEER_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"),
            int(count) if count.isdecimal() and len(count) < 9 else 1,
        )

    def chosen(self, tree: str) -> bool:
        """Whether this node's recording is one of the few that are published: other nodes in another attempt."""
        share = _PUBLISHERS / max(1, self.count)
        text = f"{tree}\0{self.node}\0{self.attempt}"
        return share >= 1 or int(_hash.hexdigest(text.encode())[:8], 16) < share * 2**32

    def delay(self) -> float:
        """Seconds to wait before, so that those chosen come one after the other and see what is there already."""
        return random.uniform(0.0, min(_LONGEST_DELAY, 0.5 * (self.count - 1)))


def blocks_of(trace: Trace, blocks: BlockMap) -> dict[int, int]:
    """Block -> milliseconds of its first touch."""
    first: dict[int, int] = {}
    for touch in trace.touches:
        low = touch.unit * UNIT >> blocks.shift
        high = ((touch.unit + touch.count) * UNIT - 1) >> blocks.shift
        for block in range(low, min(high, blocks.count - 1) + 1):
            first.setdefault(block, touch.ms)
    return first


def select(traces: Sequence[Trace], driver: str | None = None) -> list[Trace]:
    """Those to go by: complete ones rather than incomplete ones, then those recorded through ``driver``.

    The second matters: a driver sees the kernel's readahead, which differs between drivers.
    """
    best = [trace for trace in traces if trace.complete] or list(traces)
    return [trace for trace in best if trace.driver == driver] or best


def merge(traces: Sequence[Trace], blocks: BlockMap, driver: str | None = None) -> list[int]:
    """The hot list: blocks in the order to fetch them.

    A block's score is the share of runs that touched it, its place the median of its first touches; blocks that fewer
    than half of the runs touched come after the others, and of many runs what hardly any touched is left out. Which
    traces count: `select`.
    """
    times: dict[int, list[int]] = {}
    used = select(traces, driver)
    for trace in used:
        for block, ms in blocks_of(trace, blocks).items():
            times.setdefault(block, []).append(ms)
    ranked = sorted(
        (2 * len(seen) < len(used), statistics.median(seen), order, block)
        for order, (block, seen) in enumerate(times.items())
        if len(seen) * _RARE >= len(used)
    )
    return [block for _, _, _, block in ranked]


class HotUse(msgspec.Struct, frozen=True):
    """How well a hot list foretold a start: blocks and stored bytes fetched ahead, of these never touched (waste), and
    touched though not in the list (misses)."""

    blocks: int = 0
    bytes: int = 0
    unused_blocks: int = 0
    unused_bytes: int = 0
    missed_blocks: int = 0
    missed_bytes: int = 0


def hot_use(order: Iterable[int], trace: Trace, blocks: BlockMap) -> HotUse:
    """Compare the hot list ``order`` with what the recorded start touched."""
    hot = {block for block in order if not blocks.is_zero(block)}
    touched = {block for block in blocks_of(trace, blocks) if not blocks.is_zero(block)}

    def stored(some: Iterable[int]) -> int:
        return sum(blocks.lengths[block] for block in some)

    unused, missed = hot - touched, touched - hot
    return HotUse(len(hot), stored(hot), len(unused), stored(unused), len(missed), stored(missed))


def load(store: Store, tree: str, key: ProfileKey, size: int) -> list[Trace]:
    """Traces for ``tree`` by ``key``; when there are none, those of any job."""
    try:
        found = list(_read(store, key.prefix(tree), tree, size))
        return found or list(_read(store, f"profiles/{tree}", tree, size))
    except BootseerError as exc:
        log.warning("no profile for tree %s: %s", tree[:12], exc)
        return []


def load_own(store: Store, tree: str, key: ProfileKey, size: int) -> list[Trace]:
    """Traces by ``key`` only. Raises `UnavailableError` and kin."""
    return list(_read(store, key.prefix(tree), tree, size))


def _read(store: Store, prefix: str, tree: str, size: int) -> Iterator[Trace]:
    taken = 0
    # A few at once: 32 traces one after the other would be as many round trips.
    with ThreadPoolExecutor(_READERS, thread_name_prefix="traces") as pool:
        found = (info for info in store.some(prefix) if info.key.endswith(".trace"))
        while taken < MAX_TRACES and (some := list(itertools.islice(found, MAX_TRACES - taken))):
            for trace in pool.map(lambda info: _read_one(store, info, tree, size), some):
                if trace is not None:
                    taken += 1
                    yield trace


def _read_one(store: Store, info: ObjectInfo, tree: str, size: int) -> Trace | None:
    try:
        if info.size > MAX_BYTES:
            raise DataError(f"{info.size} bytes are too many")
        raw = store.get(info.key)
        if info.key.rpartition("/")[2] != f"{_hash.hexdigest(raw)}.trace":
            raise DataError("its name is not its digest")
        trace = Trace.decode(raw)
        if trace.tree != tree or trace.size != size:
            raise DataError("it is of another tree")
    except BootseerError as exc:
        log.warning("ignoring trace %s: %s", info.key, exc)
        return None
    return trace


def publish(store: Store, key: ProfileKey, trace: Trace, blocks: BlockMap) -> str:
    """Add ``trace`` to the profile if it says something new. Returns what happened, in a word for the status."""
    try:
        mine = blocks_of(trace, blocks)
        if not mine:
            return "empty"
        known = list(_read(store, key.prefix(trace.tree), trace.tree, trace.size))
        complete = [other for other in known if other.complete]
        # one a day is news by itself: what jobs no longer read must leave the profile, too
        old = trace.complete and trace.began - max((other.began for other in complete), default=0) > DAY
        if (len(known) >= MAX_TRACES and not old) or (complete and not trace.complete):
            return "not needed"
        if len(complete) >= _ENOUGH and not old and _news(mine, complete, blocks) <= _NEWS:
            return "not needed"
        if len(known) >= MAX_TRACES:
            oldest = min(known, key=lambda other: other.began)
            store.delete(f"{key.prefix(trace.tree)}/{_hash.hexdigest(oldest.encode())}.trace")
        raw = trace.encode()
        store.put(f"{key.prefix(trace.tree)}/{_hash.hexdigest(raw)}.trace", raw)
    except BootseerError as exc:
        log.warning("cannot publish the trace of tree %s: %s", trace.tree[:12], exc)
        return "failed"
    return "published" if trace.complete else "published incomplete"


def left_to_me(store: Store, key: ProfileKey, tree: str, nodes: Nodes, hurry: threading.Event) -> bool:
    """Whether this node is to publish, after a rest that ``hurry`` ends. One that was not chosen does so where, a while
    later, nobody has: a job may be said to be larger than it is."""
    if nodes.chosen(tree):
        hurry.wait(nodes.delay())
        return True
    if hurry.wait(_LONGEST_DELAY + nodes.delay()):
        return False
    try:
        return not any(info.key.endswith(".trace") for info in store.list(key.prefix(tree)))
    except BootseerError as exc:
        log.warning("cannot look for traces of tree %s: %s", tree[:12], exc)
        return False


def trim(store: Store, prefix: str) -> int:
    """Delete the traces in the store folder ``prefix`` that nobody would read: nodes that publish at the same moment do
    not see one another. Returns how many. Raises `UnavailableError` and kin."""
    extra = sorted(info.key for info in store.some(prefix) if info.key.endswith(".trace"))[MAX_TRACES:]
    for key in extra:
        store.delete(key)
    return len(extra)


def _news(mine: Iterable[int], known: Sequence[Trace], blocks: BlockMap) -> float:
    """The share of ``mine`` that no known trace has."""
    seen = {block for trace in known for block in blocks_of(trace, blocks)}
    wanted = list(mine)
    return sum(block not in seen for block in wanted) / len(wanted)
