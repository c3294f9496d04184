"""The fetcher: threads that bring missing blocks from the sources into the cache file, verified.

**Locking.** One lock, `Fetcher._lock`, guards everything that the threads share: queue, hot stream, waiting readers,
flights, counters. It is never held during I/O, decompression, hashing, or the answer to a reader. The bookkeeping of
`queue`, `stream` and `deadlines` is called under it and takes no lock; `workers` is called without it. "Under the lock"
in a docstring means that the caller holds it; all other methods take it themselves. Only `_closing` and single numbers
are looked at without it.

A block is in flight once. The one exception: a block that comes with a prefetch and has not come `_LATE` seconds after
a reader wanted it is fetched a second time, alone. See ``docs/internals/blocks-concurrency.md``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from bootseer.blocks.fetch.deadlines import DEADLINE, Done, Request, Waiting
from bootseer.blocks.fetch.queue import STREAM, Batch, FetchQueue, Priority
from bootseer.blocks.fetch.source import Source, Sources
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.fetch.workers import BlockCache, BlockWriter, Came
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError

log = logging.getLogger(__name__)

DEMAND_WINDOW = 1 << 20
"""Without a profile a miss fetches this aligned window: more would make readers wait, less would be more requests."""

_LATE = 1.0
"""Seconds that a reader waits for a block of a prefetch that is under way, before the block is fetched directly: a
range of a healthy store has come by then (8 MiB take 0.07 s over 1 Gbit/s), and one that hangs costs readers no more
than this."""
_GRACE = 5.0
"""After its deadline a reader looks for itself."""
_FIRST_DELAY = 0.05
_LAST_DELAY = 1.0
"""Seconds between two tries of what readers wait for."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 30.0
"""Seconds that prefetch leaves a store alone which did not answer."""
_BACKGROUND_STREAMS = 2
"""So that a reader's request never queues behind more than two large ones on a slow link."""
_MOST_THREADS = 4
"""Times ``streams``: threads in all, those stuck in a source included."""
_TICK = 1.0
"""Seconds after which the clock looks for stuck ranges, and hires threads that the system did not give before."""


class FetchStats(msgspec.Struct):
    """Counters since the start; bytes are stored (compressed) bytes, that is, what came over the network."""

    demand_bytes: int = 0
    hot_bytes: int = 0
    background_bytes: int = 0
    requests: int = 0
    retries: int = 0
    bad_blocks: int = 0
    uncached_blocks: int = 0
    direct_misses: int = 0
    """Blocks that readers waited for and that were not under way."""
    hedges: int = 0
    """Blocks fetched a second time because the prefetch that they were to come with was late."""
    stream_bad: int = 0
    """Blocks of the hot pack that were not what the block map says."""


class Flight:
    """A batch that a thread works on, the present attempt since ``started``.

    ``stream``: whose range it is, if any. ``abandoned``: nobody counts on the
    return of its thread any more.
    """

    __slots__ = ("abandoned", "batch", "started", "stream")

    def __init__(self, batch: Batch, stream: HotStream | None) -> None:
        self.batch = batch
        self.stream = stream
        self.started = time.monotonic()
        self.abandoned = False

    @property
    def ahead(self) -> bool:
        """Whether no reader has asked for it."""
        return self.batch.priority is not Priority.DEMAND


class Fetcher:
    """Fills ``cache`` from ``sources`` (tried in order) with up to ``streams`` range requests at once.

    ``window``: bytes fetched around a demanded block. ``deadline``: seconds a reader waits before `UnavailableError`.
    ``quiet``: background fill starts after this many seconds without demand, until `eager` lifts that. ``make_room``
    is called when the disk is full, by a thread that may take its time; it says whether there is space now.
    """

    def __init__(
        self,
        cache: BlockCache,
        sources: Sequence[Source],
        *,
        streams: int = 6,
        window: int = DEMAND_WINDOW,
        deadline: float = 60.0,
        quiet: float = 0.5,
        make_room: Callable[[], bool] | None = None,
    ) -> None:
        self.stats = FetchStats()
        self.trouble: BootseerError | None = None
        """The last error of a source that left blocks of a prefetch where they are."""
        self._cache = cache
        self._sources = Sources(sources)
        self._stream_sources: list[HotStream] = []
        self._streams = max(1, streams)
        # A third of the threads, one at least where there are two, is kept for what readers wait for.
        self._prefetches = self._streams - (max(1, self._streams // 3) if self._streams > 1 else 0)
        self._deadline = deadline
        self._quiet = quiet
        self._queue = FetchQueue(cache.map, cache.ready, window=max(1, window >> cache.map.shift))
        self._waiting = Waiting()
        self._served: deque[Request] = deque()  # found all their blocks ready; the clock answers them
        self._stream: HotStream | None = None
        self._hot: Sequence[int] = ()
        self._flights: set[Flight] = set()
        self._full = False
        self._last_demand = time.monotonic()
        self._pause_until = 0.0
        self._pause = _FIRST_PAUSE
        self._threads: list[threading.Thread] = []
        self._at_work = 0  # threads that are not stuck in an abandoned flight
        self._short = False  # the system did not give a thread
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)  # a thread may find a batch
        self._work_done = threading.Condition(self._lock)  # perhaps nothing is left to do, or to wait for
        self._alarm = threading.Condition(self._lock)  # the clock has something to do, or to wait for
        self._writer = BlockWriter(cache, self._finish, self._note_full, make_room)
        self._clock = threading.Thread(target=self._watch, name="fetch-clock", daemon=True)
        with self._lock:
            self._hire()
            hired = self._at_work
        try:
            self._clock.start()
        except RuntimeError:
            hired = 0
        if not hired:
            self.close()
            raise UnavailableError("cannot start a thread to fetch blocks with", hint="raise the limit of processes")

    # -- what others call ------------------------------------------------------------------------------------------

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
                    if self._queue.in_flight(block) and not self._hangs(block, now):
                        self._waiting.alarm(now + _LATE, request, block)
                    elif self._queue.in_flight(block):
                        self._fetch_late(block)
                    else:
                        self.stats.direct_misses += 1
                        self._queue.demand(block)
                # One thread: if one request cannot bring all, that thread wakes the next.
                self._work_came.notify()
            else:
                request.settled = True
                self._served.append(request)
            self._alarm.notify()

    def demand(self, first: int, last: int) -> dict[int, bytes]:
        """`submit`, and wait: returns the bytes of the blocks that could not be cached, or raises the error."""
        done = threading.Event()
        answer: list[tuple[BootseerError | None, dict[int, bytes]]] = []

        def settle(error: BootseerError | None, memory: dict[int, bytes]) -> None:
            answer.append((error, memory))
            done.set()

        self.submit(first, last, settle)
        if not done.wait(self._deadline + _GRACE):
            raise UnavailableError(f"blocks {first} to {last} did not come, and their deadline passed unnoticed")
        error, memory = answer[0]
        if error is not None:
            raise error
        return memory

    def hot(self, order: Sequence[int]) -> None:
        """Fetch these blocks after the hot stream, in this order; from now on a miss fetches only what it needs."""
        with self._lock:
            self._hot = order
            self._queue.window = 1
            if not self._full:
                self._queue.hot(order)
            self._work_came.notify_all()

    def stream(self, stream: HotStream) -> None:
        """Fetch a hot pack, before what `hot` names. Its source is closed with the others."""
        with self._lock:
            self._stream_sources.append(stream)
            self._queue.window = 1
            self._stream = None if self._full else stream
            self._work_came.notify_all()

    def streamed(self, timeout: float) -> bool:
        """Wait until the hot stream has ended, or was left; False when that takes longer than ``timeout`` seconds."""
        with self._lock:
            return self._work_done.wait_for(lambda: self._closing.is_set() or not self._streaming, timeout)

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
            return self._work_done.wait_for(lambda: self._closing.is_set() or self._idle, timeout)

    @property
    def prefetching(self) -> bool:
        """Whether the hot stream is on its way, or ranges of a hot list have not been asked for yet."""
        with self._lock:
            return self._streaming or self._queue.hot_pending

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

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
        for thread in (*self._threads, self._clock):
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        if stuck := sum(thread.is_alive() for thread in self._threads):
            log.warning("%d fetch threads are stuck in a source that does not answer; leaving them", stuck)
        self._sources.close()
        for stream in self._stream_sources:
            stream.source.close()

    # -- what to fetch next ----------------------------------------------------------------------------------------

    @property
    def _streaming(self) -> bool:
        """Under the lock: whether the hot stream is still on its way."""
        return self._stream is not None and (self._stream.pending or self._stream.flying)

    @property
    def _pending(self) -> bool:
        """Under the lock: whether a prefetch has not been asked for to its end."""
        streaming = self._stream is not None and self._stream.pending
        return streaming or self._queue.hot_pending or self._queue.filling

    @property
    def _idle(self) -> bool:
        """Under the lock: whether nothing is queued or in flight."""
        return not (self._flights or self._pending)

    def _take(self) -> Flight | None:
        """Under the lock: what a free thread is to fetch now: demand, then the hot stream, then the hot list, then
        background fill."""
        if self._closing.is_set():
            return None
        pending = self._pending
        batch = self._queue.take_demand()
        if batch is None and (batch := self._take_prefetch(time.monotonic())) is None:
            if pending and not self._pending:
                self._work_done.notify_all()
            return None
        flight = Flight(batch, self._stream if batch.pack == STREAM else None)
        self._flights.add(flight)
        if self._queue.demanded:
            self._work_came.notify()
        return flight

    def _take_prefetch(self, now: float) -> Batch | None:
        flying = [flight.batch.priority for flight in self._flights]
        if now < self._pause_until or sum(flight.ahead for flight in self._flights) >= self._prefetches:
            return None
        stream = self._stream
        if stream is not None and stream.free and (batch := stream.take(self._queue.missing)) is not None:
            self._queue.fly(batch.blocks)
            return batch
        if (stream is None or not stream.pending) and (batch := self._queue.take_hot()) is not None:
            return batch
        if (
            now - self._last_demand < self._quiet
            or Priority.DEMAND in flying
            or flying.count(Priority.BACKGROUND) >= _BACKGROUND_STREAMS
        ):
            return None
        return self._queue.take_background()

    # -- the threads -----------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        """Under the lock: start threads until as many are at work as there are streams, or the system gives none."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while self._at_work < self._streams and len(self._threads) < _MOST_THREADS * self._streams:
            # Daemon threads: one stuck in a source that never answers must not keep the process alive.
            thread = threading.Thread(target=self._work, name="fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                if not self._short:
                    log.warning("cannot start a thread to fetch blocks with: %s", exc)
                self._short = True
                return
            self._threads.append(thread)
            self._at_work += 1

    def _work(self) -> None:
        while True:
            with self._lock:
                while (flight := self._take()) is None:
                    if self._closing.is_set():
                        return
                    self._work_came.wait(5.0 if self._idle else 0.1)
            self._fly(flight)
            with self._lock:
                self._flights.discard(flight)
                self._work_done.notify_all()
                if flight.abandoned:
                    # Another thread may be here in the place of this one.
                    if self._at_work >= self._streams:
                        return
                    self._at_work += 1

    def _watch(self) -> None:
        """The clock, a thread: ends requests at their deadline, has late blocks fetched directly, answers readers that
        need not wait, leaves ranges that hang, and replaces the threads that are stuck in them."""
        while not self._closing.is_set() or self._served:
            settled: list[Request] = []
            try:
                with self._lock:
                    now = time.monotonic()
                    at = self._waiting.next_alarm()
                    if not self._served and not self._closing.is_set() and (at is None or at > now):
                        self._alarm.wait(_TICK if at is None else min(_TICK, at - now))
                        now = time.monotonic()
                    settled += self._served
                    self._served.clear()
                    for request, block in self._waiting.due(now):
                        if self._settled_by_alarm(request, block, now):
                            settled.append(request)
                    for flight in [one for one in self._flights if one.ahead]:
                        if now - flight.started >= self._deadline:
                            self._abandon(flight)
                    if not self._closing.is_set():
                        self._hire()
            except Exception:
                # Without this thread readers would wait for ever.
                log.exception("the clock of the fetcher failed; going on")
                self._closing.wait(_FIRST_DELAY)
            for request in settled:
                request.answer()

    def _settled_by_alarm(self, request: Request, block: int, now: float) -> bool:
        """Under the lock: an alarm is due. Whether it settles ``request``. No failure of one ends the clock."""
        before = request.settled
        try:
            if block == DEADLINE and not before:
                self._expire(request, now)
            elif not before:
                self._fetch_late(block)
        except Exception:
            log.exception("an alarm of the fetcher failed")
        return request.settled and not before

    def _hangs(self, block: int, now: float) -> bool:
        """Under the lock: whether ``block`` is of a range of the hot stream that has brought nothing for `_LATE`
        seconds: a reader of each of its blocks would wait for as long."""
        return any(
            flight.stream is not None and now - flight.started >= _LATE and block in flight.batch.blocks
            for flight in self._flights
        )

    def _fetch_late(self, block: int) -> None:
        """Under the lock: a reader has waited long enough for ``block``; fetch it directly, unless that is so."""
        carriers = [flight for flight in self._flights if block in flight.batch.blocks]
        if any(flight.batch.priority is Priority.DEMAND for flight in carriers) or self._queue.is_demanded(block):
            return
        self.stats.hedges += 1
        self._queue.done([block])
        self._queue.demand(block)
        self._work_came.notify()

    def _expire(self, request: Request, now: float) -> None:
        """Under the lock: a reader gives up. Where its flight is stuck, let the next reader start another one."""
        trouble = UnavailableError(
            f"block {min(request.pending)} did not come from {self._sources.name} within {self._deadline:g} s",
            hint="check that the store answers",
        )
        pending = set(request.pending)
        self._waiting.settle(request, trouble)
        self._last_demand = now
        for flight in list(self._flights):
            # Half: the flight began a little after the reader, or was a prefetch that the reader joined late.
            if now - flight.started >= self._deadline / 2 and not pending.isdisjoint(flight.batch.blocks):
                self._abandon(flight)

    def _abandon(self, flight: Flight) -> None:
        """Under the lock: nobody counts on the return of ``flight`` any more; its blocks may be fetched anew."""
        log.warning("a request to %s does not return; leaving it", self._sources.name)
        flight.abandoned = True
        self._flights.discard(flight)
        if flight.stream is not None:
            self._release(flight.batch)
            self._return_range(flight.batch, flight.stream)
        elif flight.ahead:
            self._put_back(flight.batch)
        else:
            self._release(flight.batch)
        self._at_work -= 1
        self._hire()
        self._work_came.notify_all()
        self._work_done.notify_all()

    # -- one flight ------------------------------------------------------------------------------------------------

    def _fly(self, flight: Flight) -> None:
        """Fetch the batch of ``flight``. Never raises: what fails is told to its readers, or goes back in the queue."""
        try:
            if flight.stream is not None:
                self._read_range(flight, flight.stream)
            else:
                self._read(flight)
        except Exception as exc:
            blocks = flight.batch.blocks
            log.exception("fetching %d blocks from block %d on failed", len(blocks), blocks[0] if blocks else -1)
            if flight.stream is not None:
                self._leave_range(flight, flight.stream, repr(exc))
            elif not flight.abandoned:
                trouble = UnavailableError(f"fetching a block failed: {exc!r}")
                self._finish([(block, None, trouble) for block in blocks])

    def _read(self, flight: Flight) -> None:
        batch = flight.batch
        delay = _FIRST_DELAY
        while True:
            flight.started = time.monotonic()
            try:
                raw = self._sources.read(batch.pack, batch.offset, batch.length)
                self._count(batch.priority, batch.length)
                break
            except UnavailableError as exc:
                if not self._retry(flight, exc, delay):
                    return
                delay = min(2 * delay, _LAST_DELAY)
            except DataError as exc:
                log.warning("%s", exc)
                # Perhaps only a part of the range is damaged or cut off: look at each block on its own.
                raw = b""
                break
            except BootseerError as exc:
                log.warning("%s", exc)
                if not flight.abandoned:
                    self._refuse(batch, exc)
                return
        with self._lock:
            self._pause = _FIRST_PAUSE
        self._write(batch, raw)

    def _read_range(self, flight: Flight, stream: HotStream) -> None:
        """A range of the hot stream: its frames are written while the rest of it arrives."""
        try:
            with contextlib.closing(stream.parts(flight.batch)) as parts:
                for part, raw in parts:
                    first = part.offset == flight.batch.offset
                    self._count(part.priority, part.length, requests=int(first))
                    self._write(part, raw)
                    with self._lock:
                        if flight.abandoned:
                            return
                        flight.started = time.monotonic()
                        rest = flight.batch.blocks[len(part.blocks) :]
                        flight.batch = msgspec.structs.replace(flight.batch, blocks=rest)
                        stream.came(flight.batch, part)
                        self._pause = _FIRST_PAUSE
                        if stream.free:
                            self._work_came.notify()
                    if self._full or self._closing.is_set():
                        break
            if flight.batch.blocks:
                self._leave_range(flight, stream)
                return
            with self._lock:
                if not flight.abandoned:
                    stream.ended(flight.batch)
                    self._work_came.notify()
        except UnavailableError as exc:
            with self._lock:
                self.stats.retries += 1
                self._sources.back_off(exc)  # it lies in the same store
                self._rest(flight.batch, exc)
            self._leave_range(flight, stream)
        except BootseerError as exc:
            log.warning("%s", exc)
            self._leave_range(flight, stream, str(exc))

    def _write(self, batch: Batch, raw: bytes) -> None:
        """Write the blocks of ``batch``; what is damaged is fetched again, alone."""
        with self._lock:
            first = {block for block in batch.blocks if block in self._waiting}
        bad = self._writer.write_batch(batch, raw, first)
        lost = self._fetch_again(bad, batch) if bad else []
        if lost and not self._closing.wait(_FIRST_DELAY):
            with self._lock:
                self._put_back(batch.only(lost))

    def _fetch_again(self, bad: dict[int, DataError], batch: Batch) -> list[int]:
        """Fetch the blocks that came damaged in ``batch``, alone from each source in turn, waited-for ones first;
        returns those whose source went away."""
        name = "the hot pack" if batch.pack == STREAM else self._sources.name
        for block, why in bad.items():
            log.warning("block %d from %s: %s; fetching it again", block, name, why)
        with self._lock:
            self.stats.bad_blocks += len(bad)
            self.stats.stream_bad += len(bad) if batch.pack == STREAM else 0
        lost: list[int] = []
        rest = dict.fromkeys(bad)
        while rest:
            with self._lock:  # each time: readers come while others are served
                block = next((one for one in rest if one in self._waiting), next(iter(rest)))
            del rest[block]
            try:
                if self._cache.ready[block]:
                    self._finish([(block, None, None)])
                    continue
                data = self._sources.block(self._cache.map, block, lambda length: self._count(batch.priority, length))
                self._finish([self._writer.write(block, data)])
            except UnavailableError:
                lost.append(block)
            except BootseerError as exc:
                with self._lock:
                    self._queue.give_up(block)
                self._finish([(block, None, exc)])
        return lost

    def _count(self, priority: Priority, length: int, *, requests: int = 1) -> None:
        """A source answered with ``length`` bytes."""
        with self._lock:
            self.stats.requests += requests
            if priority is Priority.DEMAND:
                self.stats.demand_bytes += length
            elif priority is Priority.HOT:
                self.stats.hot_bytes += length
            else:
                self.stats.background_bytes += length

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def _finish(self, came: Iterable[Came]) -> None:
        """Blocks are ready, or could not be written, or failed: tell who waits."""
        settled: list[Request] = []
        with self._lock:
            for block, data, error in came:
                self._queue.done([block])
                settled += self._waiting.came(block, data, error)
            if settled:
                self._last_demand = time.monotonic()
        for request in settled:
            request.answer()

    def _retry(self, flight: Flight, exc: UnavailableError, delay: float) -> bool:
        """The source did not answer. True, after a pause: try the same batch again, as a reader waits for it."""
        batch = flight.batch
        with self._lock:
            self.stats.retries += 1
            rest = self._rest(batch, exc)
            if flight.abandoned:
                return False
            waited_for = any(block in self._waiting for block in batch.blocks)
            if batch.priority is not Priority.DEMAND or not waited_for or self._closing.is_set():
                self._put_back(batch)
                return False
        log.warning("fetch of blocks %d..%d: %s; trying again", batch.blocks[0], batch.blocks[-1], exc)
        flight.started = time.monotonic() + max(delay, rest)
        return not self._closing.wait(max(delay, rest))

    def _rest(self, batch: Batch, why: BootseerError) -> float:
        """Under the lock: the source did not answer, or refuses, so prefetch pauses. Returns the seconds for which the
        source wants to be left alone."""
        now = time.monotonic()
        rest = self._sources.rest
        self.trouble = why
        if batch.priority is not Priority.DEMAND and now >= self._pause_until:
            log.warning("prefetch pauses for %.2g s: %s", max(self._pause, rest), why)
            self._pause_until = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if rest:
            self._pause_until = max(self._pause_until, now + rest)
        return rest

    def _refuse(self, batch: Batch, exc: BootseerError) -> None:
        """The source says no, and would say so again: readers hear it at once, prefetch goes on after a pause. What is
        gone is left; for the rest somebody may mend the permission."""
        with self._lock:
            settled = [one for block in batch.blocks for one in self._waiting.came(block, None, exc)]
            self._rest(batch, exc)
            if isinstance(exc, NotFoundError):
                self._queue.done(batch.blocks)
                for block in batch.blocks:
                    self._queue.give_up(block)
            else:
                self._put_back(batch)
        for request in settled:
            request.answer()

    def _put_back(self, batch: Batch) -> None:
        """Under the lock: ``batch`` did not come; what readers wait for is demanded, the rest waits its turn again."""
        if self._full:
            self._release(batch)
        else:
            self._queue.put_back(batch, [block for block in batch.blocks if block in self._waiting])
        self._work_came.notify_all()

    def _release(self, batch: Batch) -> None:
        """Under the lock: ``batch`` is not in flight any more; what readers wait for is demanded."""
        self._queue.done(batch.blocks)
        for block in batch.blocks:
            if block in self._waiting:
                self._queue.demand(block)

    def _leave_range(self, flight: Flight, stream: HotStream, why: str = "") -> None:
        """The rest of a range is not read. ``why``: the whole stream is of no use."""
        with self._lock:
            if flight.abandoned:
                return
            self._release(flight.batch)
            self._return_range(flight.batch, stream, why)
            self._work_came.notify_all()

    def _return_range(self, batch: Batch, stream: HotStream, why: str = "") -> None:
        """Under the lock: the rest of a range goes back to ``stream``, or, where that is of no use any more, what is
        left of the stream comes from the packs."""
        if stream.put_back(batch) and not why:
            return
        stream.abandon()
        if self._stream is stream:
            why = why or "it does not answer"
            log.warning("hot pack %s is left: %s; its blocks come from the packs", stream.source.name, why)
            self._stream = None
            if not self._full:
                self._queue.hot([*stream.order, *self._hot])

    def _note_full(self, why: str) -> None:
        """A block could not be written: from now on fetch only what readers wait for."""
        with self._lock:
            self.stats.uncached_blocks += 1
            if self._full:
                return
            self._full = True
            self._stream = None
            self._queue.stop_prefetch()
            self._queue.window = 1
        log.warning("block cache %s %s: serving reads from memory, prefetch stops", self._cache.folder, why)
