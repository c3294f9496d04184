"""The fetcher: threads that bring missing blocks from the sources into the cache file, verified.

One lock guards the queue, the hot stream, the waiting requests and the counters; it is never held during I/O. A block
is in flight once, unless a reader waits for one whose range is late: then it is fetched a second time, alone. See
``docs/internals/blocks-concurrency.md``.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from bootseer.blocks._hash import Buffer
from bootseer.blocks.cache import CacheFile
from bootseer.blocks.decode import verified_many
from bootseer.blocks.flight import Concurrency, FetchStats, Flight, Pace
from bootseer.blocks.hotstream import HotStream
from bootseer.blocks.queue import STREAM, Batch, FetchQueue, Priority
from bootseer.blocks.source import Source, Sources
from bootseer.blocks.waiting import DEADLINE, Done, Request, Waiting
from bootseer.errors import BootseerError, DataError, UnavailableError

log = logging.getLogger(__name__)

DEMAND_WINDOW = 1 << 20
"""Without a profile a miss fetches this aligned window: measured best of 64 KiB .. 1 MiB at 10 ms per request."""

_FIRST_DELAY = 0.05
_LAST_DELAY = 2.0
_LONGEST_PAUSE = 30.0
_BACKGROUND_STREAMS = 2
"""So that a reader's request never queues behind more than two large ones on a slow link."""
_STREAM_FLIGHTS = 3
"""Two ranges of the hot pack on the way while the one before is decompressed and written."""
_SMALL = 256 << 10
"""Requests up to this size tell how long a direct fetch takes."""
_CHUNK = 2 << 20
"""Uncompressed bytes verified and written before the readers of these blocks are told: bounds memory and their wait."""
_BEAT = 0.005


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
        self._sources = Sources(sources)
        self._stream_sources: list[Source] = []
        self._queue = FetchQueue(self._map, cache.ready, window=max(1, window >> self._map.shift))
        self._stream: HotStream | None = None
        self._hot: Sequence[int] = ()
        self._deadline = deadline
        self._quiet = quiet
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)
        self._work_done = threading.Condition(self._lock)
        self._alarm = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._waiting = Waiting()
        self._served: deque[Request] = deque()
        self._flights: set[Flight] = set()
        self._last_demand = time.monotonic()
        self._pause_until = 0.0
        self._pause = _FIRST_DELAY
        self._full = False
        self._streams = max(1, streams)
        self._room = Concurrency(self._streams)
        self._pace = Pace()
        self._chunk = max(1, _CHUNK >> self._map.shift)
        self._threads: list[threading.Thread] = []
        reserved = 0 if self._streams == 1 else max(1, self._streams // 3)
        for index in range(self._streams):
            self._spawn(index < reserved)
        self._clock = threading.Thread(target=self._watch, name="fetch-clock", daemon=True)
        self._clock.start()

    def _spawn(self, demand_only: bool) -> None:
        # Daemon threads: one stuck in a source that never answers must not keep the process alive.
        thread = threading.Thread(target=self._work, args=(demand_only,), name="fetch", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    # -- wishes ------------------------------------------------------------------------------------------------

    def submit(self, first: int, last: int, done: Done) -> None:
        """Bring blocks ``first`` to ``last``; ``done(error, memory)`` is called once, from a thread of the fetcher
        (or the one in `close`): it must be short and take no lock that is held while calling the fetcher.

        ``error`` is None when all blocks are ready or, those that could not be cached, in ``memory``; else
        `UnavailableError` (after the deadline) or `DataError` (a block is damaged in every source). Raises
        `UnavailableError`, and never calls ``done``, after `close`.
        """
        now = time.monotonic()
        ready = self._cache.ready
        with self._lock:
            if self._closing.is_set():
                raise UnavailableError("the block server is stopping")
            pending = [block for block in range(first, last + 1) if not ready[block]]
            request = Request(set(pending), done, now + self._deadline)
            self._last_demand = now
            if pending:
                self._waiting.add(request)
                for block in pending:
                    self._want(block, request, now)
                # One thread: if one request cannot bring all, that thread wakes the next.
                self._work_came.notify()
            else:
                request.settled = True
                self._served.append(request)
            self._alarm.notify()

    def _want(self, block: int, request: Request, now: float) -> None:
        direct = self._pace.seconds * (1 + self._queue.demanded / self._streams)
        if self._queue.in_flight(block):
            late = self._stream.backlog if self._stream is not None else 0.0
        elif (late := self._due(block, now)) <= direct:
            self.stats.stream_waits += 1
        else:
            self.stats.direct_misses += 1
            self._queue.demand(block)
            return
        self._waiting.alarm(now + 2 * max(late, direct) + _BEAT, request, block)

    def _due(self, block: int, now: float) -> float:
        due = self._stream.due(block) if self._stream is not None and now >= self._pause_until else None
        return math.inf if due is None else due

    def demand(self, first: int, last: int) -> dict[int, bytes]:
        """`submit`, and wait: returns the bytes of the blocks that could not be cached, or raises the error."""
        done = threading.Event()
        answer: list[tuple[BootseerError | None, dict[int, bytes]]] = []

        def settle(error: BootseerError | None, memory: dict[int, bytes]) -> None:
            answer.append((error, memory))
            done.set()

        self.submit(first, last, settle)
        done.wait()
        error, memory = answer[0]
        if error is not None:
            raise error
        return memory

    def hot(self, order: Sequence[int]) -> None:
        """Fetch these blocks next, in this order; from now on a miss fetches only what it needs."""
        with self._lock:
            self._hot = order
            if not self._full:
                self._queue.hot(order)
            self._queue.window = 1
            self._work_came.notify_all()

    def stream(self, stream: HotStream) -> None:
        """Fetch a hot pack, before what `hot` names. Its source is closed with the others."""
        with self._lock:
            self._stream_sources.append(stream.source)
            self._stream = None if self._full else stream
            self._queue.window = 1
            self._work_came.notify_all()

    def background(self, on: bool = True) -> None:
        """Fetch everything else when nothing more urgent is wanted."""
        with self._lock:
            self._queue.background(on and not self._full)
            self._work_came.notify_all()

    def eager(self) -> None:
        """The start is over: background fill need not wait for a quiet moment any more."""
        with self._lock:
            self._quiet = 0.0
            self._work_came.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is queued or in flight; False when that takes longer than ``timeout`` seconds."""
        with self._lock:
            return self._work_done.wait_for(lambda: self._closing.is_set() or self._idle(), timeout)

    def _idle(self) -> bool:
        streaming = self._stream is not None and self._stream.pending
        return not (self._flights or streaming or self._queue.hot_pending or self._queue.filling)

    @property
    def full(self) -> bool:
        """Whether the cache ran out of space: demand is served from memory, prefetch has stopped."""
        return self._full

    def close(self, timeout: float = 10.0) -> None:
        """Stop all threads; readers that wait get `UnavailableError`."""
        with self._lock:
            self._closing.set()
            left = self._waiting.all()
            for request in left:
                self._waiting.settle(request, UnavailableError("the block server is stopping"))
            for condition in (self._work_came, self._work_done, self._alarm):
                condition.notify_all()
        for request in left:
            request.answer()
        until = time.monotonic() + timeout
        for thread in [*self._threads, self._clock]:
            thread.join(max(0.0, until - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            log.warning("%d fetch threads are stuck in a source that does not answer; leaving them", stuck)
        self._sources.close()
        for source in self._stream_sources:
            source.close()

    # -- the clock ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ends requests at their deadline, gives late blocks another chance, answers those who need not wait."""
        while True:
            with self._lock:
                while not self._served:
                    now = time.monotonic()
                    at = self._waiting.next_alarm()
                    if at is not None and at <= now:
                        break
                    if self._closing.is_set():
                        return
                    self._alarm.wait(5.0 if at is None else min(5.0, at - now))
                settled = list(self._served)
                self._served.clear()
                for request, block in self._waiting.alarms(time.monotonic()):
                    if block == DEADLINE:
                        self._expire(request)
                        settled.append(request)
                    else:
                        self._hedge(block)
            for request in settled:
                request.answer()

    def _expire(self, request: Request) -> None:
        """A reader gives up. Where its flight is stuck, let the next reader start another one."""
        block = min(request.pending)
        trouble = UnavailableError(
            f"block {block} did not come from {self._sources.name} within {self._deadline:g} s",
            hint="check that the store answers",
        )
        pending = set(request.pending)
        self._waiting.settle(request, trouble)
        now = time.monotonic()
        self._last_demand = now
        for flight in list(self._flights):
            # Half: the flight began a little after the reader, or was a prefetch that the reader joined late.
            if now - flight.started >= self._deadline / 2 and not pending.isdisjoint(flight.batch.blocks):
                self._abandon(flight)

    def _abandon(self, flight: Flight) -> None:
        log.warning("a request to %s does not return; leaving it", self._sources.name)
        flight.abandoned = True
        self._flights.discard(flight)
        self._queue.done(flight.batch.blocks)
        if flight.stream is not None and not flight.stream.put_back(flight.batch):
            self._drop_stream(flight.stream, "it does not answer")
        for block in flight.batch.blocks:
            if block in self._waiting:
                self._queue.demand(block)
        # One that is not replaced goes on working when it returns, so the number at work never shrinks.
        if sum(thread.is_alive() for thread in self._threads) < 4 * self._streams:
            flight.replaced = True
            self._spawn(flight.demand_only)
        self._work_came.notify_all()
        self._work_done.notify_all()

    def _hedge(self, block: int) -> None:
        """A block did not come with the prefetch that its reader relied on: fetch it alone, at once."""
        for flight in self._flights:
            if flight.batch.priority is Priority.DEMAND and block in flight.batch.blocks:
                return
        self.stats.hedges += 1
        self._queue.done([block])
        self._queue.demand(block)
        self._work_came.notify()

    # -- workers -----------------------------------------------------------------------------------------------

    def _work(self, demand_only: bool) -> None:
        while True:
            with self._lock:
                while (batch := self._take(demand_only)) is None:
                    if self._closing.is_set():
                        return
                    self._work_came.wait(0.1 if not self._idle() else 5.0)
                stream = self._stream if batch.pack == STREAM else None
                flight = Flight(batch, time.monotonic(), demand_only, stream)
                self._flights.add(flight)
                if self._queue.demanded:
                    self._work_came.notify()
            try:
                self._run(flight)
            except Exception as exc:
                log.exception("fetching blocks %d..%d failed", batch.blocks[0], batch.blocks[-1])
                for block in batch.blocks:
                    self._finish([(block, None, UnavailableError(f"fetching block {block} failed: {exc!r}"))])
            with self._lock:
                self._flights.discard(flight)
                self._work_done.notify_all()
                if flight.replaced:
                    return

    def _take(self, demand_only: bool) -> Batch | None:
        if self._closing.is_set():
            return None
        if (batch := self._queue.take_demand()) is not None or demand_only:
            return batch
        now = time.monotonic()
        flying = [flight.batch for flight in self._flights]
        if now < self._pause_until or len(flying) >= self._room.limit:
            return None
        if (batch := self._queue.take_ahead()) is not None:
            return batch
        if (batch := self._take_stream(flying)) is not None:
            return batch
        if (self._stream is None or not self._stream.pending) and (batch := self._queue.take_hot()) is not None:
            return batch
        priorities = [batch.priority for batch in flying]
        if (
            now - self._last_demand < self._quiet
            or Priority.DEMAND in priorities
            or priorities.count(Priority.BACKGROUND) >= _BACKGROUND_STREAMS
        ):
            return None
        filling = self._queue.filling
        batch = self._queue.take_background()
        if filling and not self._queue.filling:
            self._work_done.notify_all()
        return batch

    def _take_stream(self, flying: list[Batch]) -> Batch | None:
        if self._stream is None or sum(batch.pack == STREAM for batch in flying) >= _STREAM_FLIGHTS:
            return None
        batch = self._stream.take(self._queue.missing)
        if batch is not None:
            self._queue.fly(batch.blocks)
        return batch

    def _run(self, flight: Flight) -> None:
        batch, stream = flight.batch, flight.stream
        delay = _FIRST_DELAY
        while True:
            flight.started = time.monotonic()
            try:
                raw = self._read(batch, stream)
                break
            except UnavailableError as exc:
                if not self._again(flight, stream, exc, delay):
                    return
                delay = min(2 * delay, _LAST_DELAY)
            except BootseerError as exc:
                log.warning("%s", exc)
                if stream is not None:
                    with self._lock:
                        self._unfly(batch)
                        self._drop_stream(stream, str(exc))
                        self._work_came.notify_all()
                    return
                if not isinstance(exc, DataError):
                    self._fail(batch.blocks, exc)
                    return
                # Perhaps only a part of the range is damaged or cut off: look at each block on its own.
                raw = b""
                break
        with self._lock:
            self._room.good()
            self._pause = _FIRST_DELAY
        lost = self._land(batch, raw)
        with self._lock:
            seconds = time.monotonic() - flight.started
            if stream is not None and not flight.abandoned:
                stream.came(batch, seconds)
            elif batch.priority is Priority.DEMAND and batch.length <= _SMALL:
                self._pace.add(seconds)
        if lost and not self._closing.wait(_FIRST_DELAY):
            self._put_back(batch.only(lost), None)

    def _read(self, batch: Batch, stream: HotStream | None) -> bytes:
        if stream is None:
            raw = self._sources.read(batch.pack, batch.offset, batch.length)
        else:
            raw = stream.source.read(0, batch.offset, batch.length)
        self._count(batch.priority, batch.length)
        return raw

    def _count(self, priority: Priority, length: int) -> None:
        with self._lock:
            self.stats.requests += 1
            if priority is Priority.DEMAND:
                self.stats.demand_bytes += length
            elif priority is Priority.HOT:
                self.stats.hot_bytes += length
            else:
                self.stats.background_bytes += length

    # -- trouble -----------------------------------------------------------------------------------------------

    def _again(self, flight: Flight, stream: HotStream | None, exc: UnavailableError, delay: float) -> bool:
        """The source did not answer. True: try the same batch again (a reader waits for it)."""
        batch = flight.batch
        with self._lock:
            self.stats.retries += 1
            self._room.bad()
            if flight.abandoned:
                return False
            waited_for = any(block in self._waiting for block in batch.blocks)
            if batch.priority is not Priority.DEMAND and time.monotonic() >= self._pause_until:
                log.warning("prefetch pauses for %.2g s: %s", self._pause, exc)
                self._pause_until = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if batch.priority is not Priority.DEMAND or not waited_for or self._closing.is_set():
            self._put_back(batch, stream)
            return False
        log.warning("fetch of blocks %d..%d: %s; trying again", batch.blocks[0], batch.blocks[-1], exc)
        flight.started = time.monotonic() + delay
        return not self._closing.wait(delay)

    def _put_back(self, batch: Batch, stream: HotStream | None) -> None:
        with self._lock:
            waited_for = [block for block in batch.blocks if block in self._waiting]
            if stream is None:
                self._queue.put_back(batch, waited_for)
            else:
                self._unfly(batch)
                if not stream.put_back(batch):
                    self._drop_stream(stream, "it does not answer")
            self._work_came.notify_all()

    def _unfly(self, batch: Batch) -> None:
        self._queue.done(batch.blocks)
        for block in batch.blocks:
            if block in self._waiting:
                self._queue.demand(block)

    def _drop_stream(self, stream: HotStream, why: str) -> None:
        """The hot pack is of no use: what it would have brought comes from the packs, range by range."""
        stream.abandon()
        if self._stream is stream:
            log.warning("hot pack %s is left: %s; its blocks come from the packs", stream.source.name, why)
            self._stream = None
        if not self._full:
            self._queue.hot([*stream.order, *self._hot])

    def _fail(self, blocks: Iterable[int], exc: BootseerError) -> None:
        with self._lock:
            for block in blocks:
                self._queue.give_up(block)
        self._finish([(block, None, exc) for block in blocks])

    # -- landing -----------------------------------------------------------------------------------------------

    def _land(self, batch: Batch, raw: bytes) -> list[int]:
        """Verify and keep the blocks of ``batch``, waited-for ones first; returns those whose source went away."""
        with self._lock:
            missing = {block for block in batch.blocks if not self._cache.ready[block]}
            first = {block for block in missing if block in self._waiting}
            done = [block for block in batch.blocks if block not in missing]
        self._finish([(block, None, None) for block in done])
        lost: list[int] = []
        for part in (batch.only(first), batch.only(missing - first)) if first else (batch.only(missing),):
            for at in range(0, len(part.blocks), self._chunk):
                blocks, frames = part.blocks[at : at + self._chunk], part.frames[at : at + self._chunk]
                self._land_some(batch, raw, blocks, frames, lost)
        return lost

    def _land_some(
        self, batch: Batch, raw: bytes, blocks: list[int], frames: list[tuple[int, int]], lost: list[int]
    ) -> None:
        came: list[tuple[int, bytes | None, BootseerError | None]] = []
        for block, found in zip(blocks, verified_many(self._map, raw, blocks, frames), strict=True):
            try:
                data = self._elsewhere(block, batch, found) if isinstance(found, DataError) else found
                came.append((block, self._keep(block, data), None))
            except UnavailableError:
                lost.append(block)
            except BootseerError as exc:
                self._fail([block], exc)
        self._finish(came)

    def _elsewhere(self, block: int, batch: Batch, exc: DataError) -> bytes:
        """``block`` again, alone, from each source in turn."""
        log.warning("block %d from %s: %s; fetching it again", block, self._name(batch), exc)
        with self._lock:
            self.stats.bad_blocks += 1
            self.stats.stream_bad += batch.pack == STREAM
        return self._sources.block(self._map, block, lambda length: self._count(batch.priority, length))

    def _name(self, batch: Batch) -> str:
        return "the hot pack" if batch.pack == STREAM else self._sources.name

    def _keep(self, block: int, data: Buffer) -> bytes | None:
        """Put ``data`` in the cache; returned when that fails, for those who wait for it."""
        try:
            self._cache.write(block, data)
        except OSError as exc:
            self._note_full(exc)
            return bytes(data)
        return None

    def _note_full(self, exc: OSError) -> None:
        with self._lock:
            self.stats.uncached_blocks += 1
            self._queue.stop_prefetch()
            self._queue.window = 1
            self._stream = None
            first = not self._full
            self._full = True
        if first:
            why = "is full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({exc.strerror})"
            log.warning("block cache %s %s: serving reads from memory, prefetch stops", self._cache.folder, why)

    def _finish(self, came: Sequence[tuple[int, bytes | None, BootseerError | None]]) -> None:
        """Blocks are ready, or could not be kept, or failed: tell who waits."""
        settled: list[Request] = []
        with self._lock:
            for block, data, error in came:
                self._queue.done([block])
                settled += self._waiting.came(block, data, error)
            if settled:
                self._last_demand = time.monotonic()
        for request in settled:
            request.answer()
