"""The fetcher: threads that bring missing blocks from the sources into the cache file, verified.

One lock guards the queue, the tickets of waiting readers and the counters; it is never held during I/O. A block is in
flight once at most; a reader who needs one in flight joins it, and one that is only queued for prefetch becomes demand.
See ``docs/internals/blocks-concurrency.md``.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterable, Sequence

import msgspec

from bootseer.blocks._hash import Buffer
from bootseer.blocks.cache import CacheFile
from bootseer.blocks.flight import FetchStats, Flight, Ticket
from bootseer.blocks.pack import decompress
from bootseer.blocks.queue import Batch, FetchQueue, Priority
from bootseer.blocks.source import Source
from bootseer.errors import BootseerError, DataError, UnavailableError

log = logging.getLogger(__name__)

DEMAND_WINDOW = 1 << 20
"""Without a profile a miss fetches this aligned window: measured best of 64 KiB .. 1 MiB at 10 ms per request."""

_FIRST_DELAY = 0.05
_LAST_DELAY = 2.0
_LONGEST_PAUSE = 30.0
_BACKGROUND_STREAMS = 2
"""So that a reader's request never queues behind more than two large ones on a slow link."""


class Fetcher:
    """Fills ``cache`` from ``sources`` (tried in order) with up to ``streams`` range requests at once.

    ``window``: bytes fetched around a demanded block. ``deadline``: seconds a reader waits before `UnavailableError`.
    ``quiet``: background fill starts after this many seconds without demand, until `eager` lifts that.
    """

    def __init__(
        self,
        cache: CacheFile,
        sources: Sequence[Source],
        *,
        streams: int = 6,
        window: int = DEMAND_WINDOW,
        deadline: float = 60.0,
        quiet: float = 0.5,
    ) -> None:
        self.stats = FetchStats()
        self._cache = cache
        self._map = cache.map
        self._sources = list(sources)
        self._queue = FetchQueue(self._map, cache.ready, window=max(1, window >> self._map.shift))
        self._deadline = deadline
        self._quiet = quiet
        self._cond = threading.Condition()
        self._closing = threading.Event()
        self._tickets: dict[int, list[Ticket]] = {}
        self._flights: set[Flight] = set()
        self._last_demand = time.monotonic()
        self._pause_until = 0.0
        self._pause = _FIRST_DELAY
        self._full = False
        self._streams = max(1, streams)
        self._threads: list[threading.Thread] = []
        reserved = 0 if self._streams == 1 else max(1, self._streams // 3)
        for index in range(self._streams):
            self._spawn(index < reserved)

    def _spawn(self, demand_only: bool) -> None:
        # Daemon threads: one stuck in a source that never answers must not keep the process alive.
        thread = threading.Thread(target=self._work, args=(demand_only,), name="fetch", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    # -- wishes ------------------------------------------------------------------------------------------------

    def demand(self, first: int, last: int) -> dict[int, bytes]:
        """Return when blocks ``first`` to ``last`` are ready, with the bytes of those that could not be cached.

        Raises `UnavailableError` after the deadline, `DataError` for a block damaged in every source.
        """
        until = time.monotonic() + self._deadline
        mine: dict[int, Ticket] = {}
        with self._cond:
            self._refuse_closed()
            for block in range(first, last + 1):
                if not self._cache.ready[block]:
                    ticket = mine[block] = Ticket()
                    self._tickets.setdefault(block, []).append(ticket)
                    self._queue.demand(block)
            self._last_demand = time.monotonic()
            self._cond.notify_all()
        memory: dict[int, bytes] = {}
        try:
            for block, ticket in mine.items():
                if not ticket.done.wait(max(0.0, until - time.monotonic())):
                    self._abandon(block, mine)
                    raise UnavailableError(
                        f"block {block} did not come from {self._sources[0].name} within {self._deadline:g} s",
                        hint="check that the store answers",
                    )
                if ticket.error is not None:
                    raise ticket.error
                if ticket.data is not None:
                    memory[block] = ticket.data
        finally:
            with self._cond:
                self._last_demand = time.monotonic()
                for block, ticket in mine.items():
                    self._forget(block, ticket)
        return memory

    def hot(self, order: Sequence[int]) -> None:
        """Fetch these blocks next, in this order; from now on a miss fetches only what it needs."""
        with self._cond:
            self._queue.hot(order)
            self._queue.window = 1
            self._cond.notify_all()

    def background(self, on: bool = True) -> None:
        """Fetch everything else when nothing more urgent is wanted."""
        with self._cond:
            self._queue.background(on and not self._full)
            self._cond.notify_all()

    def eager(self) -> None:
        """The start is over: background fill need not wait for a quiet moment any more."""
        with self._cond:
            self._quiet = 0.0
            self._cond.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is queued or in flight; False when that takes longer than ``timeout`` seconds."""
        with self._cond:
            return self._cond.wait_for(lambda: self._closing.is_set() or self._idle(), timeout)

    def _idle(self) -> bool:
        return not (self._flights or self._queue.hot_pending or self._queue.filling)

    @property
    def full(self) -> bool:
        """Whether the cache ran out of space: demand is served from memory, prefetch has stopped."""
        return self._full

    def close(self, timeout: float = 10.0) -> None:
        """Stop all threads; readers that wait get `UnavailableError`."""
        with self._cond:
            self._closing.set()
            for tickets in self._tickets.values():
                for ticket in tickets:
                    ticket.error = UnavailableError("the block server is stopping")
                    ticket.done.set()
            self._cond.notify_all()
        until = time.monotonic() + timeout
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            log.warning("%d fetch threads are stuck in a source that does not answer; leaving them", stuck)
        for source in self._sources:
            source.close()

    def _refuse_closed(self) -> None:
        if self._closing.is_set():
            raise UnavailableError("the block server is stopping")

    def _forget(self, block: int, ticket: Ticket) -> None:
        waiting = self._tickets.get(block)
        if waiting and ticket in waiting:
            waiting.remove(ticket)
            if not waiting:
                del self._tickets[block]

    def _abandon(self, block: int, mine: dict[int, Ticket]) -> None:
        """A reader gave up on ``block``. When its flight is stuck, let the next reader start another one."""
        with self._cond:
            for other, ticket in mine.items():
                self._forget(other, ticket)
            for flight in list(self._flights):
                # Half: the flight began a little after the reader, or was a prefetch that the reader joined late.
                if block in flight.batch.blocks and time.monotonic() - flight.started >= self._deadline / 2:
                    log.warning("a request to %s does not return; leaving it", self._sources[0].name)
                    flight.abandoned = True
                    self._flights.discard(flight)
                    self._queue.done(flight.batch.blocks)
                    for other in flight.batch.blocks:
                        if other in self._tickets:
                            self._queue.demand(other)
                    # One that is not replaced goes on working when it returns, so the number at work never shrinks.
                    if sum(thread.is_alive() for thread in self._threads) < 4 * self._streams:
                        flight.replaced = True
                        self._spawn(flight.demand_only)
                    self._cond.notify_all()

    # -- workers -----------------------------------------------------------------------------------------------

    def _work(self, demand_only: bool) -> None:
        while True:
            with self._cond:
                while (batch := self._take(demand_only)) is None:
                    if self._closing.is_set():
                        return
                    self._cond.wait(0.1 if self._queue.filling or self._queue.hot_pending else 5.0)
                flight = Flight(batch, time.monotonic(), demand_only)
                self._flights.add(flight)
            try:
                self._run(flight)
            except Exception as exc:
                log.exception("fetching blocks %d..%d failed", batch.blocks[0], batch.blocks[-1])
                for block in batch.blocks:
                    self._finish(block, error=UnavailableError(f"fetching block {block} failed: {exc!r}"))
            with self._cond:
                self._flights.discard(flight)
                self._cond.notify_all()
                if flight.replaced:
                    return

    def _take(self, demand_only: bool) -> Batch | None:
        if self._closing.is_set():
            return None
        if (batch := self._queue.take_demand()) is not None or demand_only:
            return batch
        now = time.monotonic()
        if now < self._pause_until:
            return None
        if (batch := self._queue.take_ahead() or self._queue.take_hot()) is not None:
            return batch
        flying = [flight.batch.priority for flight in self._flights]
        if (
            now - self._last_demand < self._quiet
            or Priority.DEMAND in flying
            or flying.count(Priority.BACKGROUND) >= _BACKGROUND_STREAMS
        ):
            return None
        filling = self._queue.filling
        batch = self._queue.take_background()
        if filling and not self._queue.filling:
            self._cond.notify_all()
        return batch

    def _run(self, flight: Flight) -> None:
        batch = flight.batch
        delay = _FIRST_DELAY
        while True:
            flight.started = time.monotonic()
            try:
                raw: bytes | None = self._read(batch.offset, batch.length, batch.priority)
                break
            except DataError as exc:
                # Perhaps only a part of the range is damaged or cut off: look at each block on its own.
                log.warning("%s", exc)
                raw = None
                break
            except UnavailableError as exc:
                if not self._again(flight, exc, delay):
                    return
                delay = min(2 * delay, _LAST_DELAY)
            except BootseerError as exc:
                log.warning("%s", exc)
                self._fail(batch.blocks, exc)
                return
        with self._cond:
            self._pause = _FIRST_DELAY
        view = memoryview(raw) if raw is not None else None
        lost: list[int] = []
        for block in batch.blocks:
            try:
                self._deliver(block, self._open(block, view, batch))
            except UnavailableError:
                lost.append(block)
            except BootseerError as exc:
                self._fail([block], exc)
        if lost and not self._closing.wait(_FIRST_DELAY):
            self._put_back(msgspec.structs.replace(batch, blocks=lost))

    def _open(self, block: int, view: memoryview | None, batch: Batch) -> bytes:
        """The verified bytes of ``block``, from the batch's range or, when those are bad, from the sources again."""
        if view is not None:
            start = self._map.offsets[block] - batch.offset
            try:
                return self._verify(block, view[start : start + self._map.lengths[block]])
            except DataError as exc:
                log.warning("block %d from %s: %s; fetching it again", block, self._sources[0].name, exc)
        with self._cond:
            self.stats.bad_blocks += 1
        trouble: BootseerError = DataError("no source")
        for source in self._sources:
            try:
                raw = source.read(self._map.offsets[block], self._map.lengths[block])
                self._count(batch.priority, len(raw))
                return self._verify(block, raw)
            except BootseerError as exc:
                if not isinstance(trouble, UnavailableError):
                    trouble = exc
                log.warning("block %d from %s: %s", block, source.name, exc)
        if isinstance(trouble, UnavailableError):
            raise trouble
        raise DataError(f"block {block} is damaged in every source ({self._sources[0].name}): {trouble.message}")

    def _verify(self, block: int, frame: Buffer) -> bytes:
        data = decompress(frame, self._map.length_of(block))
        if not self._map.matches(block, data):
            raise DataError("hash differs")
        return data

    def _read(self, offset: int, length: int, priority: Priority) -> bytes:
        trouble: BootseerError | None = None
        for source in self._sources:
            try:
                raw = source.read(offset, length)
            except BootseerError as exc:
                # An answer that may change (unavailable) outranks one that will not.
                if not isinstance(trouble, UnavailableError):
                    trouble = exc
                continue
            self._count(priority, length)
            return raw
        raise trouble or UnavailableError("no source to fetch blocks from")

    def _count(self, priority: Priority, length: int) -> None:
        with self._cond:
            self.stats.requests += 1
            if priority is Priority.DEMAND:
                self.stats.demand_bytes += length
            elif priority is Priority.HOT:
                self.stats.hot_bytes += length
            else:
                self.stats.background_bytes += length

    # -- results -----------------------------------------------------------------------------------------------

    def _again(self, flight: Flight, exc: UnavailableError, delay: float) -> bool:
        """The source did not answer. True: try the same batch again (a reader waits for it)."""
        batch = flight.batch
        with self._cond:
            self.stats.retries += 1
            if flight.abandoned:
                return False
            waited_for = any(block in self._tickets for block in batch.blocks)
            if batch.priority is not Priority.DEMAND and time.monotonic() >= self._pause_until:
                log.warning("prefetch pauses for %.2g s: %s", self._pause, exc)
                self._pause_until = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if batch.priority is not Priority.DEMAND or not waited_for or self._closing.is_set():
            self._put_back(batch)
            return False
        log.warning("fetch of blocks %d..%d: %s; trying again", batch.blocks[0], batch.blocks[-1], exc)
        return not self._closing.wait(delay)

    def _put_back(self, batch: Batch) -> None:
        with self._cond:
            self._queue.put_back(batch, [block for block in batch.blocks if block in self._tickets])
            self._cond.notify_all()

    def _fail(self, blocks: Iterable[int], exc: BootseerError) -> None:
        for block in blocks:
            with self._cond:
                self._queue.give_up(block)
            self._finish(block, error=exc)

    def _deliver(self, block: int, data: bytes) -> None:
        try:
            self._cache.write(block, data)
        except OSError as exc:
            self._note_full(exc)
            self._finish(block, data=data)
        else:
            self._finish(block)

    def _note_full(self, exc: OSError) -> None:
        with self._cond:
            self.stats.uncached_blocks += 1
            self._queue.stop_prefetch()
            self._queue.window = 1
            first = not self._full
            self._full = True
        if first:
            why = "is full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({exc.strerror})"
            log.warning("block cache %s %s: serving reads from memory, prefetch stops", self._cache.folder, why)

    def _finish(self, block: int, *, data: bytes | None = None, error: BootseerError | None = None) -> None:
        with self._cond:
            self._queue.done([block])
            for ticket in self._tickets.pop(block, ()):
                ticket.data = data
                ticket.error = error
                ticket.done.set()
