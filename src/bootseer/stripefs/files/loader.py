"""Chunks on their way from the store to readers of a mount: single flight, read-ahead, a byte budget.

A read takes its chunks from the node cache, from memory, or from a fetch under way; what is missing it fetches itself,
as one parallel read. A file that is read in order is fetched ahead in growing steps by background threads.

Every chunk has memory of its own, so that what is dropped is free; what is being fetched counts like what is held.

Concurrency: `read` is called by many threads. ``_lock`` guards the tables and is never held while bytes move. A chunk
is fetched by one thread at a time (``_flying``); the others wait for it as long as that thread gets on (`_Flight`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bootseer.errors import BootseerError, UnavailableError
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.mount.nodecache import NodeCache
from bootseer.stripefs.scheduler.memory import ByteBudget
from bootseer.stripefs.scheduler.memory import process as process_budget
from bootseer.stripefs.scheduler.model import SLOWEST
from bootseer.stripefs.storage.interface import DEADLINE

_log = logging.getLogger(__name__)

MEMORY = 256 << 20
_STEP = 8 << 20
"""Smallest and largest distance of read-ahead; it doubles while a file is read in order."""
_FAR = 64 << 20
_ORDERS = 1024
"""Files of which is known how they are being read; one that was dropped is fetched ahead again after its next read."""
_WAIT = 4 * DEADLINE
"""A flight is given up by who waits for it when it has not got on for so long, and for twice what the bytes that it
fetches take at `SLOWEST`: a read of them by itself may take that long too (its second try begins anew)."""
_THREADS = 3

Key = tuple[str, int]


class LoaderStats(NamedTuple):
    """Bytes fetched from the store because a reader waited for them, and ahead of readers."""

    demand: int
    ahead: int


class _Flight:
    """Chunks that one thread fetches, run by run. ``landed``: by run, whether it is over, also when it failed."""

    def __init__(self, runs: list[list[int]]) -> None:
        self.runs = runs
        self.landed = {run[0]: threading.Event() for run in runs}
        self._bytes, self._since = 0, time.monotonic()

    def begin(self, count: int) -> None:
        """The next run, of ``count`` bytes, is asked for."""
        self._bytes, self._since = count, time.monotonic()

    def wait(self, run: int) -> bool:
        """Wait until the run that begins with chunk ``run`` has landed; False when the flight does not get on."""
        while True:
            # looked at again after each wait: another run may have landed meanwhile
            left = self._since + _WAIT + 2 * self._bytes / SLOWEST - time.monotonic()
            if self.landed[run].wait(max(left, 0.0)):
                return True
            if left <= 0:
                return False


class _Order:
    """How one file is being read: where the next read in order starts, and up to which chunk is fetched ahead."""

    __slots__ = ("ahead", "next", "step")

    def __init__(self) -> None:
        self.next, self.ahead, self.step = 0, 0, _STEP


class Loader:
    """``memory``: bytes of chunks that are held for readers or being fetched; also taken from the process's budget.

    Read-ahead stays below it; what a reader waits for is fetched in any case, and what is held makes room for it.
    """

    def __init__(self, cache: NodeCache | None = None, *, memory: int = MEMORY) -> None:
        self._cache, self._memory = cache, memory
        self._budget = ByteBudget(memory, process_budget())
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, memoryview] = OrderedDict()
        self._flying: dict[Key, tuple[_Flight, int]] = {}  # with the first chunk of its run
        self._orders: OrderedDict[str, _Order] = OrderedDict()
        self._demand = self._ahead = 0
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bootseer-ahead")

    @property
    def stats(self) -> LoaderStats:
        return LoaderStats(self._demand, self._ahead)

    def close(self) -> None:
        """Stop fetching ahead and wait for what is under way."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            while self._held:
                self._drop_oldest()

    def read(self, file: ChunkFile, offset: int, size: int) -> memoryview | tuple[int, int]:
        """Bytes ``offset`` to ``offset + size`` of ``file``, or (fd, offset) in the node cache.

        The range must lie inside the file. Raises `BootseerError` when they cannot be had.
        """
        end = offset + size
        first, last = offset // file.unit, -(-end // file.unit)
        self._plan(file, offset, end)
        cached = self._cache.find(file.identity) if self._cache else None
        if cached is not None and all(cached.ready(chunk) for chunk in range(first, last)):
            return cached.fd, offset
        self._load(file, first, last, demand=True, force=True)
        if cached is not None and all(cached.ready(chunk) for chunk in range(first, last)):
            return cached.fd, offset
        parts = []
        for chunk in range(first, last):
            start = chunk * file.unit
            low, high = max(offset - start, 0), min(end - start, file.unit)
            parts.append(self._take(file, chunk, drop=start + high == start + file.unit)[low:high])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _take(self, file: ChunkFile, chunk: int, *, drop: bool) -> memoryview:
        """A chunk that `_load` brought; fetched again when the budget has pushed it out since."""
        key = (file.identity, chunk)
        with self._lock:
            if (data := self._held.get(key)) is not None:
                # read to its end: the kernel has it now, so it goes first when room is needed
                self._held.move_to_end(key, last=not drop)
                return data
        buffer = bytearray(file.geometry.chunk_length(chunk))
        file.read_chunks(chunk, [memoryview(buffer)])
        self._demand += len(buffer)
        return memoryview(buffer)

    def prefetch(self, file: ChunkFile, first: int, last: int) -> None:
        """Bring the chunks ``first`` to ``last`` (exclusive) in, in the calling thread."""
        self._load(file, first, last, demand=False, force=True)

    def _load(self, file: ChunkFile, first: int, last: int, *, demand: bool, force: bool) -> None:
        """Have the chunks present: fetch those that nobody has or fetches, wait for the others.

        Without ``force`` they stay away when there is no memory for them.
        """
        mine, others = self._claim(file, range(first, last))
        try:
            for run in mine.runs:
                self._fetch(file, run[0], run[-1] + 1, demand, force, mine)
                self._release(file, mine, run)
        finally:
            for run in mine.runs:
                self._release(file, mine, run)
        for flight, start in others:
            began = time.monotonic()
            if not flight.wait(start):
                waited = time.monotonic() - began
                raise UnavailableError(
                    f"{file.path} was not read: who fetches it has not got on ({waited:.0f} s waited)",
                    hint="check that the storage is reachable from here",
                )

    def _claim(self, file: ChunkFile, chunks: Iterable[int]) -> tuple[_Flight, list[tuple[_Flight, int]]]:
        """The chunks that nobody has or fetches, as a flight of this thread; and the runs of others to wait for."""
        cached = self._cache.find(file.identity) if self._cache else None
        others: dict[tuple[int, int], tuple[_Flight, int]] = {}
        missing = [chunk for chunk in chunks if cached is None or not cached.ready(chunk)]
        with self._lock:
            mine = []
            for chunk in missing:
                key = (file.identity, chunk)
                if key in self._held:
                    continue
                if (found := self._flying.get(key)) is not None:
                    others[id(found[0]), found[1]] = found
                else:
                    mine.append(chunk)
            flight = _Flight(_runs(mine))
            for run in flight.runs:
                for chunk in run:
                    self._flying[file.identity, chunk] = flight, run[0]
        return flight, list(others.values())

    def _release(self, file: ChunkFile, flight: _Flight, run: list[int]) -> None:
        """Wake who waits for ``run``, once. After a failure they find its chunks missing and try for themselves."""
        if flight.landed[run[0]].is_set():
            return
        with self._lock:
            for chunk in run:
                del self._flying[file.identity, chunk]
        flight.landed[run[0]].set()

    def _fetch(self, file: ChunkFile, first: int, last: int, demand: bool, force: bool, flight: _Flight) -> None:
        lengths = [file.geometry.chunk_length(chunk) for chunk in range(first, last)]
        flight.begin(sum(lengths))
        if not self._reserve(sum(lengths), force):
            return
        kept = 0
        try:
            parts = [memoryview(bytearray(length)) for length in lengths]
            file.read_chunks(first, parts)
            if demand:
                self._demand += sum(lengths)
            else:
                self._ahead += sum(lengths)
            cached = self._cache.find(file.identity) if self._cache else None
            for chunk, part in enumerate(parts, first):
                if cached is None or not cached.store(chunk, part):
                    kept += len(part)
                    with self._lock:
                        self._held[file.identity, chunk] = part
        finally:
            self._budget.give(sum(lengths) - kept)

    def _reserve(self, count: int, force: bool) -> bool:
        """Take ``count`` bytes of the budget, dropping what has been held for longest."""
        with self._lock:
            while not self._budget.try_take(count):
                if not self._held:
                    if force:
                        self._budget.take(count)
                    return force
                self._drop_oldest()
            return True

    def _drop_oldest(self) -> None:
        _, gone = self._held.popitem(last=False)
        self._budget.give(len(gone))

    def _plan(self, file: ChunkFile, offset: int, end: int) -> None:
        """Fetch ahead when ``file`` is read in order. The kernel's own requests may come slightly out of order."""
        with self._lock:
            order = self._orders.setdefault(file.identity, _Order())
            self._orders.move_to_end(file.identity)
            if len(self._orders) > _ORDERS:
                self._orders.popitem(last=False)
            if abs(offset - order.next) > _STEP:  # not in order: begin anew from here
                order.next, order.ahead, order.step = end, 0, _STEP
                return
            order.next = max(order.next, end)
            chunk = order.next // file.unit
            start = max(order.ahead, -(-end // file.unit))
            target = min(file.geometry.chunks, chunk + max(1, order.step // file.unit))
            # wait until half a step is wanted: fewer and larger reads
            if start >= target or (target - start) * file.unit < min(order.step // 2, file.size - start * file.unit):
                return
            if len(self._flying) * file.unit + order.step > self._memory:
                return
            order.ahead, order.step = target, min(order.step * 2, _FAR, self._memory // 4)
        if not self._closed:
            self._pool.submit(self._ahead_of, file, start, target)

    def _ahead_of(self, file: ChunkFile, first: int, last: int) -> None:
        piece = max(1, _STEP * 2 // file.unit)
        for start in range(first, last, piece):
            if self._closed:
                return
            try:
                self._load(file, start, min(last, start + piece), demand=False, force=False)
            except BootseerError as exc:  # a reader who needs these bytes meets it himself
                _log.warning("read-ahead of %s stopped: %s", file.path, exc)
                return


def _runs(chunks: list[int]) -> list[list[int]]:
    """Consecutive numbers together."""
    found: list[list[int]] = []
    for chunk in chunks:
        if found and found[-1][-1] + 1 == chunk:
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found
