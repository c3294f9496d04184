"""A trace: which 4 KiB units of a data file a start touched, when first, and by which process.

On disk: ``docs/internals/trace.md``. A trace is advice: `Trace.decode` refuses a damaged or oversized one with
`DataError`, and whoever reads profiles logs that and goes on without.
"""

from __future__ import annotations

import struct
import threading
import time

import msgspec

from bootseer.blocks import _hash
from bootseer.errors import DataError

MAGIC = b"BSTRACE\0"
VERSION = 1
UNIT = 4096
MAX_TOUCHES = 1 << 20
"""Bounds a trace to 20 MiB; a torch start makes about 15,000 touches."""

COMPLETE = 1
DRIVERS = ("unknown", "fuse", "fanotify")

_HEADER = struct.Struct("<8sHHIQQI32s4x")
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

    ``complete`` is false when touches may be missing: recording stopped at its size limit or joined a warm mount.
    """

    tree: str
    size: int
    began: int
    complete: bool
    driver: str
    touches: tuple[Touch, ...]

    def encode(self) -> bytes:
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            DRIVERS.index(self.driver),
            COMPLETE if self.complete else 0,
            self.size,
            self.began,
            len(self.touches),
            bytes.fromhex(self.tree),
        )
        body = b"".join([header, *(_TOUCH.pack(t.ms, t.pid, t.unit, t.count) for t in self.touches)])
        return body + _hash.digest(body)

    @classmethod
    def decode(cls, raw: bytes) -> Trace:
        """Parse ``raw``. Raises `DataError` for anything that `encode` would not write."""
        if len(raw) < _HEADER.size + _hash.SIZE:
            raise DataError(f"bad trace: only {len(raw)} bytes")
        magic, version, driver, flags, size, began, count, tree = _HEADER.unpack_from(raw)
        if magic != MAGIC or version != VERSION:
            raise DataError("bad trace: not a trace of a known version")
        end = len(raw) - _hash.SIZE
        if count > MAX_TOUCHES or _HEADER.size + count * _TOUCH.size != end:
            raise DataError(f"bad trace: {len(raw)} bytes for {count} touches")
        if driver >= len(DRIVERS) or flags & ~COMPLETE or any(raw[_HEADER.size - 4 : _HEADER.size]):
            raise DataError("bad trace: unknown driver or flags")
        if _hash.digest(memoryview(raw)[:end]) != raw[end:]:
            raise DataError("bad trace: checksum differs")
        units = -(-size // UNIT)
        touches = tuple(Touch(*fields) for fields in _TOUCH.iter_unpack(memoryview(raw)[_HEADER.size : end]))
        if units > _MAX_UNIT or any(not touch.count or touch.unit + touch.count > units for touch in touches):
            raise DataError("bad trace: a touch beyond the end of the data")
        return cls(tree.hex(), size, began, bool(flags & COMPLETE), DRIVERS[driver], touches)


class Recorder:
    """Notes first touches, from any thread. ``driver`` names the data path that calls `touch`."""

    def __init__(self, tree: str, size: int, *, driver: str = "fuse", limit: int = MAX_TOUCHES) -> None:
        self._tree = tree
        self._size = size
        self._driver = driver
        self._limit = limit
        self._seen = bytearray(-(-size // UNIT))
        self._touches: list[Touch] = []
        self._began = time.time()
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._complete = True
        self._on = True

    def touch(self, offset: int, length: int, pid: int) -> None:
        """A read of ``length`` bytes (at least one, inside the file) at ``offset``."""
        first = offset // UNIT
        end = (offset + length - 1) // UNIT + 1
        # Without the lock: a unit only ever turns from 0 to 1.
        if self._seen.find(0, first, end) < 0:
            return
        ms = min(int((time.monotonic() - self._start) * 1000), 0xFFFFFFFF)
        with self._lock:
            if not self._on:
                return
            while (unit := self._seen.find(0, first, end)) >= 0:
                stop = self._seen.find(1, unit, end)
                stop = end if stop < 0 else stop
                self._seen[unit:stop] = b"\1" * (stop - unit)
                if len(self._touches) >= self._limit:
                    self._complete = False
                    self._on = False
                    return
                self._touches.append(Touch(ms, pid & 0xFFFFFFFF, unit, stop - unit))
                first = stop

    def mark_incomplete(self) -> None:
        """Touches may have been missed, for example because a page cache was warm already."""
        self._complete = False

    def stop(self) -> Trace:
        """End the recording (again: the same trace)."""
        with self._lock:
            self._on = False
            return Trace(self._tree, self._size, int(self._began), self._complete, self._driver, tuple(self._touches))
