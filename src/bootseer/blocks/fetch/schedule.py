"""What the fetcher's next free thread does: demand, then the hot stream, then the hot list, then background fill.

Pure bookkeeping without threads; the fetcher calls it under its lock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Container, Sequence

import msgspec

from bootseer.blocks.fetch.flight import Concurrency, FetchStats, Flight, Pace
from bootseer.blocks.fetch.queue import STREAM, Batch, FetchQueue, Priority
from bootseer.blocks.fetch.stream import HotStream

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 30.0
_BACKGROUND_STREAMS = 2
"""So that a reader's request never queues behind more than two large ones on a slow link."""
_SMALL = 256 << 10
"""Requests up to this size tell how long a direct fetch takes."""
_BEAT = 0.005
_FAR = 2.0
"""Seconds that no reader waits for a range, whatever was fetched twice already."""
_HEDGE_SHARE = 0.1
_HEDGE_FREE = 4 << 20
"""Bytes that may be fetched a second time: a share of what readers asked for, and these."""


class Schedule:
    """Chooses among what ``queue`` and a hot stream want, for ``streams`` threads.

    ``quiet``: background fill waits for this many seconds without demand. ``waiting`` tells for which blocks readers
    wait.
    """

    def __init__(
        self, queue: FetchQueue, waiting: Container[int], stats: FetchStats, *, streams: int, quiet: float
    ) -> None:
        self.quiet = quiet
        self.last_demand = 0.0
        self.pause_until = 0.0
        self.full = False
        self.pace = Pace()
        self._queue = queue
        self._waiting = waiting
        self._stats = stats
        self._streams = streams
        self._room = Concurrency(streams)
        self._pause = _FIRST_PAUSE
        self._stream: HotStream | None = None
        self._hot: Sequence[int] = ()
        self._hedged = 0
        self._again: set[int] = set()

    # -- wishes ------------------------------------------------------------------------------------------------

    def want(self, block: int, now: float, flights: Collection[Flight]) -> float | None:
        """A reader waits for ``block``. None: it is demanded; else it comes with a prefetch, and is late at that time.

        A block of the stream is left to it when it is due sooner than a direct fetch takes.
        """
        direct = self.pace.seconds * (1 + self._queue.demanded / self._streams)
        if self._queue.in_flight(block):
            late = self._coming(block, flights)
            if late > direct and (late > _FAR or self._may_hedge(block)):
                self._twice(block)
                return None
        elif (late := self._due(block, now)) <= direct:
            self._stats.stream_waits += 1
        else:
            self._stats.direct_misses += 1
            self._queue.demand(block)
            return None
        return now + 2 * max(late, direct) + _BEAT

    def _coming(self, block: int, flights: Collection[Flight]) -> float:
        """Seconds until ``block``, which is on its way, is there: far down in a range of the stream, or soon."""
        if any(flight.stream is None and block in flight.batch.blocks for flight in flights):
            return 0.0
        due = self._stream.due(block) if self._stream is not None else None
        return due or 0.0

    def _due(self, block: int, now: float) -> float:
        due = self._stream.due(block) if self._stream is not None and now >= self.pause_until else None
        return math.inf if due is None else due

    def hedge(self, block: int, flights: Collection[Flight]) -> bool:
        """``block`` did not come with the prefetch that its reader relied on: fetch it alone, at once. False: not yet,
        too much was fetched twice already; ask again in a while, then it is done."""
        if any(flight.batch.priority is Priority.DEMAND and block in flight.batch.blocks for flight in flights):
            return True
        if not self._may_hedge(block) and block not in self._again:
            self._again.add(block)
            return False
        self._again.discard(block)
        self._twice(block)
        return True

    def _may_hedge(self, block: int) -> bool:
        most = _HEDGE_FREE + _HEDGE_SHARE * self._stats.demand_bytes
        return self._hedged + self._queue.length(block) <= most

    def _twice(self, block: int) -> None:
        self._hedged += self._queue.length(block)
        self._stats.hedges += 1
        self._queue.done([block])
        self._queue.demand(block)

    def hot(self, order: Sequence[int]) -> None:
        """A hot list, which comes after the stream."""
        self._hot = order
        self._queue.window = 1
        if not self.full:
            self._queue.hot(order)

    def stream(self, stream: HotStream) -> None:
        self._queue.window = 1
        self._stream = None if self.full else stream

    def background(self, on: bool) -> None:
        self._queue.background(on and not self.full)

    def stop_prefetch(self) -> None:
        """The cache is full: only what readers wait for."""
        self.full = True
        self._stream = None
        self._queue.stop_prefetch()
        self._queue.window = 1

    # -- what to do --------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a prefetch has not been asked for to its end."""
        streaming = self._stream is not None and self._stream.pending
        return streaming or self._queue.hot_pending or self._queue.filling

    @property
    def streaming(self) -> bool:
        """Whether the hot stream is still on its way."""
        return self._stream is not None and (self._stream.pending or self._stream.flying)

    @property
    def prefetching(self) -> bool:
        """Whether the hot stream is on its way, or ranges of a hot list have not been asked for yet."""
        return self.streaming or self._queue.hot_pending

    @property
    def demanded(self) -> bool:
        return self._queue.demanded > 0

    def take(self, now: float, flights: Collection[Flight], demand_only: bool) -> Batch | None:
        if (batch := self._queue.take_demand()) is not None or demand_only:
            return batch
        flying = [flight.batch for flight in flights]
        if now < self.pause_until or len(flying) >= self._room.limit:
            return None
        if (batch := self._queue.take_ahead() or self._take_stream()) is not None:
            return batch
        if (self._stream is None or not self._stream.pending) and (batch := self._queue.take_hot()) is not None:
            return batch
        priorities = [batch.priority for batch in flying]
        if (
            now - self.last_demand < self.quiet
            or Priority.DEMAND in priorities
            or priorities.count(Priority.BACKGROUND) >= _BACKGROUND_STREAMS
        ):
            return None
        return self._queue.take_background()

    def _take_stream(self) -> Batch | None:
        if self._stream is None or not self._stream.room:
            return None
        batch = self._stream.take(self._queue.missing)
        if batch is not None:
            self._queue.fly(batch.blocks)
        return batch

    def stream_of(self, batch: Batch) -> HotStream | None:
        return self._stream if batch.pack == STREAM else None

    # -- results -----------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """The source gave what was asked for."""
        self._room.good()
        self._pause = _FIRST_PAUSE

    def landed(self, flight: Flight, seconds: float) -> None:
        """The blocks of ``flight`` are where they belong, ``seconds`` after its request began."""
        if flight.batch.priority is Priority.DEMAND and flight.batch.length <= _SMALL:
            self.pace.add(seconds)

    def advanced(self, flight: Flight, stream: HotStream, part: Batch) -> bool:
        """``part`` of a range of ``stream`` is where it belongs. True: the next range may be asked for."""
        if part.offset == flight.batch.offset:
            self.answered()
        stream.came(flight.batch, part)
        flight.batch = msgspec.structs.replace(flight.batch, blocks=flight.batch.blocks[len(part.blocks) :])
        return stream.pending and stream.room

    def refused(self, batch: Batch, now: float, why: object, *, until: float = 0.0) -> None:
        """The source did not answer, or refuses: fewer requests at once, and prefetch pauses, at least ``until``."""
        self._room.bad(now)
        if batch.priority is not Priority.DEMAND and now >= self.pause_until:
            log.warning("prefetch pauses for %.2g s: %s", max(self._pause, until - now), why)
            self.pause_until = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.pause_until = max(self.pause_until, until)

    def put_back(self, batch: Batch, stream: HotStream | None) -> None:
        """``batch`` is not in flight any more and has not come: what readers wait for is demanded, the rest waits."""
        if stream is None:
            self._queue.put_back(batch, [block for block in batch.blocks if block in self._waiting])
            return
        self._unfly(batch)
        if not stream.put_back(batch):
            self._drop(stream, "it does not answer")

    def leave(self, batch: Batch, stream: HotStream, why: str) -> None:
        """The hot pack is of no use: what it would have brought comes from the packs, range by range."""
        self._unfly(batch)
        self._drop(stream, why)

    def abandon(self, flight: Flight) -> None:
        """Nobody counts on the return of ``flight``."""
        if flight.stream is not None:
            self.put_back(flight.batch, flight.stream)
        else:
            self._unfly(flight.batch)

    def _unfly(self, batch: Batch) -> None:
        self._queue.done(batch.blocks)
        for block in batch.blocks:
            if block in self._waiting:
                self._queue.demand(block)

    def _drop(self, stream: HotStream, why: str) -> None:
        stream.abandon()
        if self._stream is stream:
            log.warning("hot pack %s is left: %s; its blocks come from the packs", stream.source.name, why)
            self._stream = None
        if not self.full:
            self._queue.hot([*stream.order, *self._hot])
