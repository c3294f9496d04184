"""Chunks of files on their way to readers: one fetch for all who want a chunk, read-ahead, a byte budget.

A read takes its chunks from a cache on disk, from memory, or from a fetch under way; what is missing it fetches itself,
as one parallel read, and gives it to the cache. A file that is read in order is fetched ahead in growing steps by
background threads.

Every chunk has memory of its own, so that what is dropped is free; what is being fetched counts like what is held.

Concurrency: any number of threads may read. ``_lock`` guards the tables and is never held while bytes move. One thread
at a time fetches a chunk (``_flying``); the others wait for it, up to a deadline (`_Fetch`).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from bootseer.backends.engine.memory import ByteBudget
from bootseer.backends.engine.memory import process as process_budget
from bootseer.backends.interface import DEADLINE, SLOWEST
from bootseer.errors import BootseerError, UnavailableError
from bootseer.ranges import runs
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.nodecache import NodeCache, NodeFile

_log = logging.getLogger(__name__)

MEMORY = 256 << 20
_STEP = 8 << 20
"""Smallest and largest distance of read-ahead; it doubles while a file is read in order."""
_FAR = 64 << 20
_PIECE = 16 << 20
"""Most bytes that read-ahead asks for at once."""
_FILES = 1024
"""Files of which is known how they are being read; one that was dropped is fetched ahead again after its next read."""
_WAIT = 4 * DEADLINE
"""Who waits for a fetch gives it up after so long for each of its runs, and twice what its bytes take at `SLOWEST`: a
read of them by itself may take that long too (its second try begins anew)."""
_THREADS = 3

Key = tuple[str, int]
Target = Callable[[int], memoryview | None]
"""The caller's own memory for a chunk; None where it wants only a part of the chunk."""


class _Fetch:
    """Chunks (``size`` bytes) that one thread fetches, run by run.

    ``ended``: by run, whether it is over, also when it failed. ``patience``: seconds after which all of them are.
    """

    def __init__(self, runs: list[range], size: int) -> None:
        self.runs = runs
        self.ended = {run[0]: threading.Event() for run in runs}
        self.patience = len(runs) * _WAIT + 2 * size / SLOWEST


class _Order:
    """How one file is being read: where the next read in order starts, and up to which chunk is fetched ahead."""

    def __init__(self, step: int) -> None:
        self.next, self.ahead, self.step = 0, 0, step


class ReadAhead:
    """``memory``: bytes of chunks that are held for readers or being fetched; also taken from the process's budget.

    Read-ahead stays below it; what a reader waits for is fetched in any case, and what is held makes room for it.
    ``step``, ``far``: smallest and largest distance of read-ahead; a read that begins within ``step`` bytes of the end
    of the one before is in order. ``cache``: where chunks of files that are open there are looked for and kept on disk.
    ``demand``, ``ahead``: bytes fetched from the store because a reader waited for them, and ahead of readers.
    """

    def __init__(
        self, cache: NodeCache | None = None, *, memory: int = MEMORY, step: int | None = None, far: int | None = None
    ) -> None:
        self._cache, self._memory = cache, memory
        self._step, self._far = step or _STEP, min(far or _FAR, memory // 2)
        self._budget = ByteBudget(memory, process_budget())
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, memoryview] = OrderedDict()
        self._flying: dict[Key, tuple[_Fetch, int]] = {}  # with the first chunk of its run
        self._orders: OrderedDict[str, _Order] = OrderedDict()
        self.demand = self.ahead = 0
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bootseer-ahead")

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
        cached = self._cached(file)
        if cached is not None and cached.sound(first, last):
            return cached.fd, offset
        self._load(file, first, last, demand=True)
        if cached is not None and cached.sound(first, last):
            return cached.fd, offset
        parts = []
        for chunk in range(first, last):
            start = chunk * file.unit
            low, high = max(offset - start, 0), min(end - start, file.unit)
            parts.append(self._take(file, chunk, drop=start + high == start + file.unit)[low:high])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def readinto(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset``; what is fetched for it goes there without a copy.

        As `ChunkFile.readinto`. Not with a cache on disk.
        """
        end = offset + len(view)
        first, last = offset // file.unit, -(-end // file.unit)
        self._plan(file, offset, end)

        def target(chunk: int) -> memoryview | None:
            start = chunk * file.unit - offset
            stop = start + file.geometry.chunk_length(chunk)
            return view[start:stop] if start >= 0 and stop <= len(view) else None

        filled = self._load(file, first, last, demand=True, target=target)
        for chunk in range(first, last):
            if chunk not in filled:
                start = chunk * file.unit
                low, high = max(offset, start), min(end, start + file.unit)
                view[low - offset : high - offset] = self._take(file, chunk, drop=high == start + file.unit)[
                    low - start : high - start
                ]

    def _take(self, file: ChunkFile, chunk: int, *, drop: bool) -> memoryview:
        """A chunk that `_load` brought; fetched again when the budget has pushed it out since."""
        key = (file.identity, chunk)
        with self._lock:
            if (data := self._held.get(key)) is not None:
                # read to its end: the kernel has it now, so it goes first when room is needed
                self._held.move_to_end(key, last=not drop)
                return data
        cached = self._cached(file)
        if cached is not None and (found := cached.load(chunk)) is not None:
            return found
        buffer = bytearray(file.geometry.chunk_length(chunk))
        file.read_chunks(chunk, [memoryview(buffer)])
        self.demand += len(buffer)
        return memoryview(buffer)

    def prefetch(self, file: ChunkFile, first: int, last: int) -> None:
        """Bring the chunks ``first`` to ``last`` (exclusive) in, in the calling thread: into the cache on disk, if the
        file is open there, else into memory."""
        self._load(file, first, last, store=True)

    def _cached(self, file: ChunkFile) -> NodeFile | None:
        return self._cache.find(file.identity) if self._cache else None

    def _load(
        self,
        file: ChunkFile,
        first: int,
        last: int,
        *,
        demand: bool = False,
        force: bool = True,
        store: bool = False,
        target: Target = lambda chunk: None,
    ) -> set[int]:
        """Have the chunks present: fetch those that nobody has or fetches, wait for the others.

        Without ``force`` they stay away when there is no memory for them. Those with a ``target`` that are fetched here
        go there, and are not held. Returns their numbers. With ``store`` the cache on disk takes chunks at once.
        """
        filled: set[int] = set()
        mine, others = self._claim(file, range(first, last))
        try:
            for run in mine.runs:
                targets = {chunk: view for chunk in run if (view := target(chunk)) is not None}
                self._fetch(file, run, targets, demand, force, store)
                filled.update(targets)
                self._release(file, mine, run)
        finally:
            for run in mine.runs:
                self._release(file, mine, run)
        for fetch, start in others:
            if not fetch.ended[start].wait(fetch.patience):
                raise UnavailableError(
                    f"{file.path} was not read: who fetches it has not got on ({fetch.patience:.0f} s waited)",
                    hint="check that the storage is reachable from here",
                )
        return filled

    def _claim(self, file: ChunkFile, chunks: Iterable[int]) -> tuple[_Fetch, list[tuple[_Fetch, int]]]:
        """The chunks that nobody has or fetches, as a fetch of this thread; and the runs of others to wait for."""
        cached = self._cached(file)
        others: dict[tuple[int, int], tuple[_Fetch, int]] = {}
        missing = [chunk for chunk in chunks if cached is None or not cached.has(chunk)]
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
            together = [range(first, first + count) for first, count in runs(mine)]
            fetch = _Fetch(together, sum(map(file.geometry.chunk_length, mine)))
            for run in fetch.runs:
                for chunk in run:
                    self._flying[file.identity, chunk] = fetch, run[0]
        return fetch, list(others.values())

    def _release(self, file: ChunkFile, fetch: _Fetch, run: range) -> None:
        """Wake who waits for ``run``, once. After a failure they find its chunks missing and try for themselves."""
        if fetch.ended[run[0]].is_set():
            return
        with self._lock:
            for chunk in run:
                del self._flying[file.identity, chunk]
        fetch.ended[run[0]].set()

    def _fetch(
        self, file: ChunkFile, run: range, targets: dict[int, memoryview], demand: bool, force: bool, store: bool
    ) -> None:
        lengths = {chunk: file.geometry.chunk_length(chunk) for chunk in run}
        total = sum(lengths.values())
        reserved = total - sum(map(len, targets.values()))
        if not self._reserve(reserved, force):
            return
        try:
            parts = {
                chunk: targets[chunk] if chunk in targets else memoryview(bytearray(length))
                for chunk, length in lengths.items()
            }
            file.read_chunks(run[0], list(parts.values()))
            if demand:
                self.demand += total
            else:
                self.ahead += total
            cached = self._cached(file)
            for chunk, part in parts.items():
                if chunk in targets or (store and cached is not None and cached.store(chunk, part)):
                    continue
                reserved -= len(part)
                with self._lock:
                    self._held[file.identity, chunk] = part
                if cached is not None:
                    cached.keep(chunk, part)
        finally:
            self._budget.give(reserved)

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
            order = self._orders.setdefault(file.identity, _Order(self._step))
            self._orders.move_to_end(file.identity)
            if len(self._orders) > _FILES:
                self._orders.popitem(last=False)
            if abs(offset - order.next) > self._step:  # not in order: begin anew from here
                order.next, order.ahead, order.step = end, 0, self._step
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
            order.ahead, order.step = target, min(order.step * 2, self._far)
        if not self._closed:
            cached = self._cached(file)  # which the reader has open; it must stay so
            self._pool.submit(self._ahead_of, file, start, target, cached.hold() if cached else None)

    def _ahead_of(self, file: ChunkFile, first: int, last: int, cached: NodeFile | None) -> None:
        piece = max(1, _PIECE // file.unit)
        try:
            for start in range(first, last, piece):
                if not self._closed:
                    self._load(file, start, min(last, start + piece), force=False)
        except BootseerError as exc:  # a reader who needs these bytes meets it himself
            _log.warning("read-ahead of %s stopped: %s", file.path, exc)
        finally:
            if cached is not None:
                cached.release()


def in_order(file: ChunkFile) -> Iterator[memoryview]:
    """All bytes of ``file`` from start to end, chunk by chunk, while read-ahead brings the next ones.

    Errors as of `ChunkFile.readinto`. To be used up or closed.
    """
    ahead = ReadAhead(memory=4 * _PIECE)
    try:
        for offset in range(0, file.size, file.unit):
            found = ahead.read(file, offset, min(file.unit, file.size - offset))
            assert isinstance(found, memoryview)
            yield found
    finally:
        ahead.close()
