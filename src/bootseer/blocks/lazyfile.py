"""A lazy file: reads of a data file whose blocks may still be missing. This is the data path; it must be cheap."""

from __future__ import annotations

import errno
import logging
import threading
import time

import msgspec

from bootseer.blocks.cache import CacheFile
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.trace import Recorder
from bootseer.errors import BootseerError

log = logging.getLogger(__name__)


class ReadStats(msgspec.Struct):
    """Reads that had to wait (``slow_faults``), for how long in all readers together, and reads that failed."""

    slow_faults: int = 0
    stall_seconds: float = 0.0
    failed_reads: int = 0


class LazyFile:
    """Positioned reads for many threads. Set ``recorder`` to None to stop recording."""

    def __init__(self, cache: CacheFile, fetcher: Fetcher, recorder: Recorder | None = None) -> None:
        self.size = cache.map.size
        self.stats = ReadStats()
        self.recorder = recorder
        self._cache = cache
        self._fetcher = fetcher
        self._ready = cache.ready
        self._fd = cache.fileno()
        self._shift = cache.map.shift
        self._lock = threading.Lock()

    def locate(self, offset: int, length: int, pid: int = 0) -> bytes | tuple[int, int]:
        """As `pread`, for a caller that can read a local file itself: ``(fd, offset)`` when the blocks are ready."""
        if offset + length <= self.size and length > 0:
            recorder = self.recorder
            if recorder is not None:
                recorder.touch(offset, length, pid)
            if self._ready.find(b"\0", offset >> self._shift, (offset + length - 1 >> self._shift) + 1) < 0:
                return self._fd, offset
        return self.pread(offset, length, pid)

    def pread(self, offset: int, length: int, pid: int = 0) -> bytes:
        """The bytes at ``offset``, fewer only at the end of the file. Raises `OSError` (EIO), never wrong bytes."""
        end = min(offset + length, self.size)
        if offset >= end:
            return b""
        recorder = self.recorder
        if recorder is not None:
            recorder.touch(offset, end - offset, pid)
        first = offset >> self._shift
        last = (end - 1) >> self._shift
        if self._ready.find(b"\0", first, last + 1) < 0:
            return self._cache.read(offset, end - offset)
        return self._wait(offset, end, first, last)

    def _wait(self, offset: int, end: int, first: int, last: int) -> bytes:
        began = time.monotonic()
        try:
            memory = self._fetcher.demand(first, last)
        except BootseerError as exc:
            with self._lock:
                self.stats.failed_reads += 1
            log.error("read of %d bytes at %d fails: %s", end - offset, offset, exc)
            raise OSError(errno.EIO, str(exc)) from exc
        finally:
            with self._lock:
                self.stats.slow_faults += 1
                self.stats.stall_seconds += time.monotonic() - began
        if not memory:
            return self._cache.read(offset, end - offset)
        parts: list[bytes] = []
        for block in range(first, last + 1):
            start = block << self._shift
            low = max(offset, start)
            high = min(end, start + self._cache.map.length_of(block))
            data = memory.get(block)
            parts.append(self._cache.read(low, high - low) if data is None else data[low - start : high - start])
        return b"".join(parts)
