"""What recorded starts say: which files, folders and processes touched how much and when.

Everything is in bytes of the tree's data, touched in units of 4 KiB; the kernel's readahead counts as touched (see
``docs/internals/trace.md``). Nothing here is on the way of a start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.trace import UNIT, Process, Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.merge import blocks_of, merge, select
from bootseer.erofs import ExtentIndex
from bootseer.errors import NotFoundError
from bootseer.store import Store

_POINTS = 60


class Recorded(msgspec.Struct, frozen=True):
    """A recorded start in a store. ``digest`` names it, ``job`` is the folder of its profile."""

    job: str
    digest: str
    key: str
    trace: Trace


class FileUse(msgspec.Struct, frozen=True):
    """``touched`` of a file's ``size`` bytes of data, first ``seconds`` after the mount."""

    path: str
    size: int
    touched: int
    seconds: float


class FolderUse(msgspec.Struct, frozen=True):
    """All files below a folder together."""

    path: str
    files: int
    touched: int
    seconds: float


class ProcessUse(msgspec.Struct, frozen=True):
    """What one process touched first. Without a name where it had ended before it could be asked, and in traces of
    version 1."""

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


def recorded(store: Store, tree: str, size: int, job: str | None = None) -> list[Recorded]:
    """The starts a store knows of a tree whose data has ``size`` bytes, oldest first; those of one job, if given.

    A damaged trace is left out with a line in the log.
    """
    folder = f"profiles/{tree}"
    if job is not None:
        folder += f"/{library.ProfileKey(job).folder}"
    found = []
    for info in store.list(folder):
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
    files: dict[bytes, list[int]] = {}
    processes: dict[int, list[int]] = {}
    of_process: dict[int, set[bytes]] = {}
    total = owned = 0
    for touch in trace.touches:
        offset, length = touch.unit * UNIT, touch.count * UNIT
        length = min(length, trace.size - offset)
        total += length
        row = processes.setdefault(touch.pid, [0, touch.ms, touch.ms])
        row[0] += length
        row[1], row[2] = min(row[1], touch.ms), max(row[2], touch.ms)
        mine = of_process.setdefault(touch.pid, set())
        for path, count in index.files(offset, length):
            owned += count
            use = files.setdefault(path, [0, touch.ms])
            use[0] += count
            use[1] = min(use[1], touch.ms)
            mine.add(path)
    return Usage(
        trace.size,
        total,
        total - owned,
        max((touch.ms for touch in trace.touches), default=0) / 1000,
        _ranked(FileUse(path_text(path), sizes.get(path, 0), count, ms / 1000) for path, (count, ms) in files.items()),
        _ranked(_folders(files)),
        _ranked(_processes(trace, processes, of_process)),
        timeline(trace),
    )


_Use = TypeVar("_Use", FileUse, FolderUse, ProcessUse)


def _ranked(rows: Iterable[_Use]) -> list[_Use]:
    return sorted(rows, key=lambda row: -row.touched)


def _folders(files: Mapping[bytes, Sequence[int]]) -> Iterator[FolderUse]:
    found: dict[bytes, list[int]] = {}
    for path, (count, ms) in files.items():
        while path:
            path = path.rpartition(b"/")[0]
            row = found.setdefault(path, [0, 0, ms])
            row[0] += 1
            row[1] += count
            row[2] = min(row[2], ms)
    for path, (number, count, ms) in found.items():
        yield FolderUse(path_text(path), number, count, ms / 1000)


def _processes(
    trace: Trace, rows: Mapping[int, Sequence[int]], files: Mapping[int, set[bytes]]
) -> Iterator[ProcessUse]:
    known = {process.pid: process for process in trace.processes}
    for pid, (count, first, last) in rows.items():
        who = known.get(pid, Process(pid, ""))
        rank = who.rank if who.rank >= 0 else None
        yield ProcessUse(pid, who.comm, rank, who.cgroup, len(files[pid]), count, first / 1000, last / 1000)


def timeline(trace: Trace) -> list[Point]:
    """Bytes touched over time, in at most 60 points, the last one at the end."""
    if not trace.touches:
        return []
    end = max(touch.ms for touch in trace.touches)
    step = max(1, -(-(end + 1) // _POINTS))
    slots = [0] * (end // step + 1)
    for touch in trace.touches:
        slots[touch.ms // step] += min(touch.count * UNIT, trace.size - touch.unit * UNIT)
    points, total = [], 0
    for number, count in enumerate(slots):
        total += count
        points.append(Point(min(end, (number + 1) * step) / 1000, total))
    return points


def units_of(traces: Iterable[Trace]) -> dict[int, int]:
    """Unit -> milliseconds of its earliest touch in any trace."""
    found: dict[int, int] = {}
    for trace in traces:
        for touch in trace.touches:
            for unit in range(touch.unit, touch.unit + touch.count):
                if found.get(unit, touch.ms) >= touch.ms:
                    found[unit] = touch.ms
    return found


def ranges_of(units: Iterable[int], size: int) -> Iterator[tuple[int, int]]:
    """Units as (offset, length) of consecutive ones, cut at the end of the data."""
    first = last = -1
    for unit in sorted(units):
        if unit != last + 1 or first < 0:
            if first >= 0:
                yield first * UNIT, min(size, (last + 1) * UNIT) - first * UNIT
            first = unit
        last = unit
    if first >= 0:
        yield first * UNIT, min(size, (last + 1) * UNIT) - first * UNIT


def bytes_by_file(ranges: Iterable[tuple[int, int]], index: ExtentIndex) -> dict[bytes, int]:
    """How much of each file lies in the (offset, length) ``ranges`` of the data."""
    found: dict[bytes, int] = {}
    for offset, length in ranges:
        for path, count in index.files(offset, length):
            found[path] = found.get(path, 0) + count
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
    used = select(before)
    hot = [block for block in merge(before, blocks) if not blocks.is_zero(block)]
    touched = [block for block in blocks_of(run, blocks) if not blocks.is_zero(block)]
    wasted, missed = sorted(set(hot) - set(touched)), sorted(set(touched) - set(hot))

    def size(some: Iterable[int]) -> int:
        return sum(map(blocks.length_of, some))

    def stored(some: Iterable[int]) -> int:
        return sum(blocks.lengths[block] for block in some)

    units = units_of([run])
    shift = blocks.shift
    missing = set(missed)
    return Explanation(
        runs=len(used),
        hot=size(hot),
        hot_stored=stored(hot),
        touched=size(touched),
        waste=size(wasted),
        waste_stored=stored(wasted),
        waste_share=size(wasted) / size(hot) if hot else 0.0,
        misses=size(missed),
        misses_stored=stored(missed),
        misses_share=size(missed) / size(touched) if touched else 0.0,
        wasted_files=_shares(((block << shift, blocks.length_of(block)) for block in wasted), index),
        # Of a missed block only what was touched: the rest of it is nobody's wish.
        missed_files=_shares(
            ranges_of((unit for unit in units if unit * UNIT >> shift in missing), blocks.size), index
        ),
        left_out=library.left_out(run),
    )


def _shares(ranges: Iterable[tuple[int, int]], index: ExtentIndex) -> list[FileShare]:
    found = bytes_by_file(ranges, index)
    total = sum(found.values())
    rows = [FileShare(path_text(path), count, count / total) for path, count in found.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.path))
