"""What recorded starts touched: which files and folders, how much and when, and how two sets of starts differ. In bytes
of the tree's data, touched in units of 4 KiB; the kernel's readahead counts as touched (``docs/internals/trace.md``).
Nothing here is on the way of a start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.merge import units_of
from bootseer.chunks.blockmap import BlockMap
from bootseer.erofs import ExtentIndex
from bootseer.errors import NotFoundError
from bootseer.objects import Store
from bootseer.ranges import runs


class Recorded(msgspec.Struct, frozen=True):
    """A recorded start in a store. ``digest`` names it, ``job`` is the folder of its profile, below an owner's."""

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


class Usage(msgspec.Struct, frozen=True):
    """One start. Files and folders come with the most bytes first; ``unowned`` bytes belong to no file (padding)."""

    data_size: int
    touched: int
    unowned: int
    seconds: float
    files: list[FileUse]
    folders: list[FolderUse]


def recorded(store: Store, tree: str, size: int) -> list[Recorded]:
    """The starts a store knows of a tree whose data has ``size`` bytes, oldest first. A damaged one is logged."""
    found = []
    for folder in (f"profiles/{tree}", f"{library.OWNED}/{tree}"):
        for info in store.list(folder):
            job, _, name = info.key.removeprefix(f"{folder}/").rpartition("/")
            if not name.endswith(".trace"):
                continue
            if (trace := library.read_trace(store, info, tree, size)) is not None:
                found.append(Recorded(job, name.removesuffix(".trace"), info.key, trace))
    return sorted(found, key=lambda one: (one.trace.began, one.digest))


def choose(starts: Sequence[Recorded], what: str) -> list[Recorded]:
    """Those of the job ``what`` (of all owners, or ``OWNER/JOB``), or the one whose digest begins with it (at least 6
    digits); all for an empty text. Raises `NotFoundError`."""
    if not what:
        return list(starts)
    folder = library.ProfileKey(what).folder
    found = [one for one in starts if one.job == what or one.job.rpartition("/")[2] == folder]
    if not found and len(what) >= 6:
        found = [one for one in starts if one.digest.startswith(what.lower())]
    if not found:
        hint = f"recorded are {', '.join(sorted({one.job for one in starts})) or 'none'}"
        raise NotFoundError(f"no start of a job {what} has been recorded, and no trace begins so", hint=hint)
    return found


def usage(trace: Trace, index: ExtentIndex) -> Usage:
    """What one start touched, by file and folder."""
    sizes = index.sizes()
    files: dict[bytes, FileUse] = {}
    total = 0
    for touch in trace.touches:
        offset, length = _range(touch.unit, touch.count, trace.size)
        total += length
        for path, count in index.files(offset, length):
            if path not in files:
                files[path] = FileUse(path_text(path), sizes.get(path, 0), 0, touch.ms / 1000)
            files[path].touched += count
    return Usage(
        trace.size,
        total,
        total - sum(use.touched for use in files.values()),
        max((touch.ms for touch in trace.touches), default=0) / 1000,
        _ranked(files.values()),
        _ranked(_folders(files)),
    )


_Use = TypeVar("_Use", FileUse, FolderUse)


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


class FileDiff(msgspec.Struct, frozen=True):
    """Bytes of a file that only one side touched, or both."""

    path: str
    only_here: int
    only_there: int
    both: int


class Difference(msgspec.Struct, frozen=True):
    """Two sides. Of two trees, files are compared by path, and ``shared_blocks`` counts bytes of touched blocks that
    both have, wherever they are."""

    same_tree: bool
    only_here: int
    only_there: int
    both: int
    shared_blocks: int
    files: list[FileDiff]


class Side(msgspec.Struct, frozen=True):
    """One side of a comparison: starts of a tree, of which there is at least one."""

    traces: list[Trace]
    index: ExtentIndex
    blocks: BlockMap

    def units(self) -> set[int]:
        """What any of the starts touched, in units of 4 KiB."""
        return {unit for trace in self.traces for unit in units_of(trace)}

    def by_file(self, units: Iterable[int]) -> Counter[bytes]:
        return bytes_by_file(ranges_of(units, self.blocks.size), self.index)

    def hashes(self, units: Iterable[int]) -> dict[bytes, int]:
        """The blocks of ``units``: hash -> bytes."""
        touched = {unit * UNIT >> self.blocks.shift for unit in units}
        return {self.blocks.hash_of(block): self.blocks.length_of(block) for block in touched}


def compare(here: Side, there: Side) -> Difference:
    """How two sides differ."""
    same = here.traces[0].tree == there.traces[0].tree
    units, others = here.units(), there.units()
    if same:
        groups = [units - others, others - units, units & others]
        only_here, only_there, both = map(here.by_file, groups)
        totals = [sum(length for _, length in ranges_of(group, here.blocks.size)) for group in groups]
    else:
        mine, theirs = here.by_file(units), there.by_file(others)
        only_here, only_there, both = mine - theirs, theirs - mine, mine & theirs
        totals = [group.total() for group in (only_here, only_there, both)]
    files = [
        FileDiff(path_text(path), only_here[path], only_there[path], both[path])
        for path in only_here.keys() | only_there.keys() | both.keys()
    ]
    files.sort(key=lambda row: (-(row.only_here + row.only_there), row.path))
    hashes = there.hashes(others)
    shared = sum(length for digest, length in here.hashes(units).items() if digest in hashes)
    return Difference(same, totals[0], totals[1], totals[2], shared, files)
