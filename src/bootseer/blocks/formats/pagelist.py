"""Page lists: which ranges of which files the starts of a job read, in the order they read them.

Made of complete traces and the tree's own metadata, once enough starts agree; read by
`bootseer.blocks.serving.readahead`. Format: ``docs/internals/pagelist.md``. Like a trace it is advice.
"""

from __future__ import annotations

import statistics
import struct
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import NamedTuple

import msgspec
import zstandard

from bootseer.blocks import _hash, _zstd
from bootseer.blocks.formats.trace import DRIVERS, UNIT, Trace
from bootseer.blocks.profiles import profiles
from bootseer.erofs import Reader
from bootseer.errors import DataError
from bootseer.store import Store

MAGIC = b"BSPAGELI"
VERSION = 1
MAX_STORED = 4 << 20
"""Bytes of a list in a store."""
MAX_RANGES, MAX_FILES = 1 << 18, 1 << 16
MAX_UNITS = 1 << 19
"""Units that a list may have, 2 GiB: making one takes memory for each, in a fetcher beside the job."""
FRESH = profiles.DAY
"""Seconds after which some starts are recorded in full again, as jobs change, and renew a list."""
ENOUGH = 3
"""Complete traces of one driver that must agree before starts are read ahead of, and leave none."""
LONGEST = 32
"""Units of one range, 128 KiB: of a longer one Linux reads no more ahead (``force_page_cache_ra``: the readahead window
of the mount)."""

_HEADER = struct.Struct("<8sHHI32sQQI4x")  # magic, version, driver, unit, tree digest, created, ranges, files
_NAME = struct.Struct("<H")
_RANGE = struct.Struct("<IIII")  # file, first unit in the file, first unit of the data, units
_SUM = 32
_MAX_BYTES = 16 << 20
_LEVEL = 9
_TRACES = 5
"""Traces that a list is made of: the newest."""
_WINDOW = 2048
"""Units, 8 MiB, whose order among each other counts for less than that few ranges have them."""


class PageRange(NamedTuple):
    """``length`` bytes at ``offset`` of the file ``path``, which lie at ``data`` of the tree's data; whole units."""

    path: bytes
    offset: int
    data: int
    length: int


class PageList(msgspec.Struct, frozen=True):
    """What to read ahead of a start, in order. ``tree``: digest, hexadecimal; ``driver``: of the traces it is made of;
    ``created``: Unix time in nanoseconds."""

    tree: str
    driver: str
    created: int
    ranges: Sequence[PageRange]

    @property
    def size(self) -> int:
        """Bytes of all ranges."""
        return sum(one.length for one in self.ranges)

    @property
    def fresh(self) -> bool:
        """Made within `FRESH`; clocks may differ by that, too."""
        return abs(time.time() - self.created / 1e9) < FRESH

    def encode(self) -> bytes:
        files: dict[bytes, int] = {}
        table = bytearray()
        for path, offset, data, length in self.ranges:
            file = files.setdefault(path, len(files))
            table += _RANGE.pack(file, offset // UNIT, data // UNIT, length // UNIT)
        names = b"".join(_NAME.pack(len(path)) + path for path in files)
        tree = bytes.fromhex(self.tree)
        header = _HEADER.pack(
            MAGIC, VERSION, DRIVERS.index(self.driver), UNIT, tree, self.created, len(self.ranges), len(files)
        )
        raw = header + names + table
        return _zstd.compress(raw + _hash.digest(raw), _LEVEL)

    @classmethod
    def decode(cls, packed: bytes, tree: str, size: int) -> PageList:
        """The list for the tree ``tree`` with ``size`` bytes of data. Raises `DataError` for anything else."""
        raw = _unpacked(packed)
        body, end = raw[:-_SUM], len(raw) - _SUM
        if len(body) < _HEADER.size or _hash.digest(body) != raw[-_SUM:]:
            raise DataError("bad page list: its hash differs")
        magic, version, driver, unit, digest, created, count, files = _HEADER.unpack_from(body)
        if (magic, version, unit) != (MAGIC, VERSION, UNIT) or driver >= len(DRIVERS):
            raise DataError("not a page list, or one of a newer bootseer")
        if digest.hex() != tree:
            raise DataError("the page list is of another tree")
        if count > MAX_RANGES or files > MAX_FILES:
            raise DataError(f"bad page list: {count} ranges of {files} files are too many")
        at = _HEADER.size
        paths = []
        for _ in range(files):
            if at + _NAME.size > end:
                raise DataError("bad page list: it ends in its names")
            (length,) = _NAME.unpack_from(body, at)
            path = body[at + _NAME.size : at + _NAME.size + length]
            at += _NAME.size + length
            if len(path) != length or not _inside(path):
                raise DataError("bad page list: a name that no file of the tree has")
            paths.append(path)
        if end - at != count * _RANGE.size:
            raise DataError("bad page list: another number of ranges than it says")
        ranges = []
        for file, offset, data, length in _RANGE.iter_unpack(body[at:]):
            if file >= files or not 0 < length <= LONGEST or data * UNIT >= size:
                raise DataError("bad page list: a range that no file of the tree has")
            ranges.append(PageRange(paths[file], offset * UNIT, data * UNIT, length * UNIT))
        return cls(tree, DRIVERS[driver], created, ranges)


def _unpacked(packed: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(packed)
    except zstandard.ZstdError as exc:
        raise DataError(f"bad page list: {exc}") from None
    if not 0 <= size <= _MAX_BYTES:
        raise DataError(f"bad page list: {size} bytes")
    return _zstd.decompress(packed, size)


def _inside(path: bytes) -> bool:
    """Whether ``path`` is a plain path below the tree's root."""
    return bool(path) and b"\0" not in path and all(part not in (b"", b".", b"..") for part in path.split(b"/"))


def load(store: Store, key: str, tree: str, size: int) -> PageList:
    """The list ``key`` of a store, for the tree ``tree`` with ``size`` bytes of data.

    Raises `NotFoundError`, `UnavailableError`, and `DataError` for what is no such list.
    """
    if (stored := store.stat(key).size) > MAX_STORED:
        raise DataError(f"bad page list: {stored} bytes")
    return PageList.decode(store.get(key), tree, size)


def build(traces: Sequence[Trace], driver: str, tree: str, meta: bytes | mmap, created: int) -> PageList:
    """The list of what at least half of the selected ``traces`` touched, in the order of the median first touch.

    ``meta``: the tree's metadata, which says what file each unit belongs to. Raises
    `DataError` when there are too many units.
    """
    used = sorted(profiles.select(traces, driver), key=lambda trace: trace.began)[-_TRACES:]
    if any(sum(touch.count for touch in trace.touches) > MAX_UNITS for trace in used):
        raise DataError(f"starts that read more than {MAX_UNITS * UNIT >> 30} GiB are not read ahead of")
    times: dict[int, list[int]] = {}
    for trace in used:
        for touch in trace.touches:
            for unit in range(touch.unit, touch.unit + touch.count):
                times.setdefault(unit, []).append(touch.ms)
    ranked = sorted(
        (statistics.median(seen), order, unit)
        for order, (unit, seen) in enumerate(times.items())
        if 2 * len(seen) >= len(used)
    )
    return PageList(tree, driver, created, list(_joined([unit for _, _, unit in ranked], _extents(meta))))


def _extents(meta: bytes | mmap) -> list[tuple[int, int, bytes, int]]:
    """What files have of the data, ascending: first unit of the data, units, path, first unit in the file."""
    reader = Reader(meta)
    found: list[tuple[int, int, bytes, int]] = []
    seen: set[int] = set()
    for path, inode in reader.walk():
        if inode.is_file and inode.nid not in seen and _inside(path):
            seen.add(inode.nid)
            for offset, data, size in reader.extents(inode):
                if offset % UNIT == 0 and data % UNIT == 0:
                    found.append((data // UNIT, -(-size // UNIT), path, offset // UNIT))
    return sorted(found)


def _joined(units: Sequence[int], extents: list[tuple[int, int, bytes, int]]) -> Iterator[PageRange]:
    """Units in order as ranges of files. Neighbours within one window of `_WINDOW` units of that order are read one
    after another, at the turn of the first: starts jump about in a library, and each jump costs an event."""
    starts = [extent[0] for extent in extents]
    for begin in range(0, len(units), _WINDOW):
        placed = []
        for turn, unit in enumerate(units[begin : begin + _WINDOW]):
            index = bisect_right(starts, unit) - 1
            if index >= 0 and unit < extents[index][0] + extents[index][1]:  # else padding: readahead brought it
                data, _, path, first = extents[index]
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
