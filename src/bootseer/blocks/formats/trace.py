"""A trace: which 4 KiB units of a data file a start touched, when first, and by which process.

On disk: ``docs/internals/trace.md``. A trace is advice: `Trace.decode` refuses a damaged or oversized one with
`DataError`, and whoever reads profiles logs that and goes on without.
"""

from __future__ import annotations

import struct

import msgspec

from bootseer.chunks import hashing
from bootseer.errors import DataError

MAGIC = b"BSTRACE\0"
VERSION = 3
UNIT = 4096
MAX_TOUCHES = 1 << 20
"""Bounds the touches to 20 MiB; a torch start makes about 15,000."""
MAX_PROCESSES = 4096
MAX_COMM = 64
MAX_CGROUP = 1024
MAX_BYTES = 160 + 20 * MAX_TOUCHES + MAX_PROCESSES * (12 + MAX_COMM + MAX_CGROUP)

COMPLETE = 1
SEEN_BY_FUSE = 1
"""What saw the touches: nothing else does."""

_HEADER = struct.Struct("<8sHHIQQI32sI32s")
_RECORDED = bytes(32)
_TOUCH = struct.Struct("<IIQI")
_PROCESS = struct.Struct("<IiHH")
_MAX_UNIT = 1 << 38


class Touch(msgspec.Struct, frozen=True):
    """``count`` units from ``unit`` on, first touched ``ms`` milliseconds after the mount by process ``pid``."""

    ms: int
    pid: int
    unit: int
    count: int


class Process(msgspec.Struct, frozen=True):
    """Who ``pid`` (as in `Touch.pid`, it may be a thread's) was: its command's name, its cgroup, and its rank in the
    job, -1 when it has none. Empty texts are unknown."""

    pid: int
    comm: str
    rank: int = -1
    cgroup: str = ""


class Trace(msgspec.Struct, frozen=True):
    """First touches in the order they happened. ``began`` is Unix time; ``tree`` the tree's digest (hexadecimal).

    ``complete`` is false when touches may be missing: recording stopped at its size limit, joined a warm mount, or
    pages were read ahead of the job.
    ``processes``, by pid, name those of the touching processes that could be asked. ``source``: the tree of which the
    start was, where this one is only predicted from it; empty where it was recorded.
    """

    tree: str
    size: int
    began: int
    complete: bool
    touches: tuple[Touch, ...]
    processes: tuple[Process, ...] = ()
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
            len(self.processes),
            bytes.fromhex(self.source) or _RECORDED,
        )
        table = []
        for one in self.processes:
            comm, cgroup = one.comm.encode(), one.cgroup.encode()
            table += [_PROCESS.pack(one.pid, one.rank, len(comm), len(cgroup)), comm, cgroup]
        body = b"".join([header, *(_TOUCH.pack(t.ms, t.pid, t.unit, t.count) for t in self.touches), *table])
        return body + hashing.digest(body)

    @classmethod
    def decode(cls, raw: bytes) -> Trace:
        """Parse ``raw``. Raises `DataError` for anything that `encode` would not write."""
        if len(raw) < _HEADER.size + hashing.SIZE:
            raise DataError(f"bad trace: only {len(raw)} bytes")
        magic, version, seen, flags, size, began, count, tree, processes, source = _HEADER.unpack_from(raw)
        if (magic, version) != (MAGIC, VERSION):
            raise DataError(f"bad trace: not a trace of version {VERSION}, the newest that is known")
        end = len(raw) - hashing.SIZE
        table = _HEADER.size + count * _TOUCH.size
        if count > MAX_TOUCHES or processes > MAX_PROCESSES or table + processes * _PROCESS.size > end:
            raise DataError(f"bad trace: {len(raw)} bytes for {count} touches")
        if seen != SEEN_BY_FUSE or flags & ~COMPLETE:
            raise DataError("bad trace: unknown flags")
        view = memoryview(raw)
        if hashing.digest(view[:end]) != raw[end:]:
            raise DataError("bad trace: checksum differs")
        units = -(-size // UNIT)
        touches = tuple(Touch(*fields) for fields in _TOUCH.iter_unpack(view[_HEADER.size : table]))
        if units > _MAX_UNIT or any(not touch.count or touch.unit + touch.count > units for touch in touches):
            raise DataError("bad trace: a touch beyond the end of the data")
        if sum(touch.count for touch in touches) > units:
            # A million touches of everything would keep who merges them busy for hours.
            raise DataError("bad trace: units touched twice")
        named = _decode_processes(view[table:end], processes)
        return cls(tree.hex(), size, began, bool(flags & COMPLETE), touches, named, source.hex() if any(source) else "")


def _decode_processes(raw: memoryview, count: int) -> tuple[Process, ...]:
    found: list[Process] = []
    at = 0
    for _ in range(count):
        if at + _PROCESS.size > len(raw):
            raise DataError("bad trace: its processes are cut off")
        pid, rank, comm, cgroup = _PROCESS.unpack_from(raw, at)
        middle = at + _PROCESS.size + comm
        last, at = at, middle + cgroup
        if comm > MAX_COMM or cgroup > MAX_CGROUP or at > len(raw) or rank < -1:
            raise DataError("bad trace: a process is not understood")
        if found and pid <= found[-1].pid:
            raise DataError("bad trace: its processes are not in order")
        try:
            texts = (str(raw[last + _PROCESS.size : middle], "utf-8"), str(raw[middle:at], "utf-8"))
        except UnicodeDecodeError:
            raise DataError("bad trace: a process is not understood") from None
        found.append(Process(pid, texts[0], rank, texts[1]))
    if at != len(raw):
        raise DataError("bad trace: bytes after its processes")
    return tuple(found)
