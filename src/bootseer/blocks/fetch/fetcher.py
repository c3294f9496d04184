"""The fetcher: threads that bring missing blocks from a source into the cache file, verified.

One lock, `Fetcher._lock`, guards everything that the threads share. It is never held during I/O, decompression,
hashing, or the answer to a reader. `queue`, `stream` and `deadlines` are called under it, `workers` is not. "Under the
lock" in a docstring means that the caller holds it; other methods take it themselves. Only `_closing` and single
numbers are looked at without it. Priorities, failures and hedges: ``docs/internals/blocks-concurrency.md``.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, MutableSequence, Sequence

import msgspec

from bootseer.blocks.fetch.deadlines import Done, Request, Waiting, rest_of
from bootseer.blocks.fetch.queue import STREAM, Batch, FetchQueue, Priority
from bootseer.blocks.fetch.source import StoreSource, read_block
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.fetch.workers import BlockCache, BlockWriter, Came
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError

log = logging.getLogger(__name__)

DEMAND_WINDOW = 1 << 20
"""Without a profile a miss fetches this aligned window: more would make readers wait, less would be more requests."""

_LATE = 1.0
"""Seconds that a reader waits for a block of a prefetch that is under way, before the block is fetched directly: a
range of a healthy store has come by then (8 MiB take 0.07 s over 1 Gbit/s)."""
_SUSPECT = 3.0
"""Seconds without a part of a range (256 KiB at least) after which readers do not wait for it any more; nor does the
hot stream, where other requests have brought `_ELSEWHERE` since."""
_ELSEWHERE = 16 << 20
"""Bytes that a store which many nodes share does not bring in that time: it may take seconds for a read of 2 MiB."""
_SILENCE = 10.0
"""Seconds after which the hot stream goes on in any case. To ask a busy store twice makes it slower for all."""
_GRACE = 5.0
"""After its deadline a reader looks for itself."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 30.0
"""Seconds that prefetch leaves a store alone which did not answer, doubled until it does."""
_LONGEST_DELAY = 1.0
"""Seconds until what readers wait for is tried again: as long as they have waited, and no longer than this."""
_BACKGROUND_STREAMS = 2
"""So that a reader's request never queues behind more than two large ones on a slow link."""
_MOST_THREADS = 4
"""Times ``streams``: threads in all, those stuck in a source included."""
_TICK = 0.1
"""Seconds after which the clock looks who has waited for too long, and a thread whether a pause is over."""


class Fetched(enum.IntEnum):
    """Cells of `Fetcher.stats`, named as in the status; bytes are stored (compressed) bytes, that is, what came over
    the network."""

    BYTES_DEMAND = 0
    BYTES_HOT = 1
    BYTES_BACKGROUND = 2
    RETRIES = 3
    BAD_BLOCKS = 4
    DIRECT_MISSES = 5
    """Blocks that readers waited for and that were not under way."""
    HEDGES = 6
    """Blocks asked for a second time because the prefetch that they were to come with was late."""
    CACHE_FULL = 7
    """1 while the cache is out of space."""
    LINK_RATE = 8
    """Bytes/s, the best that `LinkRate` has seen."""


_BYTES_OF = {
    Priority.DEMAND: Fetched.BYTES_DEMAND,
    Priority.HOT: Fetched.BYTES_HOT,
    Priority.BACKGROUND: Fetched.BYTES_BACKGROUND,
}


class Flight:
    """A batch that a thread works on. ``started``: when the last of its bytes came, at first when it was begun.
    ``before``: how many bytes all requests had brought then.

    ``stream``: whose range it is, if any. ``left``: nobody waits for its blocks any more. ``abandoned``: nobody waits
    for its thread either.
    """

    def __init__(self, batch: Batch, stream: HotStream | None, before: int) -> None:
        self.batch = batch
        self.stream = stream
        self.started = time.monotonic()
        self.before = before
        self.left = False
        self.abandoned = False


class LinkRate:
    """How fast bytes come, measured from requests that begin while no other is under way, with all that join them:
    every byte that counts was asked for after that, so the link is at least as fast. Called under the lock."""

    def __init__(self) -> None:
        self._began, self._bytes = 0.0, 0

    def begin(self, now: float) -> None:
        """The first request begins."""
        self._began, self._bytes = now, 0

    def came(self, length: int, now: float) -> int:
        """``length`` bytes of one of the requests came. Returns bytes/s since the first one began."""
        self._bytes += length
        return int(self._bytes / max(now - self._began, 1e-6))


class Fetcher:
    """Fills ``cache`` from ``source``, which it closes at the end, with up to ``streams`` range requests at once.

    ``window``: bytes fetched around a demanded block. ``deadline``: seconds a reader waits before `UnavailableError`.
    ``quiet``: background fill starts after this many seconds without demand, until `eager` lifts that. ``make_room``
    is called when the disk is full; it may take its time, and says whether there is space now. ``stats``: the cells of
    `Fetched`, where this fetcher is to count on.
    """

    def __init__(
        self,
        cache: BlockCache,
        source: StoreSource,
        *,
        streams: int = 6,
        window: int = DEMAND_WINDOW,
        deadline: float = 60.0,
        quiet: float = 0.5,
        make_room: Callable[[], bool] | None = None,
        stats: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self.stats = stats if stats is not None else [0] * len(Fetched)
        self.stats[Fetched.CACHE_FULL] = 0
        self.trouble: BootseerError | None = None
        """The last error of the source that left blocks of a prefetch where they are."""
        self._cache = cache
        self._source = source
        self._streams = max(1, streams)
        # A third of the threads, one at least where there are two, is kept for what readers wait for.
        self._prefetches = self._streams - (max(1, self._streams // 3) if self._streams > 1 else 0)
        self._deadline = deadline
        self._quiet = quiet
        self._queue = FetchQueue(cache.map, cache.ready, window=max(1, window >> cache.map.shift))
        self._waiting = Waiting()
        self._stream: HotStream | None = None
        self._hot: Sequence[int] = ()
        self._flights: set[Flight] = set()
        self._link = LinkRate()
        self._brought = 0
        self._last_demand = time.monotonic()
        self._rest_until = 0.0  # the source wants to be left alone
        self._pause_until = 0.0
        self._pause = _FIRST_PAUSE
        self._threads: list[threading.Thread] = []
        self._at_work = 0  # threads that are not stuck in an abandoned flight
        self._short = False  # the system did not give a thread
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)  # a thread may find a batch
        self._work_done = threading.Condition(self._lock)  # perhaps nothing is left to do, or to wait for
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
        """Bring blocks ``first`` to ``last``; ``done(error, memory)`` is called once, from a thread of the fetcher, the
        one in `close`, or, where all of them are ready, from this one: it must be short and take no lock that is held
        while calling the fetcher.

        ``error`` is None when all blocks are ready or, those that could not be cached, in ``memory``; else
        `UnavailableError` (after the deadline) or `DataError` (a block is damaged in the store). Raises
        `UnavailableError`, and never calls ``done``, after `close`.
        """
        now = time.monotonic()
        ready = self._cache.ready
        with self._lock:
            if self._closing.is_set():
                raise UnavailableError("the block server is stopping")
            pending = {block for block in range(first, last + 1) if not ready[block]}
            request = Request(pending, done, now, now + self._deadline)
            self._last_demand = now
            if pending:
                self._waiting.add(request)
                for block in sorted(pending):
                    if self._queue.missing(block):
                        self.stats[Fetched.DIRECT_MISSES] += 1
                        self._queue.demand(block)
                self._fetch_late_blocks(request, now)
                # One thread: if one request cannot bring all, that thread wakes the next.
                self._work_came.notify()
        if not pending:
            request.answer()

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
            self._queue_hot()
            self._work_came.notify_all()

    def stream(self, stream: HotStream) -> None:
        """Fetch a hot pack, before what `hot` names; once. Its source is closed at the end, too."""
        with self._lock:
            self._stream = stream
            self._queue.window = 1
            if self.full:
                stream.abandon()
            self._work_came.notify_all()

    def streamed(self, timeout: float) -> bool:
        """Wait until the hot stream has ended, or was left; False when that takes longer than ``timeout`` seconds."""
        with self._lock:
            return self._work_done.wait_for(lambda: self._closing.is_set() or not self._streaming, timeout)

    def background(self) -> None:
        """Fetch everything else when nothing more urgent is wanted."""
        with self._lock:
            self._queue.background()
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
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def full(self) -> bool:
        """Whether the cache ran out of space: demand is served from memory, prefetch has stopped."""
        return bool(self.stats[Fetched.CACHE_FULL])

    def close(self, timeout: float = 10.0) -> None:
        """Stop all threads; readers that wait get `UnavailableError`."""
        with self._lock:
            self._closing.set()
            left = list(self._waiting.requests)
            for request in left:
                self._waiting.settle(request, UnavailableError("the block server is stopping"))
            self._work_came.notify_all()
            self._work_done.notify_all()
        for request in left:
            request.answer()
        until = time.monotonic() + timeout
        for thread in (*self._threads, self._clock):
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        if stuck := sum(thread.is_alive() for thread in self._threads):
            log.warning("%d fetch threads are stuck in a source that does not answer; leaving them", stuck)
        self._source.close()
        if self._stream is not None:
            self._stream.source.close()

    # -- what to fetch next ----------------------------------------------------------------------------------------

    @property
    def _streaming(self) -> bool:
        """Under the lock: whether the hot stream is still on its way."""
        return self._stream is not None and self._stream.under_way

    @property
    def _idle(self) -> bool:
        """Under the lock: whether nothing is queued or in flight."""
        return not (self._flights or self._streaming) and self._queue.idle

    def _take(self) -> Flight | None:
        """Under the lock: what a free thread is to fetch now: demand, then the hot stream, then the hot list, then
        background fill."""
        if self._closing.is_set():
            return None
        now = time.monotonic()
        batch = self._queue.take_demand(now) if now >= self._rest_until else None
        if batch is None and (batch := self._take_prefetch(now)) is None:
            self._work_done.notify_all()
            return None
        flight = Flight(batch, self._stream if batch.pack == STREAM else None, self._brought)
        if not self._flights:
            self._link.begin(flight.started)
        self._flights.add(flight)
        if self._queue.demanded:
            self._work_came.notify()
        return flight

    def _take_prefetch(self, now: float) -> Batch | None:
        """What to fetch while no reader waits: of the hot stream, the hot list, or the background fill."""
        flying = [flight.batch.priority for flight in self._flights]
        demanded = flying.count(Priority.DEMAND)
        if now < max(self._pause_until, self._rest_until) or len(flying) - demanded >= self._prefetches:
            return None
        stream = self._stream
        if stream is not None and stream.free and (batch := stream.take(self._queue.missing)) is not None:
            self._queue.fly(batch.blocks)
            return batch
        # What was left of a stream comes beside it: the job wants it earlier than the rest.
        beside = stream is None or stream.left or not stream.pending
        if beside and (batch := self._queue.take_hot()) is not None:
            return batch
        quiet = now - self._last_demand >= self._quiet and not demanded
        if not quiet or flying.count(Priority.BACKGROUND) >= _BACKGROUND_STREAMS:
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
                    self._work_came.wait(5.0 if self._idle else _TICK)
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
        """The clock, a thread: ends requests at their deadline, has late blocks fetched directly, leaves requests to
        the source that hang, and replaces the threads that are stuck in them."""
        while not self._closing.wait(_TICK):
            expired: list[Request] = []
            try:
                with self._lock:
                    now = time.monotonic()
                    for request in [one for one in self._waiting.requests if now >= one.until]:
                        why = f"block {min(request.pending)} did not come from {self._source.name}"
                        trouble = f"{why} within {self._deadline:g} s"
                        self._waiting.settle(request, UnavailableError(trouble, hint="check that the store answers"))
                        self._last_demand = now
                        expired.append(request)
                    for flight in self._flights:
                        self._leave_silent(flight, now)
                    for request in self._waiting.requests:
                        self._fetch_late_blocks(request, now)
                    for flight in [one for one in self._flights if now - one.started >= self._deadline]:
                        self._abandon(flight)
                    self._hire()
            except Exception:
                # Without this thread readers would wait for ever.
                log.exception("the clock of the fetcher failed; going on")
            for request in expired:
                request.answer()

    def _leave_silent(self, flight: Flight, now: float) -> None:
        """Under the lock: have the hot stream go on without a range that hangs. What that has not brought is fetched
        from the packs, unless it comes before; it is read on."""
        stream, blocks = flight.stream, flight.batch.blocks
        patience = _SUSPECT if self._brought - flight.before >= _ELSEWHERE else _SILENCE
        if stream is None or flight.left or now - flight.started < min(patience, self._deadline / 2):
            return
        log.warning("a range of hot pack %s hangs; its %d blocks come from the packs", stream.source.name, len(blocks))
        flight.left = True
        stream.leave(flight.batch)
        self.stats[Fetched.HEDGES] += sum(not self._cache.ready[block] for block in blocks)
        self._put_back(blocks, Priority.HOT)
        self._queue_hot()

    def _fetch_late_blocks(self, request: Request, now: float) -> None:
        """Under the lock: fetch directly what a prefetch has not brought in the time that ``request`` has waited, or
        what a silent range of the stream was to bring."""
        is_late = now - request.began >= _LATE
        if not is_late and all(not one.stream or now - one.started < _SUSPECT for one in self._flights):
            return
        late: set[int] = set()
        direct: set[int] = set()
        for flight in self._flights:
            if flight.batch.priority is Priority.DEMAND:
                direct.update(flight.batch.blocks)
            elif not flight.left and (is_late or (flight.stream and now - flight.started >= _SUSPECT)):
                late |= request.pending.intersection(flight.batch.blocks)
        for block in late - direct:
            if not self._queue.is_demanded(block):
                self.stats[Fetched.HEDGES] += 1
                self._queue.done([block])
                self._queue.demand(block)
                self._work_came.notify()

    def _abandon(self, flight: Flight) -> None:
        """Under the lock: nobody counts on the return of ``flight`` any more; its blocks may be fetched anew."""
        log.warning("a request to %s does not return; leaving it", self._source.name)
        self._give_back(flight)
        flight.abandoned = True
        self._flights.discard(flight)
        self._at_work -= 1
        self._hire()
        self._work_done.notify_all()

    # -- one flight ------------------------------------------------------------------------------------------------

    def _fly(self, flight: Flight) -> None:
        """Fetch the batch of ``flight``. Never raises: what fails is told to its readers, or goes back in the queue."""
        try:
            if flight.stream is not None:
                self._read_range(flight, flight.stream)
            else:
                self._read(flight)
        except UnavailableError as exc:
            with self._lock:
                self.stats[Fetched.RETRIES] += 1
                self._back_off(flight.batch, exc)
                self._give_back(flight)
        except BootseerError as exc:
            log.warning("%s", exc)
            self._fail(flight, exc, for_good=isinstance(exc, NotFoundError))
        except Exception as exc:
            blocks = flight.batch.blocks
            log.exception("fetching %d blocks from block %d on failed", len(blocks), blocks[0] if blocks else -1)
            self._fail(flight, UnavailableError(f"fetching a block failed: {exc!r}"), for_good=True)

    def _read(self, flight: Flight) -> None:
        batch = flight.batch
        try:
            raw = self._source.read(batch.pack, batch.offset, batch.length)
            self._count(flight, batch.length)
        except DataError as exc:
            log.warning("%s", exc)
            # Perhaps only a part of the range is damaged or cut off: look at each block on its own.
            raw = b""
        self._write(flight, batch, raw)

    def _read_range(self, flight: Flight, stream: HotStream) -> None:
        """A range of the hot stream: its frames are written while the rest of it arrives."""
        with contextlib.closing(stream.parts(flight.batch)) as parts:
            for part, raw in parts:
                self._count(flight, part.length)
                self._write(flight, part, raw)
                with self._lock:
                    if flight.abandoned:
                        return
                    flight.started, flight.before = time.monotonic(), self._brought
                    rest = flight.batch.blocks[len(part.blocks) :]
                    flight.batch = msgspec.structs.replace(flight.batch, blocks=rest)
                    stream.came(flight.batch, part)
                    if stream.free:
                        self._work_came.notify()
                if self.full or self._closing.is_set():
                    break
        with self._lock:
            if flight.batch.blocks:
                self._give_back(flight)
            elif not flight.abandoned:
                stream.ended(flight.batch)
                self._work_came.notify()

    def _write(self, flight: Flight, batch: Batch, raw: bytes) -> None:
        """Write the blocks of ``batch``, which came with ``flight``; what is damaged is fetched again, alone."""
        with self._lock:
            first = {block for block in batch.blocks if block in self._waiting}
        bad = self._writer.write_batch(batch, raw, first)
        lost = self._fetch_again(flight, bad, batch) if bad else []
        if lost and not self._closing.wait(_TICK):
            with self._lock:
                if not flight.abandoned:
                    self._put_back(lost, batch.priority)

    def _fetch_again(self, flight: Flight, bad: dict[int, DataError], batch: Batch) -> list[int]:
        """Fetch the blocks that came damaged in ``batch``, each alone, waited-for ones first, until ``flight`` is
        abandoned; returns those for which the source does not answer."""
        name = "the hot pack" if batch.pack == STREAM else self._source.name
        for block, why in bad.items():
            log.warning("block %d from %s: %s; fetching it again", block, name, why)
        with self._lock:
            self.stats[Fetched.BAD_BLOCKS] += len(bad)
        lost: list[int] = []
        rest = dict.fromkeys(bad)
        while rest:
            with self._lock:  # each time: readers come while others are served
                if self._closing.is_set() or flight.abandoned:
                    break
                flight.started = time.monotonic()
                block = next((one for one in rest if one in self._waiting), next(iter(rest)))
            del rest[block]
            answers: list[int] = []
            try:
                if self._cache.ready[block]:
                    self._finish([(block, None, None)])
                    continue
                data = read_block(self._source, self._cache.map, block, answers.append)
                self._finish(self._writer.write(block, data))
            except UnavailableError:
                with self._lock:
                    if not answers or block in self._waiting:
                        lost.append(block)
                    else:  # a mirror has it wrong, and would again; the origin is away
                        self._queue.give_up(block)
                        self._queue.done([block])
            except BootseerError as exc:
                with self._lock:
                    self._queue.give_up(block)
                self._finish([(block, None, exc)])
            finally:
                if answers:
                    self._count(flight, sum(answers))
        return lost

    def _count(self, flight: Flight, length: int) -> None:
        """The source answered ``flight`` with ``length`` bytes."""
        with self._lock:
            self._pause = _FIRST_PAUSE
            self._brought += length
            self.stats[_BYTES_OF[flight.batch.priority]] += length
            if not flight.abandoned:  # else it may have begun before the others that are under way
                rate = self._link.came(length, time.monotonic())
                self.stats[Fetched.LINK_RATE] = max(self.stats[Fetched.LINK_RATE], rate)

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

    def _fail(self, flight: Flight, why: BootseerError, *, for_good: bool) -> None:
        """Another try would fail in the same way: readers hear it at once, prefetch goes on after a pause (somebody may
        mend a permission), without these blocks when it is ``for_good``. A hot pack is left."""
        settled: list[Request] = []
        with self._lock:
            batch = flight.batch
            if flight.stream is not None:
                self._give_back(flight, str(why))
            elif not flight.abandoned:
                settled += [one for block in batch.blocks for one in self._waiting.came(block, None, why)]
                if batch.priority is not Priority.DEMAND:
                    self._back_off(batch, why)
                if for_good:
                    self._queue.done(batch.blocks)
                    for block in batch.blocks:
                        self._queue.give_up(block)
                else:
                    self._give_back(flight)
        for request in settled:
            request.answer()

    def _back_off(self, batch: Batch, why: BootseerError) -> None:
        """Under the lock: the source did not bring ``batch``; leave it alone for a while."""
        now = time.monotonic()
        self.trouble = why
        self._rest_until = max(self._rest_until, now + rest_of(why))
        if batch.priority is Priority.DEMAND:
            log.warning("fetch of blocks %d..%d: %s; trying again", batch.blocks[0], batch.blocks[-1], why)
        elif now >= self._pause_until:
            log.warning("prefetch pauses for %.2g s: %s", max(self._pause, self._rest_until - now), why)
            self._pause_until = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _give_back(self, flight: Flight, why: str = "") -> None:
        """Under the lock: what is left of the batch of ``flight`` did not come. ``why``: the hot pack that it is of is
        of no use."""
        batch, stream = flight.batch, flight.stream
        if flight.abandoned or flight.left:
            return
        if stream is None:
            self._put_back(batch.blocks, batch.priority)
            return
        self._queue.done(batch.blocks)
        for block in batch.blocks:
            if block in self._waiting:
                self._queue.demand(block)
        if (not stream.put_back(batch) or why) and not stream.abandoned:
            stream.abandon()
            why = why or "it does not answer"
            log.warning("hot pack %s is left: %s; its blocks come from the packs", stream.source.name, why)
            self._queue_hot()
        self._work_came.notify_all()

    def _put_back(self, blocks: Sequence[int], priority: Priority) -> None:
        """Under the lock: ``blocks`` did not come; what readers wait for is demanded, the rest waits its turn again."""
        waited_for = [block for block in blocks if block in self._waiting]
        begin = now = time.monotonic()
        if waited_for and priority is Priority.DEMAND:
            waited = now - min(map(self._waiting.since, waited_for))
            begin += min(max(waited, _FIRST_PAUSE), _LONGEST_DELAY)
        self._queue.put_back(blocks, priority, waited_for, begin)
        self._work_came.notify_all()

    def _queue_hot(self) -> None:
        """Under the lock: what the hot stream has left, all of it where it was abandoned, and then the hot list."""
        stream = self._stream
        left: Sequence[int] = ()
        if stream is not None:
            left = stream.order if stream.abandoned else stream.left
        self._queue.hot([*left, *self._hot])

    def _note_full(self, why: str) -> None:
        """A block could not be written: from now on fetch only what readers wait for."""
        with self._lock:
            if self.full:
                return
            self.stats[Fetched.CACHE_FULL] = 1
            if self._stream is not None:
                self._stream.abandon()
            self._queue.stop_prefetch()
        log.warning("block cache %s %s: serving reads from memory, prefetch stops", self._cache.folder, why)
