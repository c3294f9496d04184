"""Making the hot pack and the page list of a job after a recorded start, and putting them into the store. `renew` runs
when a trace was published. It logs trouble and never raises for it: a profile is advice."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bootseer import faults
from bootseer.blocks.formats import hotpack
from bootseer.blocks.formats.hotpack import HotPack
from bootseer.blocks.formats.pagelist import LONGEST, PageList, PageRange
from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.layout import Part, layout_of
from bootseer.blocks.profiles.library import ProfileKey, Target, newest_pack
from bootseer.blocks.profiles.merge import in_order, merge, units_of
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.cachefile import ReadyBlocks
from bootseer.chunks.zstd import compress
from bootseer.errors import BootseerError, DataError, NotFoundError, doing, logged
from bootseer.objects import Store

log = logging.getLogger(__name__)

_FRAME = 1 << 20
"""Bytes of blocks: neighbours in time are of one kind, often of one file. What this and the level save, and what they
cost: the table in ``docs/internals/hotpack.md``."""
LEVEL = 12
QUICK_LEVEL = 3
"""Once somebody waits for the end."""
_SHARE = 0.25
"""Of a core. A low priority would be simpler, but a thread that does not run while it holds the interpreter's lock
holds up the readers of this process."""
_NEW = 0.01
_OLD = 0.1
"""A hot pack or page list is renewed when more than this share of what is wanted is not in it, or of it not wanted."""
_THERE = 0.95
"""Share of the hot list that must be in the cache: what is missing would be missing from the pack for good."""
_CLAIM_SECONDS = 900.0
_MAX_CLAIM = 32
_COPIES = 10
"""Replicas of a hot pack in HDFS: what Hadoop itself gives files that all nodes of a job read as they start
(``mapreduce.client.submit.file.replication``)."""
_TRACES = 5
"""Traces that a page list is made of: the newest."""
_HALF = 0.5
"""Share of them that touched what is in the list."""
MAX_UNITS = 1 << 19
"""Units that a page list may have, 2 GiB: making one takes memory for each, in a process beside the job."""
_WINDOW = 2048
"""Units, 8 MiB, whose order among each other counts for less than that few ranges have them."""


def renew(
    store: Store,
    key: ProfileKey,
    target: Target,
    ready: ReadyBlocks[BlockMap],
    *,
    meta: Path,
    work: Path,
    stop: threading.Event,
    hurry: threading.Event,
) -> tuple[str, str]:
    """Make and publish a new hot pack, and a page list of the newest one, where they say something new. Takes a while:
    give it a thread of its own. ``meta``: the tree's metadata. ``work``: a folder with space for the pack. ``stop``
    ends it, ``hurry`` its rests. Returns what happened to the pack and to the list: ``published``, ``not needed``
    (there is a good one), ``no traces``, ``not ready`` (blocks are missing in the cache), ``no hot pack``, ``retired``
    (the pack, meanwhile), ``made elsewhere`` (another node is at it), ``over budget`` (of the owner), ``stopped`` or
    ``failed``."""
    folder = key.prefix(target.tree)
    pack = pages = "failed"
    try:
        traces = library.load_own(store, target.tree, key, target.map.size)
        if not traces:
            return "no traces", "no traces"
        with _claimed(store, f"{folder}/hot.claim") as mine:
            if not mine:
                return "made elsewhere", "made elsewhere"
            pack = _renew_pack(store, key, target, ready, traces, work=work, stop=stop, hurry=hurry)
            pages = "stopped" if stop.is_set() else _renew_pages(store, folder, target, traces, meta)
    except (BootseerError, OSError, ValueError) as exc:
        log.warning("no new hot pack or page list for tree %s: %s", target.tree[:12], exc)
    except Exception:
        log.exception("no new hot pack or page list for tree %s", target.tree[:12])
    return pack, pages


def _renew_pack(
    store: Store,
    key: ProfileKey,
    target: Target,
    ready: ReadyBlocks[BlockMap],
    traces: Sequence[Trace],
    *,
    work: Path,
    stop: threading.Event,
    hurry: threading.Event,
) -> str:
    folder = key.prefix(target.tree)
    order = [block for block in merge(traces, target.map) if not target.map.is_zero(block)]
    if not order:
        return "no traces"
    known = newest_pack(store, folder, target)
    if known is not None and _like(known.pack.blocks, order):
        return "not needed"
    if sum(ready.is_ready(block, block) for block in order) < _THERE * len(order):
        return "not ready"
    library.trim(store, folder)
    path = work / f".hotpack-{uuid.uuid4().hex}"
    try:
        pack = build(ready, order, path, target, created=time.time_ns(), stop=stop, hurry=hurry)
        if pack is None:
            return "stopped"
        retired = known.pack.size if known else 0
        if not library.has_traces(store, folder):  # a profile that made room for others meanwhile stays away
            return "no traces"
        if not library.make_room(store, key, target.tree, target.map, pack.size - retired):
            return "over budget"
        log.info("hot pack of %d blocks, %d bytes", len(pack.blocks), pack.size)
        publish(store, folder, path, pack, target)
    finally:
        path.unlink(missing_ok=True)
    return "published"


def _renew_pages(store: Store, folder: str, target: Target, traces: Sequence[Trace], meta: Path) -> str:
    known = newest_pack(store, folder, target)
    if known is None:
        return "no hot pack"
    name = hotpack.pages_key(known.key)
    old: PageList | None = None
    with contextlib.suppress(NotFoundError, DataError):  # there is none, or one to be replaced
        old = library.load_pages(store, name, target.tree, target.map.size)
    complete = [trace for trace in traces if trace.complete]
    if not complete:
        return "no traces"
    pages = build_pages(complete, target.tree, meta, time.time_ns())
    if old is not None and old.fresh and _like(_units(old), _units(pages)):
        return "not needed"
    if not store.exists(known.key):
        return "retired"
    store.put(name, pages.encode(), overwrite=True)
    return "published"


def build(
    ready: ReadyBlocks[BlockMap],
    order: Iterable[int],
    path: Path,
    target: Target,
    *,
    created: int,
    stop: threading.Event,
    hurry: threading.Event,
) -> HotPack | None:
    """Write the hot pack of those blocks of ``order`` that are ``ready`` to ``path`` (a new file).

    Works on one frame at a time and rests in between, so that it takes `_SHARE` of one core, until ``hurry`` is set:
    from then on without rests, and with less compression. Within a frame blocks are in the order of the file, in which
    they are written. Returns None when ``stop`` is set or no block is there; the file is of no use then, nor after an
    error. Raises `DataError` when a block is not what the map says, `FullError` and kin."""
    blocks = ready.map
    wanted = [block for block in dict.fromkeys(order) if not blocks.is_zero(block) and ready.is_ready(block, block)]
    wanted = wanted[: hotpack.MAX_BLOCKS]
    per_frame = max(1, _FRAME >> blocks.shift)
    groups = [sorted(wanted[at : at + per_frame]) for at in range(0, len(wanted), per_frame)]
    numbers, lengths = array("I", [block for group in groups for block in group]), array("I")
    if not wanted:
        return None
    with doing(f"write a hot pack to {path}"), open(path, "xb") as out:
        out.seek(hotpack.index_size(len(wanted), per_frame))
        for group in groups:
            began = time.monotonic()
            frame = _frame(ready, group, QUICK_LEVEL if hurry.is_set() else LEVEL)
            out.write(frame)
            lengths.append(len(frame))
            hurry.wait((time.monotonic() - began) * (1 / _SHARE - 1))
            if stop.is_set():
                return None
        pack = HotPack(target.tree, target.map_digest, created, blocks.block_size, numbers, lengths, per_frame)
        out.seek(0)
        out.write(pack.encode())
    return pack


def _frame(ready: ReadyBlocks[BlockMap], group: Sequence[int], level: int) -> bytes:
    blocks = ready.map
    parts = []
    for block in group:
        faults.point("blocks.hotpack.block")
        data = ready.read(block << blocks.shift, blocks.length_of(block))
        if not blocks.matches(block, data):
            raise DataError(f"block {block} in the cache is damaged")
        parts.append(data)
    return compress(b"".join(parts), level)


def publish(store: Store, folder: str, path: Path, pack: HotPack, target: Target) -> str:
    """Put the hot pack at ``path`` into the store folder ``profiles/<tree>/<job>``, then remove older ones of it (and
    those that cannot be read) and their page lists, of which readers go on with the packs. Returns the key."""
    key = hotpack.pack_key(folder, hashing.file_hexdigest(path))
    store.put(key, path)
    try:
        store.replicate(key, _COPIES)
    except BootseerError as exc:  # a quota, or a cluster that allows fewer
        log.warning("the hot pack %s stays at the replication of the store: %s", key, exc)
    faults.point("blocks.hotpack.before-retire")
    found = library.packs(store, folder, target)
    left = {one.key for one in found if hotpack.age_order(one.pack.created) >= pack.created} | {key}
    for info in list(store.list(folder)):
        retired = hotpack.is_pack(info.key) and info.key not in left
        if retired or (info.key.endswith(".pages") and not hotpack.is_pages_of(info.key, left)):
            store.delete(info.key)
    return key


def build_pages(traces: Sequence[Trace], tree: str, meta: Path, created: int) -> PageList:
    """The list of what at least half of the newest ``traces`` touched, in the order of the median first touch; of one
    trace, all that it touched. ``meta``: the tree's metadata, which says what file each unit belongs to. Raises
    `DataError` when there are too many units."""
    used = sorted(traces, key=lambda trace: trace.began)[-_TRACES:]
    if any(sum(touch.count for touch in trace.touches) > MAX_UNITS for trace in used):
        raise DataError(f"starts that read more than {MAX_UNITS * UNIT >> 30} GiB are not read ahead of")
    units = in_order([units_of(trace) for trace in used], _HALF)
    return PageList(tree, created, list(joined(units, layout_of(meta))))


def joined(units: Sequence[int], parts: Sequence[Part]) -> Iterator[PageRange]:
    """Units in order as ranges of files. Neighbours within one window of `_WINDOW` units of that order are read one
    after another, at the turn of the first: starts jump about in a library, and each jump costs an event."""
    starts = [part.unit for part in parts]
    for begin in range(0, len(units), _WINDOW):
        placed = []
        for turn, unit in enumerate(units[begin : begin + _WINDOW]):
            index = bisect_right(starts, unit) - 1
            if index >= 0 and unit < parts[index].unit + parts[index].units:  # else padding: readahead brought it
                data, _, path, first = parts[index]
                placed.append((path, first + unit - data, unit, turn))
        runs: list[list[tuple[bytes, int, int, int]]] = []
        for one in sorted(placed):
            path, offset, unit, _ = runs[-1][-1] if runs else (b"", 0, 0, 0)
            if (path, offset + 1, unit + 1) == one[:3]:
                runs[-1].append(one)
            else:
                runs.append([one])
        for run in sorted(runs, key=lambda run: min(turn for *_, turn in run)):
            for at in range(0, len(run), LONGEST):
                path, offset, unit, _ = run[at]
                yield PageRange(path, offset * UNIT, unit * UNIT, min(LONGEST, len(run) - at) * UNIT)


def _units(pages: PageList) -> set[int]:
    return {unit for one in pages.ranges for unit in range(one.data // UNIT, (one.data + one.length) // UNIT)}


def _like(have: Iterable[int], want: Iterable[int]) -> bool:
    """Whether what is published (``have``) is good enough for what is wanted now."""
    have, want = set(have), set(want)
    return len(want - have) <= _NEW * len(want) and len(have - want) <= _OLD * len(have)


@contextlib.contextmanager
def _claimed(store: Store, key: str) -> Iterator[bool]:
    """Of the nodes of one job that end their recording together one makes the pack: whether it is this one. A claim is
    void after a while."""
    now = time.time()
    text = f"{now:.0f}".encode()
    mine = store.put(key, text)
    if not mine:
        try:
            age = now - float(store.get(key, most=_MAX_CLAIM))
        except (ValueError, DataError, NotFoundError):  # a link to nothing is there, and is not
            age = _CLAIM_SECONDS
        if mine := not abs(age) < _CLAIM_SECONDS:  # clocks differ a little; NaN is no age
            log.warning("taking over the making of a hot pack from a node that did not end it: %s", key)
            store.put(key, text, overwrite=True)
    try:
        yield mine
    finally:
        if mine:
            with logged(log.warning, "cannot remove %s", key, kinds=BootseerError):
                store.delete(key)
