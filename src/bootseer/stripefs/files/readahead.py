"""Chunks of files on their way to readers: one fetch for all who want a chunk, read-ahead, a byte budget.

A read takes its chunks from memory, or from a fetch under way (`flight`); what is missing it reads itself, as one
parallel read, which asks the node's disk first, and gives it there. What is sound on that disk the kernel reads. A file
that is read in order is fetched ahead in growing steps by background threads.

Every chunk has memory of its own, so that what is dropped is free; what is being fetched counts like what is held.

Concurrency: any number of threads may read. ``_lock`` guards the tables and is never held while bytes move."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bootseer.backends.engine.memory import ByteBudget
from bootseer.backends.engine.memory import process as process_budget
from bootseer.errors import BootseerError, DataError
from bootseer.stripefs.files.flight import Flights
from bootseer.stripefs.files.reader import ChunkFile

_log = logging.getLogger(__name__)

MEMORY = 256 << 20
_STEP = 8 << 20
"""Smallest and largest distance of read-ahead; it doubles while a file is read in order."""
_FAR = 64 << 20
_PIECE = 16 << 20
"""Most bytes that read-ahead asks for at once."""
_NEAR = 8
"""A read is in order that begins within so many times its length of the end of the one before."""
_STREAMS = 16
"""Readers of one file that are told apart; a jump within a read's length of the end of one's last read is his."""
_FILES = 1024
"""Files of which is known how they are being read; one that was dropped is fetched ahead again after its next read."""
_THREADS = 3

Key = tuple[str, int]
Target = Callable[[int], memoryview | None]
"""The caller's own memory for a chunk; None where it wants only a part of the chunk."""


class _Order:
    """How one file is being read: where the ``next`` read in order starts, up to which chunk it is fetched ``ahead``,
    and how far that goes now (``step``: from ``least`` up to ``far`` bytes). ``alone``: the last read was not in
    order, nor does it go on where one of several readers was; ``_from``: the chunk in which the last read out of order
    began, perhaps only a part of it was read."""

    def __init__(self, least: int, far: int) -> None:
        self._least, self._far = least, far
        self.next, self.ahead, self.step = 0, 0, least
        self.alone, self._from, self._ends = False, sys.maxsize, list[int]()

    def advance(self, file: ChunkFile, offset: int, end: int, room: int) -> range:
        """The chunks to fetch ahead, perhaps none, when ``offset`` to ``end`` is read and there is memory for ``room``
        bytes. The kernel's own requests may come slightly out of order."""
        # who reads little at a time goes no far way in order
        near = min(self._least, _NEAR * (end - offset))
        jumped = abs(offset - self.next) > near
        others = [at for at in self._ends if abs(offset - at) > end - offset]
        self.alone = jumped and len(others) == len(self._ends)
        self._ends = [*others, end][-_STREAMS:]
        if jumped:  # begin anew from here
            self.next, self.ahead, self.step, self._from = end, 0, self._least, offset // file.unit
            return range(0)
        self.next = max(self.next, end)
        start = max(self.ahead, -(-end // file.unit))
        if self._from < offset // file.unit:
            start = self._from
        self._from = sys.maxsize
        stop = min(file.geometry.chunks, self.next // file.unit + max(1, self.step // file.unit))
        # wait until half a step is wanted: fewer and larger reads
        wanted = min(self.step // 2, file.size - start * file.unit)
        if start >= stop or (stop - start) * file.unit < wanted or self.step > room:
            return range(0)
        self.ahead, self.step = stop, min(self.step * 2, self._far)
        return range(start, stop)


class ReadAhead:
    """``memory``: bytes of chunks that are held for readers or being fetched; also taken from the process's budget.

    Read-ahead stays below it; what a reader waits for is fetched in any case, and what is held makes room for it.
    ``step``, ``far``: smallest and largest distance of read-ahead; a read that begins within ``step`` bytes of the end
    of the one before is in order.
    ``demand``, ``ahead``: bytes fetched from the store because a reader waited for them, and ahead of readers."""

    def __init__(self, *, memory: int = MEMORY, step: int | None = None, far: int | None = None) -> None:
        self._memory = memory
        self._step, self._far = step or _STEP, min(far or _FAR, memory // 2)
        self._budget = ByteBudget(memory, process_budget())
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, memoryview] = OrderedDict()
        self._flights = Flights()
        self._orders: OrderedDict[str, _Order] = OrderedDict()
        self.demand = self.ahead = 0
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bootseer-ahead")

    def close(self, timeout: float | None = None) -> bool:
        """Stop fetching ahead and wait for what is under way. False: that has not ended within ``timeout`` seconds."""
        self._closed, ended = True, True
        if timeout is None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        else:  # a pool's own end has no deadline
            end = partial(self._pool.shutdown, wait=True, cancel_futures=True)
            (waiter := threading.Thread(target=end, daemon=True)).start()
            waiter.join(timeout)
            ended = not waiter.is_alive()
        with self._lock:
            while self._held:
                self._drop_oldest()
        return ended

    def read(self, file: ChunkFile, offset: int, size: int) -> memoryview | tuple[int, int]:
        """Bytes ``offset`` to ``offset + size`` of ``file``, all inside of it, or (fd, offset) of what is on the node's
        disk. Raises `BootseerError` when they cannot be had."""
        end = offset + size
        first, last = offset // file.unit, -(-end // file.unit)
        alone = self._plan(file, offset, end)
        if (fd := file.local.fd_of(first, last)) is not None:
            return fd, offset
        if alone and self._apart(file, offset, view := memoryview(bytearray(size))):
            return view
        parts = []
        try:
            self._load(file, range(first, last), demand=True)
            for chunk in range(first, last):
                start = chunk * file.unit
                low, high = max(offset - start, 0), min(end - start, file.unit)
                parts.append(self._take(file, chunk, drop=start + high == start + file.unit)[low:high])
        except DataError:
            if file.geometry.grain == file.unit:
                raise  # else other sectors of a damaged chunk may be sound
            self.demand += file.readinto_many([(offset, view := memoryview(bytearray(size)))])
            return view
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def readinto(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """`ChunkFile.readinto`; what is fetched for ``view`` goes there without a copy."""
        end = offset + len(view)
        first, last = offset // file.unit, -(-end // file.unit)
        if self._plan(file, offset, end) and self._apart(file, offset, view):
            return

        def target(chunk: int) -> memoryview | None:
            start = chunk * file.unit - offset
            stop = start + file.geometry.chunk_length(chunk)
            return view[start:stop] if start >= 0 and stop <= len(view) else None

        try:
            filled = self._load(file, range(first, last), demand=True, target=target)
            for chunk in range(first, last):
                if chunk not in filled:
                    start = chunk * file.unit
                    low, high = max(offset, start), min(end, start + file.unit)
                    view[low - offset : high - offset] = self._take(file, chunk, drop=high == start + file.unit)[
                        low - start : high - start
                    ]
        except DataError:
            if file.geometry.grain == file.unit:
                raise  # as of `read`
            self.demand += file.readinto_many([(offset, view)])

    def _take(self, file: ChunkFile, chunk: int, *, drop: bool) -> memoryview:
        """A chunk that `_load` brought; fetched again when the budget has pushed it out since."""
        key = (file.identity, chunk)
        with self._lock:
            if (data := self._held.get(key)) is not None:
                # read to its end: the kernel has it now, so it goes first when room is needed
                self._held.move_to_end(key, last=not drop)
                return data
        buffer = memoryview(bytearray(file.geometry.chunk_length(chunk)))
        with self._flights.trying(file, range(chunk, chunk + 1)):
            self.demand += file.read_chunks(chunk, [buffer])
        return buffer

    def prefetch(self, file: ChunkFile, first: int, last: int) -> None:
        """Bring the chunks ``first`` to ``last`` (exclusive) in, in the calling thread: onto the node's disk, if the
        file is kept there, else into memory."""
        if file.local.fd_of(first, last) is None:
            self._load(file, range(first, last), store=True)

    def _load(
        self,
        file: ChunkFile,
        chunks: range,
        *,
        demand: bool = False,
        force: bool = True,
        store: bool = False,
        target: Target = lambda chunk: None,
    ) -> set[int]:
        """Have the chunks present; without ``force`` they stay away when there is no memory for them. Those with a
        ``target`` that are fetched here go there, and are not held. Returns their numbers. With ``store`` the node's
        disk takes chunks at once."""
        filled: set[int] = set()
        self._flights.bring(
            file,
            chunks,
            lambda chunk: (file.identity, chunk) in self._held,
            lambda run: filled.update(self._fetch(file, run, target, demand, force, store)),
        )
        return filled

    def _fetch(self, file: ChunkFile, run: range, target: Target, demand: bool, force: bool, store: bool) -> set[int]:
        targets = {chunk: view for chunk in run if (view := target(chunk)) is not None}
        lengths = {chunk: file.geometry.chunk_length(chunk) for chunk in run}
        reserved = sum(length for chunk, length in lengths.items() if chunk not in targets)
        if not self._reserve(reserved, force):
            return set()
        try:
            parts = {chunk: targets.get(chunk) or memoryview(bytearray(length)) for chunk, length in lengths.items()}
            fetched = file.read_chunks(run[0], list(parts.values()), keep=targets)
            if demand:
                self.demand += fetched
            else:
                self.ahead += fetched
            for chunk, part in parts.items():
                if chunk not in targets and not (store and file.local.store(chunk, part)):
                    file.local.keep(chunk, [part], steady=True)
                    reserved -= len(part)
                    with self._lock:
                        self._held[file.identity, chunk] = part
            return set(targets)
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

    def _apart(self, file: ChunkFile, offset: int, view: memoryview) -> bool:
        """Read by itself what a reader who has jumped wants; whether that was worth it."""
        chunks = range(offset // file.unit, -(-(offset + len(view)) // file.unit))
        with self._lock:
            if all((file.identity, chunk) in self._held for chunk in chunks):
                return False
        if not file.apart(offset, len(view)):
            return False
        with self._flights.trying(file, chunks):
            self.demand += file.readinto_many([(offset, view)])
        return True

    def _plan(self, file: ChunkFile, offset: int, end: int) -> bool:
        """Fetch ahead when ``file`` is read in order; whether no reader of it gets on with this read."""
        with self._lock:
            order = self._orders.setdefault(file.identity, _Order(self._step, self._far))
            self._orders.move_to_end(file.identity)
            if len(self._orders) > _FILES:
                self._orders.popitem(last=False)
            chunks = order.advance(file, offset, end, self._memory - len(self._flights) * file.unit)
        if chunks and not self._closed:
            with contextlib.suppress(RuntimeError):  # the program ends: readers fetch what they want themselves
                self._pool.submit(self._ahead_of, file, chunks)
        return order.alone

    def _ahead_of(self, file: ChunkFile, chunks: range) -> None:
        piece = max(1, _PIECE // file.unit)
        try:
            for start in range(chunks.start, chunks.stop, piece):
                some = range(start, min(chunks.stop, start + piece))
                if not self._closed and file.local.fd_of(some.start, some.stop) is None:
                    self._load(file, some, force=False)
        except BootseerError as exc:  # a reader who needs these bytes meets it himself
            _log.warning("read-ahead of %s stopped: %s", file.path, exc)


def in_order(file: ChunkFile) -> Iterator[memoryview]:
    """All bytes of ``file`` from start to end, chunk by chunk, while read-ahead brings the next ones. To be used up or
    closed. Errors as of `ChunkFile.readinto`."""
    ahead = ReadAhead(memory=4 * _PIECE)
    try:
        for offset in range(0, file.size, file.unit):
            found = ahead.read(file, offset, min(file.unit, file.size - offset))
            assert isinstance(found, memoryview)
            yield found
    finally:
        ahead.close()
