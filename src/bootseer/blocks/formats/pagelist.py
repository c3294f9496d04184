"""Page lists: which ranges of which files the starts of a job read, in the order they read them
(``docs/internals/pagelist.md``). `profiles.hotpack_builder` makes them, `serving.readahead` reads them. Like a trace a
list is advice."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zstandard

from bootseer.blocks.formats.trace import SEEN_BY_FUSE, UNIT
from bootseer.chunks import hashing, zstd
from bootseer.errors import DataError

MAGIC = b"BSPAGELI"
VERSION = 1
MAX_STORED = 4 << 20
"""Bytes of a list in a store."""
MAX_RANGES, MAX_FILES = 1 << 18, 1 << 16
FRESH = 86_400.0
"""Seconds after which some starts are recorded in full again, as jobs change, and renew a list."""
LONGEST = 32
"""Units of one range, 128 KiB: of a longer one Linux reads no more ahead (``force_page_cache_ra``)."""

_HEADER = struct.Struct("<8sHHI32sQQI4x")  # magic, version, seen by, unit, tree digest, created, ranges, files
_NAME = struct.Struct("<H")
_RANGE = struct.Struct("<IIII")  # file, first unit in the file, first unit of the data, units
_SUM = 32
_MAX_BYTES = 16 << 20
_LEVEL = 9


class PageRange(NamedTuple):
    """``length`` bytes at ``offset`` of the file ``path``, which lie at ``data`` of the tree's data; whole units."""

    path: bytes
    offset: int
    data: int
    length: int


class PageList(msgspec.Struct, frozen=True):
    """What to read ahead of a start, in order. ``tree``: digest, hexadecimal; ``created``: Unix time in nanoseconds."""

    tree: str
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
        header = _HEADER.pack(MAGIC, VERSION, SEEN_BY_FUSE, UNIT, tree, self.created, len(self.ranges), len(files))
        raw = header + names + table
        return zstd.compress(raw + hashing.digest(raw), _LEVEL)

    @classmethod
    def decode(cls, packed: bytes, tree: str, size: int) -> PageList:
        """The list for the tree ``tree`` with ``size`` bytes of data. Raises `DataError` for anything else."""
        raw = _unpacked(packed)
        body, end = raw[:-_SUM], len(raw) - _SUM
        if len(body) < _HEADER.size or hashing.digest(body) != raw[-_SUM:]:
            raise DataError("bad page list: its hash differs")
        magic, version, seen, unit, digest, created, count, files = _HEADER.unpack_from(body)
        if (magic, version, seen, unit) != (MAGIC, VERSION, SEEN_BY_FUSE, UNIT):
            raise DataError(f"bad page list: not one of version {VERSION}, the newest that is known")
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
            if len(path) != length or not is_plain(path):
                raise DataError("bad page list: a name that no file of the tree has")
            paths.append(path)
        if end - at != count * _RANGE.size:
            raise DataError("bad page list: another number of ranges than it says")
        ranges = []
        for file, offset, data, length in _RANGE.iter_unpack(body[at:]):
            if file >= files or not 0 < length <= LONGEST or data * UNIT >= size:
                raise DataError("bad page list: a range that no file of the tree has")
            ranges.append(PageRange(paths[file], offset * UNIT, data * UNIT, length * UNIT))
        return cls(tree, created, ranges)


def _unpacked(packed: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(packed)
    except zstandard.ZstdError as exc:
        raise DataError(f"bad page list: {exc}") from None
    if not 0 <= size <= _MAX_BYTES:
        raise DataError(f"bad page list: {size} bytes")
    return zstd.decompress(packed, size)


def is_plain(path: bytes) -> bool:
    """Whether ``path`` is a plain path below the tree's root."""
    return bool(path) and b"\0" not in path and all(part not in (b"", b".", b"..") for part in path.split(b"/"))
