"""A trace: which 4 KiB units of a data file a start touched, when first, and by which process
(``docs/internals/trace.md``). It is advice: `Trace.decode` refuses a damaged or oversized one with `DataError`, and
whoever reads profiles logs that and goes on without."""

from __future__ import annotations

import struct

import msgspec

from bootseer.chunks import hashing
from bootseer.errors import DataError

MAGIC = b"BSTRACE\0"
VERSION = 4
UNIT = 4096
MAX_TOUCHES = 1 << 20
"""Bounds the touches to 20 MiB; a torch start makes about 15,000."""
MAX_BYTES = 160 + 20 * MAX_TOUCHES

COMPLETE = 1
SEEN_BY_FUSE = 1
"""What saw the touches: nothing else does."""

_HEADER = struct.Struct("<8sHHIQQI32sI32s")
_RECORDED = bytes(32)
_TOUCH = struct.Struct("<IIQI")
_MAX_UNIT = 1 << 38


class Touch(msgspec.Struct, frozen=True):
    """``count`` units from ``unit`` on, first touched ``ms`` milliseconds after the mount by process ``pid``."""

    ms: int
    pid: int
    unit: int
    count: int


class Trace(msgspec.Struct, frozen=True):
    """First touches in the order they happened. ``began`` is Unix time; ``tree`` the tree's digest (hexadecimal).
    ``complete`` is false when touches may be missing: recording stopped at its size limit, joined a warm mount, or
    pages were read ahead of the job. ``left_out``: how many processes were, as they read a large part of the tree.
    ``source``: the tree of which the start was, if this one is only predicted; else empty."""

    tree: str
    size: int
    began: int
    complete: bool
    touches: tuple[Touch, ...]
    left_out: int = 0
    source: str = ""

    def encode(self) -> bytes:
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            SEEN_BY_FUSE,
            COMPLETE if self.complete else 0,
            self.size,
            self.began,
            len(self.touches),
            bytes.fromhex(self.tree),
            self.left_out,
            bytes.fromhex(self.source) or _RECORDED,
        )
        body = b"".join([header, *(_TOUCH.pack(t.ms, t.pid, t.unit, t.count) for t in self.touches)])
        return body + hashing.digest(body)

    @classmethod
    def decode(cls, raw: bytes) -> Trace:
        """Parse ``raw``. Raises `DataError` for anything that `encode` would not write."""
        if len(raw) < _HEADER.size + hashing.SIZE:
            raise DataError(f"bad trace: only {len(raw)} bytes")
        magic, version, seen, flags, size, began, count, tree, left_out, source = _HEADER.unpack_from(raw)
        if (magic, version) != (MAGIC, VERSION):
            raise DataError(f"bad trace: not a trace of version {VERSION}, the newest that is known")
        end = len(raw) - hashing.SIZE
        if count > MAX_TOUCHES or _HEADER.size + count * _TOUCH.size != end:
            raise DataError(f"bad trace: {len(raw)} bytes for {count} touches")
        if seen != SEEN_BY_FUSE or flags & ~COMPLETE:
            raise DataError("bad trace: unknown flags")
        view = memoryview(raw)
        if hashing.digest(view[:end]) != raw[end:]:
            raise DataError("bad trace: checksum differs")
        units = -(-size // UNIT)
        touches = tuple(Touch(*fields) for fields in _TOUCH.iter_unpack(view[_HEADER.size : end]))
        if units > _MAX_UNIT or any(not touch.count or touch.unit + touch.count > units for touch in touches):
            raise DataError("bad trace: a touch beyond the end of the data")
        if sum(touch.count for touch in touches) > units:
            # A million touches of everything would keep who merges them busy for hours.
            raise DataError("bad trace: units touched twice")
        return cls(
            tree.hex(), size, began, bool(flags & COMPLETE), touches, left_out, source.hex() if any(source) else ""
        )
