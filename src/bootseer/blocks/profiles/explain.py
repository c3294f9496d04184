"""What recorded starts say: which files, folders and processes touched how much and when.

Everything is in bytes of the tree's data, touched in units of 4 KiB; the kernel's readahead counts as touched (see
``docs/internals/trace.md``). Nothing here is on the way of a start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec

from bootseer.blocks.formats.trace import UNIT, Process, Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.merge import blocks_of, merge, select, units_of
from bootseer.chunks.blockmap import BlockMap
from bootseer.erofs import ExtentIndex
from bootseer.errors import NotFoundError
from bootseer.objects import Store
from bootseer.ranges import runs

_POINTS = 60


class Recorded(msgspec.Struct, frozen=True):
    """A recorded start in a store. ``digest`` names it, ``job`` is the folder of its profile."""

    job: str
    digest: str
    key: str
    trace: Trace


class FileUse(msgspec.Struct):
    """``touched`` of a file's ``size`` bytes of data, first ``seconds`` after the mount."""

    path: str
    size: int
    touched: int
    seconds: float


class FolderUse(msgspec.Struct):
    """All files below a folder together."""

    path: str
    files: int
    touched: int


class ProcessUse(msgspec.Struct):
    """What one process touched first. Without a name where it had ended before it could be asked."""

    pid: int
    comm: str
    rank: int | None
    cgroup: str
    files: int
    touched: int
    first: float
    last: float


class Point(msgspec.Struct, frozen=True):
    """``touched`` bytes by then."""

    seconds: float
    touched: int


class Usage(msgspec.Struct, frozen=True):
    """One start. Files, folders and processes come with the most bytes first; ``unowned`` bytes belong to no file
    (padding that readahead brought)."""

    data_size: int
    touched: int
    unowned: int
    seconds: float
    files: list[FileUse]
    folders: list[FolderUse]
    processes: list[ProcessUse]
    timeline: list[Point]


def recorded(store: Store, tree: str, size: int) -> list[Recorded]:
    """The starts a store knows of a tree whose data has ``size`` bytes, oldest first.

    A damaged trace is left out with a line in the log.
    """
    found = []
    for info in store.list(f"profiles/{tree}"):
        parts = info.key.split("/")
        if len(parts) != 4 or not parts[3].endswith(".trace"):
            continue
        if (trace := library.read_trace(store, info, tree, size)) is not None:
            found.append(Recorded(parts[2], parts[3].removesuffix(".trace"), info.key, trace))
    return sorted(found, key=lambda one: (one.trace.began, one.digest))


def choose(starts: Sequence[Recorded], what: str) -> list[Recorded]:
    """Those of the job ``what``, or the one whose digest begins with it (at least 6 digits); all for an empty text.

    Raises `NotFoundError`.
    """
    if not what:
        return list(starts)
    folder = library.ProfileKey(what).folder
    found = [one for one in starts if one.job == folder]
    if not found and len(what) >= 6:
        found = [one for one in starts if one.digest.startswith(what.lower())]
    if not found:
        hint = f"recorded are {', '.join(sorted({one.job for one in starts})) or 'none'}"
        raise NotFoundError(f"no start of a job {what} has been recorded, and no trace begins so", hint=hint)
    return found


def usage(trace: Trace, index: ExtentIndex) -> Usage:
    """What one start touched, by file, folder and process, and over time."""
    sizes = index.sizes()
    named = {process.pid: process for process in trace.processes}
    files: dict[bytes, FileUse] = {}
    processes: dict[int, ProcessUse] = {}
    pairs: set[tuple[int, bytes]] = set()
    total = 0
    for touch in trace.touches:
        seconds, (offset, length) = touch.ms / 1000, _range(touch.unit, touch.count, trace.size)
        total += length
        if touch.pid not in processes:
            who = named.get(touch.pid, Process(touch.pid, ""))
            rank = who.rank if who.rank >= 0 else None
            processes[touch.pid] = ProcessUse(touch.pid, who.comm, rank, who.cgroup, 0, 0, seconds, seconds)
        process = processes[touch.pid]
        process.touched += length
        process.last = max(process.last, seconds)
        for path, count in index.files(offset, length):
            if path not in files:
                files[path] = FileUse(path_text(path), sizes.get(path, 0), 0, seconds)
            files[path].touched += count
            process.files += (touch.pid, path) not in pairs
            pairs.add((touch.pid, path))
    return Usage(
        trace.size,
        total,
        total - sum(use.touched for use in files.values()),
        max((touch.ms for touch in trace.touches), default=0) / 1000,
        _ranked(files.values()),
        _ranked(_folders(files)),
        _ranked(processes.values()),
        timeline(trace),
    )


_Use = TypeVar("_Use", FileUse, FolderUse, ProcessUse)


def _ranked(rows: Iterable[_Use]) -> list[_Use]:
    return sorted(rows, key=lambda row: -row.touched)


def _folders(files: Mapping[bytes, FileUse]) -> Iterable[FolderUse]:
    found: dict[bytes, FolderUse] = {}
    for path, use in files.items():
        while path:
            path = path.rpartition(b"/")[0]
            row = found.setdefault(path, FolderUse(path_text(path), 0, 0))
            row.files += 1
            row.touched += use.touched
    return found.values()


def timeline(trace: Trace) -> list[Point]:
    """Bytes touched over time, in at most 60 points, the last one at the end."""
    if not trace.touches:
        return []
    end = max(touch.ms for touch in trace.touches)
    step = max(1, -(-(end + 1) // _POINTS))
    slots = [0] * (end // step + 1)
    for touch in trace.touches:
        slots[touch.ms // step] += _range(touch.unit, touch.count, trace.size)[1]
    return [Point(min(end, (number + 1) * step) / 1000, touched) for number, touched in enumerate(accumulate(slots))]


def ranges_of(units: Iterable[int], size: int) -> Iterator[tuple[int, int]]:
    """Units as (offset, length) of consecutive ones, cut at the end of the data."""
    for first, count in runs(units):
        yield _range(first, count, size)


def _range(unit: int, count: int, size: int) -> tuple[int, int]:
    """Offset and length of ``count`` units, cut at the end of the data."""
    return unit * UNIT, min(count * UNIT, size - unit * UNIT)


def bytes_by_file(ranges: Iterable[tuple[int, int]], index: ExtentIndex) -> Counter[bytes]:
    """How much of each file lies in the (offset, length) ``ranges`` of the data."""
    found: Counter[bytes] = Counter()
    for offset, length in ranges:
        for path, count in index.files(offset, length):
            found[path] += count
    return found


def path_text(path: bytes) -> str:
    return "/" + path.decode(errors="backslashreplace")


# -- what a prefetch was good for ----------------------------------------------------------------------------------


class FileShare(msgspec.Struct, frozen=True):
    """``bytes`` of a file, ``share`` of all bytes of the list it is in."""

    path: str
    bytes: int
    share: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefetch was good for in one run. Waste is what it brought and the run did not touch, a miss what the run
    touched and it did not bring. ``*_stored`` are bytes as they come over the network."""

    runs: int
    """Earlier starts that the prefetch goes by; 0: there was none."""
    hot: int
    hot_stored: int
    touched: int
    """By the run, in whole blocks."""
    waste: int
    waste_stored: int
    waste_share: float
    misses: int
    misses_stored: int
    misses_share: float
    """Of the blocks that the run touched."""
    wasted_files: list[FileShare]
    missed_files: list[FileShare]
    left_out: list[Process]
    """Processes of the run that read a large part of the tree; nothing here counts what they touched."""


def explain(run: Trace, before: Sequence[Trace], blocks: BlockMap, index: ExtentIndex) -> Explanation:
    """What a prefetch by the starts ``before`` was good for in ``run``.

    Judged is the hot list that these traces merge to. A hot pack that the mount streamed was made of traces that were
    there when it was built: what has been recorded since is not in it.
    """
    hot = {block for block in merge(before, blocks) if not blocks.is_zero(block)}
    touched = {block for block in blocks_of(run, blocks) if not blocks.is_zero(block)}
    wasted, missed = hot - touched, touched - hot
    # Of a missed block only what was touched: the rest of it is nobody's wish.
    units = (unit for unit in units_of(run) if unit * UNIT >> blocks.shift in missed)

    def size(some: Iterable[int]) -> int:
        return sum(map(blocks.length_of, some))

    def stored(some: Iterable[int]) -> int:
        return sum(blocks.lengths[block] for block in some)

    return Explanation(
        runs=len(select(before)),
        hot=size(hot),
        hot_stored=stored(hot),
        touched=size(touched),
        waste=size(wasted),
        waste_stored=stored(wasted),
        waste_share=size(wasted) / size(hot) if hot else 0.0,
        misses=size(missed),
        misses_stored=stored(missed),
        misses_share=size(missed) / size(touched) if touched else 0.0,
        wasted_files=_shares(((block << blocks.shift, blocks.length_of(block)) for block in wasted), index),
        missed_files=_shares(ranges_of(units, blocks.size), index),
        left_out=library.left_out(run),
    )


def _shares(ranges: Iterable[tuple[int, int]], index: ExtentIndex) -> list[FileShare]:
    found = bytes_by_file(ranges, index)
    total = sum(found.values())
    rows = [FileShare(path_text(path), count, count / total) for path, count in found.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.path))
