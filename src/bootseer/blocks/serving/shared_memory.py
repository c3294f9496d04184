"""Memory that the processes of a served tree share, and that outlives each of them: one memfd.

Who writes what, so that nothing needs a lock across processes (each cell has one writing process at a time):

| part | writer | reader |
|---|---|---|
| ``ready``: one byte per block | fetcher, after the verified bytes are in the cache file | FUSE server |
| ``hot``: one byte per block | fetcher, where a profile names the block | supervisor |
| access trace and ``seen``: first touches of 4 KiB units | FUSE server | fetcher |
| ``counts``: named counters and flags, see `Count` | as said there | all |
| ``negotiated``: what the FUSE server and the kernel agreed on | FUSE server | the next FUSE server |
| ``said``: the fetcher's part of the status | fetcher | supervisor |
| ``users``: the mounts of the tree, and the stores they name | supervisor | the next supervisor, fetcher |

A process may be killed between any two instructions. What others rely on is therefore written last: a ready byte after
the block's data, ``Count.TOUCHES`` after the touch."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

from bootseer.blocks.formats.trace import MAX_TOUCHES, UNIT
from bootseer.chunks.bitmap import Ready
from bootseer.closing import descriptor
from bootseer.errors import doing
from bootseer.served.note import Note

_TOUCH = struct.Struct("<IIQI4x")
_PAGE = mmap.PAGESIZE
_COUNTS = 512
_USERS = 1 << 20


class Count:
    """Cells of ``SharedMemory.counts`` (u64). The comment names the writer."""

    # FUSE server
    READS = 0
    SLOW_FAULTS = 1
    STALL_NS = 2
    FAILED_READS = 3
    TOUCHES = 4
    TOUCHES_LOST = 5
    """Touches that found the trace full: it is incomplete."""
    DENIED = 6
    """Requests that a FUSE server answered with an error that no fetcher gave: after its deadline."""
    TAKEN_OVER = 7
    """Requests that a FUSE server answered for a dead predecessor."""
    WAITED_NS = 10
    """In which at least one reader waited for a block; up to ``WAITING_SINCE_NS``."""
    WAITING_SINCE_NS = 11
    """`time.monotonic_ns` since when at least one reader waits; 0: none does."""
    # fetcher
    RECORDING = 32
    """1 while first touches are to be noted."""
    BROKEN = 33
    """1 after a failed fdatasync: nothing is added to the cache any more."""
    INCOMPLETE = 34
    """1 when touches may have been missed: the recording joined a warm mount, or pages were read ahead."""
    RECORDED = 35
    """1 once the recording has ended and was published, or will not be."""
    READ_AHEAD = 37
    """Bytes of the mount that the fetcher had the kernel read before the job."""
    READAHEAD_TID = 38
    """The thread that does so, while its process lives: a read of its, which may come late, is not the job's."""
    READAHEAD_OPEN = 39
    """1 while it may have a file open."""
    DETACHED = 40
    """1 when all is persisted and given up, and the fetcher finishes a hot pack for which nobody waits."""
    HOT_KNOWN = 41
    """1 when what is hot has been looked up."""
    FETCHED = 96
    """From here on the cells of `bootseer.blocks.fetch.figures.Fetched`, over all fetchers."""
    # supervisor
    BEGAN_NS = 64
    """`time.monotonic_ns` of the start of serving; touches count from here."""
    BEGAN_UNIX = 65
    SUPERVISOR_PID = 66
    SUPERVISOR_STARTS = 71
    HOPELESS = 72
    """1 while fetchers fail one after the other: a missing block is answered EIO at once."""
    DEADLINE_MS = 73
    """How long a FUSE server waits for a fetcher's answer before it fails the request itself."""
    JOB_READY = 74
    STILL = 75
    """1 once no file of the mount is to be opened any more: it is about to be unmounted."""
    # those of `bootseer.served.keeper.Kept`, of the FUSE server and of the fetcher
    SERVER_PID, SERVER_STARTS, SERVER_READY, SERVER_BEAT = range(80, 84)
    """``SERVER_STARTS`` is also the generation of the FUSE server, part of its request numbers."""
    FETCHER_PID, FETCHER_STARTS, FETCHER_READY, FETCHER_BEAT = range(84, 88)


class SharedMemory:
    """The mapped memory; a fork inherits it. ``size`` and ``block_size`` are those of the data file, in bytes; its
    ``blocks`` each have a byte in ``ready`` and in ``hot``."""

    def __init__(self, blocks: int, *, size: int, block_size: int) -> None:
        """Fresh memory, all zero. Raises `BootseerError`."""
        self.size, self.block_size = size, block_size
        self.shift = max(0, block_size.bit_length() - 1)
        units = -(-size // UNIT)
        limit = min(MAX_TOUCHES, max(1, units))
        lengths = [_COUNTS * 8, _PAGE, _PAGE, _USERS, limit * _TOUCH.size, units, blocks, blocks]
        parts = []
        # It takes memory only for pages in use.
        with doing("make shared memory"), descriptor(os.memfd_create("bootseer-shared", os.MFD_CLOEXEC)) as fd:
            os.ftruncate(fd, sum(map(_pages, lengths)))
            at = 0
            for length in lengths:
                parts.append(mmap.mmap(fd, max(1, length), offset=at))
                at += _pages(length)
        counts, negotiated, said, users, touches, seen, ready, hot = parts
        self.negotiated, self.said, self.users = Note(negotiated), Note(said), Note(users)
        self.counts = memoryview(counts).cast("Q")
        """Counters and flags by the names of `Count`."""
        self.ready: Ready = ready if blocks else bytearray()
        self.hot: Ready = hot if blocks else bytearray()
        self.trace = AccessTrace(self.counts, touches, seen, limit)

    def is_ready(self, offset: int, length: int) -> bool:
        """Whether each block of these bytes is ready; ``length`` is over 0, and what is behind the end does not
        count."""
        last = (min(offset + length, self.size) - 1) >> self.shift
        return self.ready.find(b"\0", offset >> self.shift, last + 1) < 0


class AccessTrace:
    """First touches of 4 KiB units, in the order they happened. One FUSE server writes, from any of its threads."""

    def __init__(self, counts: memoryview, touches: mmap.mmap, seen: mmap.mmap, limit: int) -> None:
        self._counts = counts
        self._touches = touches
        self._seen = seen
        self._limit = limit
        self._lock = threading.Lock()

    def touch(self, offset: int, length: int, pid: int) -> None:
        """A read of ``length`` bytes (at least one, inside the file) at ``offset`` by thread ``pid``; noted only where
        ``Count.RECORDING`` is set."""
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
                seen[unit:stop] = b"\1" * (stop - unit)  # first: who is killed here loses a touch, and notes none twice
                _TOUCH.pack_into(touches, number * _TOUCH.size, max(0, ms), pid & 0xFFFFFFFF, unit, stop - unit)
                self._counts[Count.TOUCHES] = number + 1
                first = stop

    def forked(self) -> None:
        """In a child forked from a process with threads: one of these may have held the lock in that moment."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._counts[Count.TOUCHES]

    def since(self, start: int) -> list[tuple[int, int, int, int]]:
        """Touches from number ``start`` on: (milliseconds since the mount, pid, first unit, units)."""
        end = len(self)
        if start >= end:
            return []
        return list(_TOUCH.iter_unpack(self._touches[start * _TOUCH.size : end * _TOUCH.size]))


def _pages(length: int) -> int:
    return -(-max(1, length) // _PAGE) * _PAGE
