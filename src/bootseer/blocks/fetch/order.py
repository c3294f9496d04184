"""What a free thread of the fetcher fetches: what readers wait for, then the hot stream, then the hot list, then
everything else in a quiet moment. Bookkeeping without threads, locks or clocks; the fetcher calls it under its lock and
hands the time in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bootseer.blocks.fetch.deadlines import Waiting
from bootseer.blocks.fetch.pauses import Pauses
from bootseer.blocks.fetch.queue import Batch, FetchQueue, Priority
from bootseer.blocks.fetch.stream import HotStream

log = logging.getLogger(__name__)

_BACKGROUND_STREAMS = 2
"""So that a reader's request never queues behind more than two large ones on a slow link."""


class Order:
    """``prefetches``: how many threads may fetch what no reader waits for. ``quiet``: seconds without demand after
    which the background fill starts. ``demanded_at``: when a reader was served, or came, last."""

    def __init__(
        self, queue: FetchQueue, waiting: Waiting, pauses: Pauses, *, prefetches: int, quiet: float, now: float
    ) -> None:
        self.stream: HotStream | None = None
        self.quiet, self.demanded_at = quiet, now
        self._queue, self._waiting, self._pauses = queue, waiting, pauses
        self._prefetches = prefetches
        self._hot: Sequence[int] = ()
        self._here: list[int] = []
        """Blocks of the hot stream that come beside it, because most of their frame is on this node."""

    @property
    def streaming(self) -> bool:
        """Whether the hot stream is still on its way."""
        return self.stream is not None and self.stream.under_way

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be asked for."""
        return not self.streaming and self._queue.idle

    def hot(self, blocks: Sequence[int]) -> None:
        """These come after the hot stream, in this order."""
        self._hot = blocks
        self._queue.window = 1
        self._queue_hot()

    def begin(self, stream: HotStream) -> None:
        self.stream = stream
        self._queue.window = 1
        self._here = stream.leave(self._queue.here)
        if self._here:
            self._queue_hot()

    def stop_prefetch(self) -> None:
        """Only what readers wait for from now on."""
        if self.stream is not None:
            self.stream.abandon()
        self._queue.stop_prefetch()

    def take(self, flying: Sequence[Priority], now: float) -> Batch | None:
        """What to fetch now, beside what is ``flying``."""
        if now < self._pauses.demand_from:
            return None
        return self._queue.take_demand(now) or self._take_prefetch(flying, now)

    def _take_prefetch(self, flying: Sequence[Priority], now: float) -> Batch | None:
        demanded = flying.count(Priority.DEMAND)
        if now < self._pauses.prefetch_from or len(flying) - demanded >= self._prefetches:
            return None
        stream = self.stream
        if stream is not None and stream.free and (batch := stream.take(self._queue.missing)) is not None:
            self._queue.fly(batch.blocks)
            return batch
        # What the stream went on without comes beside it: the job wants it earlier than the rest.
        beside = stream is None or stream.skipped or self._here or not stream.pending
        if beside and (batch := self._queue.take_hot()) is not None:
            return batch
        quiet = now - self.demanded_at >= self.quiet and not demanded
        if not quiet or flying.count(Priority.BACKGROUND) >= _BACKGROUND_STREAMS:
            return None
        return self._queue.take_background()

    def put_back(self, blocks: Sequence[int], priority: Priority, now: float) -> None:
        """``blocks`` did not come: what readers wait for is demanded, the rest waits its turn again."""
        waited_for = [block for block in blocks if block in self._waiting]
        begin = now
        if waited_for and priority is Priority.DEMAND:
            begin = self._pauses.again(min(map(self._waiting.since, waited_for)), now)
        self._queue.put_back(blocks, priority, waited_for, begin)

    def put_back_copies(self, blocks: Sequence[int], priority: Priority) -> None:
        """``blocks`` are not on this node after all: they come from the store, at once."""
        for block in blocks:
            self._queue.here[block] = 0
        self._queue.put_back(blocks, priority, [block for block in blocks if block in self._waiting])

    def skip(self, batch: Batch, stream: HotStream, now: float) -> None:
        """The stream goes on without its range ``batch``, which hangs."""
        stream.skip(batch)
        self.put_back(batch.blocks, Priority.HOT, now)
        self._queue_hot()

    def put_back_range(self, batch: Batch, stream: HotStream, why: str) -> None:
        """``batch``, what is left of a range, did not come. ``why``: the hot pack is of no use."""
        self._queue.done(batch.blocks)
        for block in batch.blocks:
            if block in self._waiting:
                self._queue.demand(block)
        if (not stream.put_back(batch) or why) and not stream.abandoned:
            stream.abandon()
            why = why or "it does not answer"
            log.warning("hot pack %s is left: %s; its blocks come from the packs", stream.source.name, why)
            self._queue_hot()

    def _queue_hot(self) -> None:
        """What the hot stream has left, all of it where it was abandoned, and then the hot list."""
        stream, rest = self.stream, self._hot
        if stream is not None:
            rest = [*(stream.order if stream.abandoned else [*self._here, *stream.skipped]), *rest]
        self._queue.hot(rest)
