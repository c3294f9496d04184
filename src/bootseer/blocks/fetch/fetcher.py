"""The fetcher: threads that bring missing blocks from a source into the cache file, verified.

One lock, `Fetcher._lock`, guards everything that the threads share. It is never held during I/O, decompression,
hashing, or the answer to a reader. What decides (`order`, `watch`, `pauses`, and below them `queue`, `stream` and
`deadlines`) is called under it, `workers` is not. "Under the lock" in a docstring means that the caller holds it; other
methods take it themselves. Only `_closing` and single numbers are looked at without it. Priorities, failures and
hedges: ``docs/internals/blocks-concurrency.md``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, MutableSequence, Sequence

import msgspec

from bootseer.blocks.fetch.deadlines import BlockRequest, Done, Waiting
from bootseer.blocks.fetch.figures import BYTES_OF, Fetched, LinkRate
from bootseer.blocks.fetch.order import Order
from bootseer.blocks.fetch.pauses import Pauses
from bootseer.blocks.fetch.queue import HERE, STREAM, Batch, FetchQueue, Priority
from bootseer.blocks.fetch.source import StoreSource, read_block
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.fetch.threads import Threads
from bootseer.blocks.fetch.watch import Flight, Watch
from bootseer.blocks.fetch.workers import BlockCache, CacheWriter, Came, read_parts
from bootseer.chunks.nodeblocks import NodeBlocks
from bootseer.errors import BootseerError, DataError, NotFoundError, PrivilegeError, UnavailableError

log = logging.getLogger(__name__)

DEMAND_WINDOW = 1 << 20
"""Bytes that the first misses fetch where there is no profile; those behind them fetch what `Reach` says."""

_GRACE = 5.0
"""After its deadline a reader looks for itself."""
_TICK = 0.1
"""Seconds after which the clock looks who has waited for too long, and whether a pause is over."""


class Fetcher:
    """Fills ``cache`` from ``source``, which it closes at the end, with up to ``streams`` range requests at once.

    ``window``: bytes that a miss fetches at first. ``deadline``: seconds a reader waits before `UnavailableError`.
    ``quiet``: background fill starts after this many seconds without demand, until `eager` lifts that. ``make_room`` is
    called when the disk is full; it may take its time, and says whether there is space now. ``allow`` says whether so
    many bytes may be written. ``stats``: the cells of `Fetched`, where this fetcher is to count on."""

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
        allow: Callable[[int], bool] | None = None,
        stats: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self.stats = stats if stats is not None else [0] * len(Fetched)
        self.stats[Fetched.CACHE_FULL] = 0
        self.trouble: BootseerError | None = None
        """The last error of the source that left blocks of a prefetch where they are."""
        self._cache = cache
        self._source = source
        streams = max(1, streams)
        # A third of the threads, one at least where there are two, is kept for what readers wait for.
        prefetches = streams - (max(1, streams // 3) if streams > 1 else 0)
        self._queue = FetchQueue(cache.map, cache.ready, window=max(1, window >> cache.map.shift))
        self._here: NodeBlocks | None = None
        self._waiting = Waiting()
        self._pauses = Pauses()
        self._order = Order(
            self._queue, self._waiting, self._pauses, prefetches=prefetches, quiet=quiet, now=time.monotonic()
        )
        self._watch = Watch(deadline)
        self._link = LinkRate()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)  # a thread may find a batch
        self._came = threading.Condition(self._lock)  # blocks have come
        self._work_done = threading.Condition(self._lock)  # the stream has ended, and perhaps all
        self._writer = CacheWriter(cache, self._finish, self._note_full, make_room, allow)
        self._threads = Threads(self._work, streams)
        self._clock = threading.Thread(target=self._tick, name="fetch-clock", daemon=True)
        with self._lock:
            self._threads.hire()
            hired = self._threads.at_work
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
        while calling the fetcher. ``error`` is None when all blocks are ready or, those that could not be cached, in
        ``memory``; else `UnavailableError` (after the deadline) or `DataError` (a block is damaged in the store).
        Raises `UnavailableError`, and never calls ``done``, after `close`."""
        now = time.monotonic()
        ready = self._cache.ready
        with self._lock:
            if self._closing.is_set():
                raise UnavailableError("the block server is stopping")
            pending = {block for block in range(first, last + 1) if not ready[block]}
            request = BlockRequest(pending, done, now, now + self._watch.deadline)
            self._order.demanded_at = now
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
        if not done.wait(self._watch.deadline + _GRACE):
            raise UnavailableError(f"blocks {first} to {last} did not come, and their deadline passed unnoticed")
        error, memory = answer[0]
        if error is not None:
            raise error
        return memory

    def hot(self, order: Sequence[int], *, waited: bool = True) -> None:
        """Fetch these blocks after the hot stream, in this order; from now on a miss fetches only what it needs. Not
        ``waited``: no reader is there, so ranges are as long as those of the fill."""
        with self._lock:
            self._queue.waited = waited
            self._order.hot(order)
            self._work_came.notify_all()

    def stream(self, stream: HotStream) -> None:
        """Fetch a hot pack, before what `hot` names; once. Its source is closed at the end, too."""
        with self._lock:
            self._order.begin(stream)
            if self.full:
                stream.abandon()
            self._work_came.notify_all()

    def known_here(self, here: NodeBlocks) -> None:
        """These blocks come from other folders of the node cache, whoever wants them; before `stream`."""
        with self._lock:
            self._here, self._queue.here = here, bytearray(here.here)

    def streamed(self, timeout: float) -> bool:
        """Wait until the hot stream has ended, or was left; False when that takes longer than ``timeout`` seconds."""
        return self._wait(self._work_done, lambda: not self._order.streaming, timeout)

    def background(self) -> None:
        """Fetch everything else when nothing more urgent is wanted."""
        with self._lock:
            self._queue.background()
            self._work_came.notify_all()

    def eager(self) -> None:
        """The start is over: background fill need not wait for a quiet moment any more."""
        with self._lock:
            self._order.quiet = 0.0
            self._work_came.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is queued or in flight; False when that takes longer than ``timeout`` seconds."""
        return self._wait(self._work_done, lambda: self._idle, timeout)

    def until(self, so: Callable[[], bool], timeout: float) -> bool:
        """Wait until it is ``so``, which is asked under the lock when blocks have come, or nobody waits any more; False
        when that takes longer than ``timeout`` seconds."""
        return self._wait(self._came, so, timeout)

    def _wait(self, told: threading.Condition, so: Callable[[], bool], timeout: float) -> bool:
        with self._lock:
            return told.wait_for(lambda: self._closing.is_set() or so(), timeout)

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
            unanswered = list(self._waiting.requests)
            for request in unanswered:
                self._waiting.settle(request, UnavailableError("the block server is stopping"))
            for told in (self._work_came, self._work_done, self._came):
                told.notify_all()
        for request in unanswered:
            request.answer()
        until = time.monotonic() + timeout
        for thread in (*self._threads.all, self._clock):
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        if stuck := sum(thread.is_alive() for thread in self._threads.all):
            log.warning("%d fetch threads are stuck in a source that does not answer; leaving them", stuck)
        self._source.close()
        if self._order.stream is not None:
            self._order.stream.source.close()

    # -- the threads -----------------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        """Under the lock: whether nothing is queued or in flight."""
        return not self._watch.flights and self._order.idle

    def _take(self) -> Flight | None:
        """Under the lock: what a free thread is to fetch now."""
        if self._closing.is_set():
            return None
        now = time.monotonic()
        if (batch := self._order.take(self._watch.flying(), now)) is None:
            self._tell_done()
            return None
        flight = Flight(batch, self._order.stream if batch.pack == STREAM else None, now, self._watch.brought)
        if not self._watch.flights:
            self._link.begin(now)
        self._watch.flights.add(flight)
        self._work_came.notify()  # there may be more
        return flight

    def _tell_done(self) -> None:
        """Under the lock: who waits for the end of the hot stream, or of all, looks whether that is now."""
        if not self._order.streaming:
            self._work_done.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                while (flight := self._take()) is None:
                    if self._closing.is_set():
                        return
                    self._work_came.wait()
            self._fly(flight)
            with self._lock:
                self._watch.flights.discard(flight)
                self._tell_done()
                if flight.abandoned and not self._threads.returned():
                    return

    def _tick(self) -> None:
        """The clock, a thread: ends requests at their deadline, has late blocks fetched directly, goes on without
        ranges that hang, and replaces the threads that are stuck in the source."""
        while not self._closing.wait(_TICK):
            expired: list[BlockRequest] = []
            try:
                with self._lock:
                    now = time.monotonic()
                    for request in self._waiting.expired(now):
                        why = f"block {min(request.pending)} did not come from {self._source.name}"
                        trouble = f"{why} within {self._watch.deadline:g} s"
                        self._waiting.settle(request, UnavailableError(trouble, hint="check that the store answers"))
                        self._order.demanded_at = now
                        expired.append(request)
                    for flight in self._watch.hung(now):
                        self._skip(flight, now)
                    for request in self._waiting.requests:
                        self._fetch_late_blocks(request, now)
                    for flight in self._watch.stuck(now):
                        self._abandon(flight)
                    self._threads.hire()
                    if not self._idle:
                        self._work_came.notify()
            except Exception:
                # Without this thread readers would wait for ever.
                log.exception("the clock of the fetcher failed; going on")
            for request in expired:
                request.answer()

    def _skip(self, flight: Flight, now: float) -> None:
        """Under the lock: have the hot stream go on without a range that hangs. What that has not brought is fetched
        from the packs, unless it comes before; it is read on."""
        assert flight.stream is not None
        name, blocks = flight.stream.source.name, flight.batch.blocks
        log.warning("a range of hot pack %s hangs; its %d blocks come from the packs", name, len(blocks))
        flight.skipped = True
        self.stats[Fetched.HEDGES] += sum(not self._cache.ready[block] for block in blocks)
        self._order.skip(flight.batch, flight.stream, now)
        self._work_came.notify_all()

    def _fetch_late_blocks(self, request: BlockRequest, now: float) -> None:
        """Under the lock: fetch directly what ``request`` has waited for in vain."""
        for block in self._watch.late(request, now):
            if not self._queue.is_demanded(block):
                self.stats[Fetched.HEDGES] += 1
                self._queue.here[block] = 0
                self._queue.done([block])
                self._queue.demand(block)
                self._work_came.notify()

    def _abandon(self, flight: Flight) -> None:
        """Under the lock: nobody counts on the return of ``flight`` any more; its blocks may be fetched anew."""
        log.warning("a request to %s does not return; leaving it", self._source.name)
        self._give_back(flight)
        flight.abandoned = True
        self._watch.flights.discard(flight)
        self._threads.stuck()
        self._tell_done()

    # -- one flight ------------------------------------------------------------------------------------------------

    def _fly(self, flight: Flight) -> None:
        """Fetch the batch of ``flight``. Never raises: what fails is told to its readers, or goes back in the queue."""
        try:
            if flight.batch.pack == HERE:
                self._copy(flight)
            else:
                self._read(flight)
        except (UnavailableError, PrivilegeError) as exc:  # a login that has ended may be renewed at any moment
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

    def _copy(self, flight: Flight) -> None:
        """Blocks that other folders of the node cache have, or had."""
        batch = flight.batch
        assert self._here is not None
        try:
            lost = self._writer.copy(batch.blocks, self._here)
        except Exception:  # the store has them, too
            log.exception("copying %d blocks from block %d on failed", len(batch.blocks), batch.blocks[0])
            lost = batch.blocks
        lengths = self._cache.map.lengths
        with self._lock:
            copied = sum(lengths[block] for block in batch.blocks) - sum(lengths[block] for block in lost)
            self.stats[Fetched.BYTES_COPIED] += copied
            flight.batch = msgspec.structs.replace(batch, blocks=lost)
            self._give_back(flight)

    def _read(self, flight: Flight) -> None:
        """A range: its frames are written while the rest of it arrives, and no reader waits for what is behind his."""
        stream = flight.stream
        with self._lock:
            first = {block for block in flight.batch.blocks if block in self._waiting}
        source = self._source if stream is None else stream.source
        batch, began, came = flight.batch, time.monotonic(), list[tuple[float, int]]()
        try:
            with contextlib.closing(read_parts(source, batch, first)) as parts:
                for part, raw in parts:
                    came.append((time.monotonic(), part.length))
                    self._count(flight, part.length)
                    self._write(flight, part, raw)
                    if not self._goes_on(flight, part):
                        break
        except DataError as exc:
            if stream is not None:
                raise
            log.warning("%s", exc)
            # Perhaps only a part of the range is damaged or cut off: look at each block on its own.
            self._write(flight, flight.batch, b"")
            return
        with self._lock:
            if flight.batch.blocks:
                self._give_back(flight)
            elif stream is not None and not flight.abandoned:
                stream.ended(flight.batch)
                self._work_came.notify()
            elif batch.priority is Priority.DEMAND and came:
                (begun, length), (ended, _) = came[0], came[-1]
                took, rest = ended - begun, batch.length - length
                self._queue.answered(begun - began, rest, took, len(batch.blocks), batch.length)

    def _goes_on(self, flight: Flight, part: Batch) -> bool:
        """``part`` of ``flight`` is written: whether the rest is worth it."""
        with self._lock:
            if flight.abandoned:
                return False
            flight.heard(time.monotonic(), self._watch.brought)
            rest = flight.batch.blocks[len(part.blocks) :]
            flight.batch = msgspec.structs.replace(flight.batch, blocks=rest)
            if (stream := flight.stream) is not None:
                stream.came(flight.batch, part)
                if stream.free:
                    self._work_came.notify()
        return not self._closing.is_set() and (stream is None or not self.full)

    def _write(self, flight: Flight, batch: Batch, raw: bytes) -> None:
        """Write the blocks of ``batch``, which came with ``flight``; what is damaged is fetched again, alone."""
        with self._lock:
            first = {block for block in batch.blocks if block in self._waiting}
        bad = self._writer.write_batch(batch, raw, first)
        lost = self._fetch_again(flight, bad, batch) if bad else []
        if lost and not self._closing.wait(_TICK):
            with self._lock:
                if not flight.abandoned:
                    self._order.put_back(lost, batch.priority, time.monotonic())
                    self._work_came.notify_all()

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
                flight.heard(time.monotonic(), flight.before)
                block = next((one for one in rest if one in self._waiting), next(iter(rest)))
            del rest[block]
            answers: list[int] = []
            try:
                if self._cache.ready[block]:
                    self._finish([(block, None, None)])
                    continue
                data = read_block(self._source, self._cache.map, block, answers.append)
                self._finish(self._writer.write(block, data))
            except (UnavailableError, PrivilegeError):
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
            self._pauses.answered()
            self._watch.brought += length
            self.stats[BYTES_OF[flight.batch.priority]] += length
            if not flight.abandoned:  # else it may have begun before the others that are under way
                rate = self._link.came(length, time.monotonic())
                self.stats[Fetched.LINK_RATE] = max(self.stats[Fetched.LINK_RATE], rate)

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def _finish(self, came: Iterable[Came]) -> None:
        """Blocks are ready, or could not be written, or failed: tell who waits."""
        settled: list[BlockRequest] = []
        with self._lock:
            for block, data, error in came:
                self._queue.done([block])
                settled += self._waiting.came(block, data, error)
            if settled:
                self._order.demanded_at = time.monotonic()
            self._came.notify_all()
        for request in settled:
            request.answer()

    def _fail(self, flight: Flight, why: BootseerError, *, for_good: bool) -> None:
        """Another try would fail in the same way: readers hear it at once, prefetch goes on after a pause (somebody may
        mend a permission), without these blocks when it is ``for_good``. A hot pack is left."""
        settled: list[BlockRequest] = []
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
        self._pauses.rest(why, now)
        if batch.priority is Priority.DEMAND:
            log.warning("fetch of blocks %d..%d: %s; trying again", batch.blocks[0], batch.blocks[-1], why)
        elif seconds := self._pauses.pause(now):
            log.warning("prefetch pauses for %.2g s: %s", seconds, why)

    def _give_back(self, flight: Flight, why: str = "") -> None:
        """Under the lock: what is left of the batch of ``flight`` did not come. ``why``: the hot pack that it is of is
        of no use."""
        if flight.abandoned or flight.skipped:
            return
        if flight.batch.pack == HERE:
            self._order.put_back_copies(flight.batch.blocks, flight.batch.priority)
        elif flight.stream is None:
            self._order.put_back(flight.batch.blocks, flight.batch.priority, time.monotonic())
        else:
            self._order.put_back_range(flight.batch, flight.stream, why)
        self._work_came.notify_all()

    def _note_full(self, why: str) -> None:
        """A block could not be written: from now on fetch only what readers wait for."""
        with self._lock:
            if self.full:
                return
            self.stats[Fetched.CACHE_FULL] = 1
            self._order.stop_prefetch()
        log.warning("block cache %s %s: serving reads from memory, prefetch stops", self._cache.folder, why)
