"""Memory that holder, front and fetcher of a served tree share, and that outlives each of them: one memfd.

Who writes what, so that nothing needs a lock across processes (each cell has one writing process at a time):

| part | writer | reader |
|---|---|---|
| ``ready``: one byte per block | fetcher, after the verified bytes are in the cache file | front |
| journal: kernel requests taken and not yet answered | front | the next front |
| ``events``: buffer into which the kernel itself writes fanotify events | kernel, front | the next front |
| touch log and ``seen``: first touches of 4 KiB units | front | fetcher |
| ``counts``: named counters and flags, see `Count` | as said there | all |
| ``note``: what a FUSE front negotiated with the kernel, any bytes | front | the next front |

A process may be killed between any two instructions. What others rely on is therefore written last: a ready byte after
the block's data, a journal slot's state after its fields, ``Count.TOUCHES`` after the touch.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from typing import NamedTuple

from bootseer.blocks.formats.bitmap import Ready
from bootseer.errors import DataError, from_os_error

UNIT = 4096
"""Bytes of a unit of the touch log."""
JOURNAL_SLOTS = 4096
"""Outstanding fanotify events: a slot is found by the event's descriptor number, so this bounds the keeper's too."""
TOUCH_LIMIT = 1 << 20
"""Touches kept at most, as in a trace; a torch start makes about 15,000."""

_MAGIC = b"BSSHARE\1"
_HEADER = struct.Struct("<8sQQQQQ")  # magic, size, block size, blocks, units, touches kept at most
_SLOT = struct.Struct("<QQQI")  # offset, length, monotonic ns when it was read, pid
_STATE = 28
_SLOT_SIZE = 32
_TOUCH = struct.Struct("<IIQI4x")
_NOTE = struct.Struct("<I")
_PAGE = mmap.PAGESIZE
_COUNTS = 512


class Count:
    """Cells of ``Shared.counts`` (u64). The comment names the writer."""

    # front
    READS = 0
    SLOW_FAULTS = 1
    STALL_NS = 2
    FAILED_READS = 3
    TOUCHES = 4
    TOUCHES_LOST = 5
    """Touches that found the log full: the trace is incomplete."""
    DENIED = 6
    """Requests a front answered with an error that no fetcher gave: after its deadline, or found by the sweep."""
    TAKEN_OVER = 7
    """Requests that a front answered for a dead predecessor."""
    HOT_USED = 8
    """Blocks of the hot list that were ready when first read."""
    FRONT_READY = 9
    """The generation of the front that has taken over and serves."""
    OVERFLOWS = 10
    """fanotify queue overflows: never, as the queue is unlimited."""
    FRONT_BEAT = 11
    """Counts up while the front lives, see `bootseer.blocks.serving.pulse`; so do the two below."""
    # fetcher
    RECORDING = 32
    """1 while first touches are to be noted."""
    LOADED = 33
    """1 once ``ready`` holds what the bitmap on disk said: a restarted fetcher must not load it again."""
    BROKEN = 34
    """1 after a failed fdatasync: nothing is added to the cache any more."""
    INCOMPLETE = 43
    """1 when touches may have been missed: the recording joined a warm mount, or pages were read ahead."""
    JOB_READY = 44
    RECORDED = 45
    """1 once the recording has ended and was published, or will not be."""
    FETCHER_BEAT = 46
    READ_AHEAD = 47
    """Bytes of the mount that the fetcher had the kernel read before the job."""
    READAHEAD_TID = 48
    """The thread that does so: a read of its is not the job's."""
    FETCH = 96
    """From here on the fields of `bootseer.blocks.fetch.flight.FetchStats`, summed over all fetchers."""
    # holder
    BEGAN_NS = 64
    """`time.monotonic_ns` of the start of serving; touches count from here."""
    DRIVER = 65
    """Index in `DRIVERS`."""
    HOLDER_PID = 66
    FRONT_PID = 67
    FETCHER_PID = 68
    FRONT_STARTS = 69
    """Also the generation of the front, part of its request numbers."""
    FETCHER_STARTS = 70
    HOLDER_STARTS = 71
    DOOMED = 72
    """1 while fetchers fail one after the other: a missing block is answered EIO at once."""
    BEGAN_UNIX = 73
    DEADLINE_MS = 74
    """How long a front waits for a fetcher's answer before it denies the request itself."""
    HOLDER_BEAT = 75


DRIVERS = ("none", "local", "fanotify", "fuse")


class Outstanding(NamedTuple):
    """A fanotify event that a front took and did not answer yet; ``began`` in monotonic ns."""

    fd: int
    offset: int
    length: int
    began: int
    pid: int


class Shared:
    """The mapped memory. Make it with `create`, map it in another process with `attach`; a fork inherits it.

    ``size`` and ``block_size`` are those of the data file, in bytes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            head = os.pread(fd, _HEADER.size, 0)
        except OSError as exc:
            raise from_os_error(exc, "map shared memory") from exc
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise DataError("the shared memory of a block server is not understood")
        _, self.size, self.block_size, self.blocks, self.units, limit = _HEADER.unpack(head)
        self.shift = max(0, self.block_size.bit_length() - 1)
        where = _layout(self.blocks, self.units, limit)
        parts = [mmap.mmap(fd, max(1, length), offset=offset) for offset, length in zip(*where, strict=True)]
        counts, events, journal, note, touches, seen, ready = parts
        self.counts = memoryview(counts).cast("Q")
        """Counters and flags by the names of `Count`."""
        self.events = events
        """Where the kernel writes fanotify events; all zero when each event that was read has been dealt with."""
        self.ready: Ready = ready if self.blocks else bytearray()
        self.touch_log = TouchLog(self.counts, touches, seen, limit)
        self._journal = journal
        self._note = note

    @classmethod
    def create(cls, blocks: int, units: int, *, size: int = 0, block_size: int = 0) -> Shared:
        """Fresh memory for ``blocks`` blocks and ``units`` 4 KiB units, all zero. Raises `BootseerError`."""
        limit = min(TOUCH_LIMIT, max(1, units))
        where = _layout(blocks, units, limit)
        try:
            fd = os.memfd_create("bootseer-shared", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, where[0][-1] + _pages(max(1, where[1][-1])))
                os.pwrite(fd, _HEADER.pack(_MAGIC, size, block_size, blocks, units, limit), 0)
                return cls(fd)
            except BaseException:
                os.close(fd)
                raise
        except OSError as exc:
            raise from_os_error(exc, "make shared memory") from exc

    @classmethod
    def attach(cls, fd: int) -> Shared:
        """Map the memory behind ``fd``, which now belongs to the result. Raises `DataError` for anything else."""
        return cls(fd)

    # -- journal ---------------------------------------------------------------------------------------------------

    def journal(self, fd: int, offset: int, length: int, pid: int) -> None:
        """Note that event ``fd`` (below `JOURNAL_SLOTS`) was taken and waits for bytes."""
        at = fd * _SLOT_SIZE
        _SLOT.pack_into(self._journal, at, offset, length, time.monotonic_ns(), pid & 0xFFFFFFFF)
        self._journal[at + _STATE] = 1

    def settle(self, fd: int) -> None:
        """Event ``fd`` was answered."""
        self._journal[fd * _SLOT_SIZE + _STATE] = 0

    def outstanding(self) -> list[Outstanding]:
        """Events in the journal, by descriptor number."""
        found = []
        for fd in range(JOURNAL_SLOTS):
            at = fd * _SLOT_SIZE
            if self._journal[at + _STATE]:
                offset, length, began, pid = _SLOT.unpack_from(self._journal, at)
                found.append(Outstanding(fd, offset, length, began, pid))
        return found

    # -- note ------------------------------------------------------------------------------------------------------

    @property
    def note(self) -> bytes:
        """What the front left for its successor (empty: nothing); at most 4 KiB."""
        (length,) = _NOTE.unpack_from(self._note)
        return self._note[_NOTE.size : _NOTE.size + length]

    @note.setter
    def note(self, data: bytes) -> None:
        if len(data) > _PAGE - _NOTE.size:
            raise ValueError(f"a note of {len(data)} bytes is too long")
        _NOTE.pack_into(self._note, 0, 0)
        self._note[_NOTE.size : _NOTE.size + len(data)] = data
        _NOTE.pack_into(self._note, 0, len(data))

    # -- the rest --------------------------------------------------------------------------------------------------

    @property
    def driver(self) -> str:
        return DRIVERS[self.counts[Count.DRIVER]]

    @driver.setter
    def driver(self, name: str) -> None:
        self.counts[Count.DRIVER] = DRIVERS.index(name)

    def forked(self) -> None:
        """In a child forked from a process with threads: one may have held a lock in that moment."""
        self.touch_log.forked()

    def touch(self, offset: int, length: int, pid: int) -> None:
        """Note a read; see `TouchLog.touch`."""
        self.touch_log.touch(offset, length, pid)

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped while anything of this object is in use."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class TouchLog:
    """First touches of 4 KiB units, in the order they happened. One front writes, from any of its threads."""

    def __init__(self, counts: memoryview, touches: mmap.mmap, seen: mmap.mmap, limit: int) -> None:
        self._counts = counts
        self._touches = touches
        self._seen = seen
        self._limit = limit
        self._lock = threading.Lock()

    def touch(self, offset: int, length: int, pid: int) -> None:
        """A read of ``length`` bytes (at least one, inside the file) at ``offset`` by process ``pid``.

        Does nothing unless ``Count.RECORDING`` is set; costs one scan of ``seen`` where the units are known.
        """
        seen, touches = self._seen, self._touches
        if not self._counts[Count.RECORDING]:
            return
        first = offset // UNIT
        end = (offset + length - 1) // UNIT + 1
        # Without the lock: a unit only ever turns from 0 to 1.
        if seen.find(b"\0", first, end) < 0:
            return
        ms = min((time.monotonic_ns() - self._counts[Count.BEGAN_NS]) // 1_000_000, 0xFFFFFFFF)
        with self._lock:
            while (unit := seen.find(b"\0", first, end)) >= 0:
                stop = seen.find(b"\1", unit, end)
                stop = end if stop < 0 else stop
                number = self._counts[Count.TOUCHES]
                if number >= self._limit:
                    self._counts[Count.TOUCHES_LOST] += 1
                    return
                _TOUCH.pack_into(touches, number * _TOUCH.size, max(0, ms), pid & 0xFFFFFFFF, unit, stop - unit)
                self._counts[Count.TOUCHES] = number + 1
                seen[unit:stop] = b"\1" * (stop - unit)
                first = stop

    def forked(self) -> None:
        """See `Shared.forked`."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._counts[Count.TOUCHES]

    def since(self, start: int) -> list[tuple[int, int, int, int]]:
        """Touches from number ``start`` on: (milliseconds since the mount, pid, first unit, units)."""
        end = len(self)
        if start >= end:
            return []
        raw = self._touches[start * _TOUCH.size : end * _TOUCH.size]
        return list(_TOUCH.iter_unpack(raw))


def _pages(length: int) -> int:
    return -(-length // _PAGE) * _PAGE


def _layout(blocks: int, units: int, limit: int) -> tuple[list[int], list[int]]:
    """Offsets and lengths of the parts behind the header's page. A memfd takes memory only for pages in use."""
    lengths = [_COUNTS * 8, _PAGE, JOURNAL_SLOTS * _SLOT_SIZE, _PAGE, limit * _TOUCH.size, units, blocks]
    offsets, at = [], _PAGE
    for length in lengths:
        offsets.append(at)
        at += _pages(max(1, length))
    return offsets, lengths
