"""The fetcher: threads that bring missing blocks from the sources into the cache file, verified.

One lock guards the queue, the hot stream, the waiting requests and the counters; it is never held during I/O. A block
is in flight once, unless a reader waits for one whose range is late: then it is fetched a second time, alone. See
``docs/internals/blocks-concurrency.md``.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from bootseer.blocks.cache import CacheFile
from bootseer.blocks.decode import verified
from bootseer.blocks.flight import FetchStats, Flight
from bootseer.blocks.hotstream import HotStream
from bootseer.blocks.queue import STREAM, Batch, FetchQueue, Priority
from bootseer.blocks.room import Room
from bootseer.blocks.schedule import Schedule
from bootseer.blocks.source import Source, Sources
from bootseer.blocks.waiting import DEADLINE, Done, Request, Waiting
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError

log = logging.getLogger(__name__)

Came = tuple[int, bytes | None, BootseerError | None]
"""A block with what became of it: kept in the cache, or only its bytes, or an error."""

DEMAND_WINDOW = 1 << 20
"""Without a profile a miss fetches this aligned window: measured best of 64 KiB .. 1 MiB at 10 ms per request."""

_FIRST_DELAY = 0.05
_LAST_DELAY = 2.0
_RETRY_SPAWN = 1.0
_SECOND_LOOK = 1.0
"""Seconds after which a block that is late is fetched twice, whatever was fetched twice already."""
_GRACE = 5.0
"""After its deadline a reader looks for itself."""
_CHUNK = 1 << 20
"""Uncompressed bytes verified and written before the readers of these blocks are told."""


class Fetcher:
    """Fills ``cache`` from ``sources`` (tried in order) with up to ``streams`` range requests at once.

    ``window``: bytes fetched around a demanded block. ``deadline``: seconds a reader waits before `UnavailableError`.
    ``quiet``: background fill starts after this many seconds without demand, until `eager` lifts that. ``make_room``
    is called when the disk is full, by a thread that may take its time; it says whether there is space now.
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
        make_room: Callable[[], bool] | None = None,
    ) -> None:
        self.stats = FetchStats()
        self._cache = cache
        self._map = cache.map
        self._sources = Sources(sources)
        self._stream_sources: list[Source] = []
        self._queue = FetchQueue(self._map, cache.ready, window=max(1, window >> self._map.shift))
        self._waiting = Waiting()
        self._streams = max(1, streams)
        self._schedule = Schedule(self._queue, self._waiting, self.stats, streams=self._streams, quiet=quiet)
        self._schedule.last_demand = time.monotonic()
        self._deadline = deadline
        self._room = Room(make_room, self._unpark)
        self._parked = 0
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)
        self._work_done = threading.Condition(self._lock)
        self._alarm = threading.Condition(self._lock)
        self._hurry = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._asked = 0
        self._served: deque[Request] = deque()
        self._flights: set[Flight] = set()
        self._chunk = max(1, _CHUNK >> self._map.shift)
        self._threads: list[threading.Thread] = []
        reserved = 0 if self._streams == 1 else max(1, self._streams // 3)
        self._unreplaced: list[Flight] = []
        self._clock = threading.Thread(target=self._watch, name="fetch-clock", daemon=True)
        try:
            self._clock.start()
        except RuntimeError as exc:
            raise UnavailableError(f"cannot start a thread: {exc}", hint="raise the limit of processes") from None
        if not sum(self._spawn(index < reserved) for index in range(self._streams)):
            self.close()
            raise UnavailableError("cannot start a thread to fetch blocks with", hint="raise the limit of processes")

    def _spawn(self, demand_only: bool) -> bool:
        """Start one more thread; False where the system gives none."""
        # Daemon threads: one stuck in a source that never answers must not keep the process alive.
        thread = threading.Thread(target=self._work, args=(demand_only,), name="fetch", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            log.warning("cannot start a thread to fetch blocks with: %s", exc)
            return False
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        return True

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
            self._schedule.last_demand = now
            if pending:
                self._waiting.add(request)
                for block in pending:
                    if (late := self._schedule.want(block, now)) is not None:
                        self._waiting.alarm(late, request, block)
                # One thread: if one request cannot bring all, that thread wakes the next.
                self._work_came.notify()
                self._asked += 1
                self._hurry.notify()
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
        """Fetch these blocks next, in this order; from now on a miss fetches only what it needs."""
        with self._lock:
            self._schedule.hot(order)
            self._work_came.notify_all()

    def stream(self, stream: HotStream) -> None:
        """Fetch a hot pack, before what `hot` names. Its source is closed with the others."""
        with self._lock:
            self._stream_sources.append(stream.source)
            self._schedule.stream(stream)
            self._work_came.notify_all()

    def background(self, on: bool = True) -> None:
        """Fetch everything else when nothing more urgent is wanted."""
        with self._lock:
            self._schedule.background(on)
            self._work_came.notify_all()

    def eager(self) -> None:
        """The start is over: background fill need not wait for a quiet moment any more."""
        with self._lock:
            self._schedule.quiet = 0.0
            self._work_came.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is queued or in flight; False when that takes longer than ``timeout`` seconds."""
        with self._lock:
            return self._work_done.wait_for(lambda: self._closing.is_set() or self._idle(), timeout)

    def _idle(self) -> bool:
        return not (self._flights or self._parked or self._schedule.pending)

    @property
    def full(self) -> bool:
        """Whether the cache ran out of space: demand is served from memory, prefetch has stopped."""
        return self._schedule.full

    def close(self, timeout: float = 10.0) -> None:
        """Stop all threads; readers that wait get `UnavailableError`."""
        with self._lock:
            self._closing.set()
            left = self._waiting.all()
            for request in left:
                self._waiting.settle(request, UnavailableError("the block server is stopping"))
            for condition in (self._work_came, self._work_done, self._alarm, self._hurry):
                condition.notify_all()
        for request in left:
            request.answer()
        until = time.monotonic() + timeout
        for thread in [*self._threads, self._clock]:
            thread.join(max(0.0, until - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            log.warning("%d fetch threads are stuck in a source that does not answer; leaving them", stuck)
        with self._lock:
            self._work_done.wait_for(lambda: not self._parked, max(0.0, until - time.monotonic()))
        self._sources.close()
        for source in self._stream_sources:
            source.close()

    # -- the clock ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ends requests at their deadline, gives late blocks another chance, answers those who need not wait."""
        while True:
            settled: list[Request] = []
            try:
                with self._lock:
                    if not self._await_alarm():
                        return
                    settled += self._served
                    self._served.clear()
                    for request, block in self._waiting.alarms(time.monotonic()):
                        self._ring(request, block)
                        if request.settled:
                            settled.append(request)
                    self._replace()
            except Exception:
                # Without this thread readers would wait for ever.
                log.exception("the clock of the fetcher stumbled; going on")
                self._closing.wait(_FIRST_DELAY)
            for request in settled:
                request.answer()

    def _await_alarm(self) -> bool:
        """Wait until there is something to do; False when that is to end."""
        while not self._served:
            now = time.monotonic()
            at = self._waiting.next_alarm()
            if at is not None and at <= now:
                break
            if self._closing.is_set():
                return False
            longest = _RETRY_SPAWN if self._unreplaced else 5.0
            self._alarm.wait(longest if at is None else min(longest, at - now))
            if self._unreplaced:
                break
        return True

    def _ring(self, request: Request, block: int) -> None:
        try:
            if block == DEADLINE:
                self._expire(request)
            else:
                now = time.monotonic()
                if self._schedule.hedge(block, self._flights):
                    self._work_came.notify()
                else:
                    self._waiting.alarm(now + _SECOND_LOOK, request, block)
        except Exception:
            log.exception("an alarm of the fetcher failed")

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
        self._schedule.last_demand = now
        for flight in list(self._flights):
            # Half: the flight began a little after the reader, or was a prefetch that the reader joined late.
            if now - flight.started >= self._deadline / 2 and not pending.isdisjoint(flight.batch.blocks):
                self._abandon(flight)

    def _abandon(self, flight: Flight) -> None:
        log.warning("a request to %s does not return; leaving it", self._sources.name)
        flight.abandoned = True
        self._flights.discard(flight)
        self._schedule.abandon(flight)
        self._unreplaced.append(flight)
        self._replace()
        self._work_came.notify_all()
        self._work_done.notify_all()

    def _replace(self) -> None:
        """Threads for those stuck in a source. One that is not replaced goes on working when it returns, so the number
        at work never shrinks."""
        while self._unreplaced and sum(thread.is_alive() for thread in self._threads) < 4 * self._streams:
            if self._closing.is_set() or not self._spawn(self._unreplaced[0].demand_only):
                return
            self._unreplaced.pop(0).replaced = True

    # -- workers -----------------------------------------------------------------------------------------------

    def _work(self, demand_only: bool) -> None:
        while True:
            with self._lock:
                while (batch := self._take(demand_only)) is None:
                    if self._closing.is_set():
                        return
                    self._work_came.wait(0.1 if not self._idle() else 5.0)
                flight = Flight(batch, time.monotonic(), demand_only, self._schedule.stream_of(batch))
                self._flights.add(flight)
                if self._schedule.demanded:
                    self._work_came.notify()
            try:
                self._run(flight)
            except Exception as exc:
                log.exception("fetching blocks %d..%d failed", batch.blocks[0], batch.blocks[-1])
                if flight.stream is not None:
                    self._leave(batch, flight.stream, repr(exc))
                else:
                    for block in batch.blocks:
                        self._finish([(block, None, UnavailableError(f"fetching block {block} failed: {exc!r}"))])
            with self._lock:
                self._flights.discard(flight)
                self._work_done.notify_all()
                if flight.replaced:
                    return
                if flight in self._unreplaced:
                    self._unreplaced.remove(flight)

    def _take(self, demand_only: bool) -> Batch | None:
        if self._closing.is_set():
            return None
        pending = self._schedule.pending
        batch = self._schedule.take(time.monotonic(), self._flights, demand_only)
        if pending and batch is None and not self._schedule.pending:
            self._work_done.notify_all()
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
                    self._leave(batch, stream, str(exc))
                    return
                if not isinstance(exc, DataError):
                    self._refuse(batch, exc)
                    return
                # Perhaps only a part of the range is damaged or cut off: look at each block on its own.
                raw = b""
                break
        with self._lock:
            self._schedule.answered()
        lost = self._land(batch, raw)
        with self._lock:
            if not flight.abandoned:
                self._schedule.landed(flight, time.monotonic() - flight.started)
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
            now = time.monotonic()
            if stream is not None:
                self._sources.heed(exc)  # it lies in the same store
            rest = self._sources.rest
            self._schedule.refused(batch, now, exc, until=now + rest if rest else 0.0)
            if flight.abandoned:
                return False
            waited_for = any(block in self._waiting for block in batch.blocks)
        if batch.priority is not Priority.DEMAND or not waited_for or self._closing.is_set():
            self._put_back(batch, stream)
            return False
        log.warning("fetch of blocks %d..%d: %s; trying again", batch.blocks[0], batch.blocks[-1], exc)
        flight.started = now + max(delay, rest)
        # A new reader ends the pause: it must not wait for a store that is back already. But not every microsecond, and
        # not where the source has said when to come again.
        asked = self._asked
        if not self._closing.wait(max(rest, _FIRST_DELAY)):
            with self._lock:
                self._hurry.wait_for(
                    lambda: self._asked != asked or self._closing.is_set(), delay - _FIRST_DELAY - rest
                )
        return not self._closing.is_set()

    def _refuse(self, batch: Batch, exc: BootseerError) -> None:
        """The source says no, and would say so again: readers hear it at once, prefetch goes on after a pause. What is
        gone is left; for the rest somebody may mend the permission."""
        gone = isinstance(exc, NotFoundError)
        with self._lock:
            settled = [one for block in batch.blocks for one in self._waiting.came(block, None, exc)]
            self._schedule.refused(batch, time.monotonic(), exc)
            if gone:
                self._queue.done(batch.blocks)
                for block in batch.blocks:
                    self._queue.give_up(block)
            else:
                self._schedule.put_back(batch, None)
        for request in settled:
            request.answer()

    def _leave(self, batch: Batch, stream: HotStream, why: str) -> None:
        with self._lock:
            self._schedule.leave(batch, stream, why)
            self._work_came.notify_all()

    def _put_back(self, batch: Batch, stream: HotStream | None) -> None:
        with self._lock:
            self._schedule.put_back(batch, stream)
            self._work_came.notify_all()

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
        view = memoryview(raw)
        for part in (batch.only(first), batch.only(missing - first)) if first else (batch.only(missing),):
            came: list[Came] = []
            for block, (start, length) in zip(part.blocks, part.frames, strict=True):
                try:
                    kept = self._keep(block, self._open(block, view[start : start + length], batch))
                    if kept is not None:
                        came.append(kept)
                except UnavailableError:
                    lost.append(block)
                except BootseerError as exc:
                    self._fail([block], exc)
                if len(came) == self._chunk or first:
                    self._finish(came)
                    came = []
            self._finish(came)
        return lost

    def _open(self, block: int, frame: memoryview, batch: Batch) -> bytes:
        """The verified bytes of ``block``, from its range or, when those are bad, alone from each source in turn."""
        try:
            return verified(self._map, block, frame)
        except DataError as exc:
            name = "the hot pack" if batch.pack == STREAM else self._sources.name
            log.warning("block %d from %s: %s; fetching it again", block, name, exc)
        with self._lock:
            self.stats.bad_blocks += 1
            self.stats.stream_bad += batch.pack == STREAM
        return self._sources.block(self._map, block, lambda length: self._count(batch.priority, length))

    def _keep(self, block: int, data: bytes) -> Came | None:
        """Put ``data`` in the cache, or have it in memory for those who wait; None: it will come when there is room."""
        try:
            self._cache.write(block, data)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                with self._lock:
                    self._parked += 1
                if self._room.park(block, data):
                    return None
                with self._lock:
                    self._parked -= 1
            self._note_full(exc)
            return block, data, None
        return block, None, None

    def _unpark(self, block: int, data: bytes) -> None:
        """Room was made, or will not be."""
        memory: bytes | None = None
        try:
            self._cache.write(block, data)
        except OSError as exc:
            self._note_full(exc)
            memory = data
        finally:
            with self._lock:
                self._parked -= 1
            self._finish([(block, memory, None)])
            with self._lock:
                self._work_done.notify_all()

    def _note_full(self, exc: OSError) -> None:
        with self._lock:
            self.stats.uncached_blocks += 1
            first = not self._schedule.full
            self._schedule.stop_prefetch()
        if first:
            why = "is full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({exc.strerror})"
            log.warning("block cache %s %s: serving reads from memory, prefetch stops", self._cache.folder, why)

    def _finish(self, came: Sequence[Came]) -> None:
        """Blocks are ready, or could not be kept, or failed: tell who waits."""
        settled: list[Request] = []
        with self._lock:
            for block, data, error in came:
                self._queue.done([block])
                settled += self._waiting.came(block, data, error)
            if settled:
                self._schedule.last_demand = time.monotonic()
        for request in settled:
            request.answer()
