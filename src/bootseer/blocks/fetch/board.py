"""What the threads of one fetcher share: queue, hot stream, who waits, what flies, the counters, and the lock.

The lock discipline of the fetcher (`fetch`, `crew`, `pilot`, `landing`, `clock`): **one lock, `Board.lock`**, is held
for every change of what is here, and never during I/O, decompression, hashing or the answer to a reader. Without it may
be looked at: `closing`, and single numbers (`asked`, the counters, whether the schedule is `full`). A flight's
`started` is set by its own thread, without it. A function that says "under the lock" is called by who holds it; every
other takes it itself and must not be called by who does. `room` has a lock of its own, and never takes this one while
it holds that.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from bootseer.blocks.fetch.deadlines import Request, Waiting
from bootseer.blocks.fetch.flight import FetchStats, Flight
from bootseer.blocks.fetch.queue import Batch, FetchQueue, Priority
from bootseer.blocks.fetch.schedule import Schedule
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.formats.bitmap import Ready
from bootseer.blocks.formats.blockmap import BlockMap


class Board:
    """``window``: bytes fetched around a demanded block; ``streams``: requests at once; ``quiet``: seconds without
    demand before background fill; ``deadline``: seconds a reader waits. The conditions all belong to ``lock``:

    ``work_came``: a thread of the crew may find a batch. ``work_done``: perhaps nothing is left to do, or to wait for.
    ``alarm``: the clock has something to do, or to wait for. ``hurry``: a reader asked, so a pause may end.
    """

    def __init__(
        self, blocks: BlockMap, ready: Ready, *, window: int, streams: int, quiet: float, deadline: float
    ) -> None:
        self.deadline = deadline
        self.stats = FetchStats()
        self.queue = FetchQueue(blocks, ready, window=max(1, window >> blocks.shift))
        self.waiting = Waiting()
        self.schedule = Schedule(self.queue, self.waiting, self.stats, streams=streams, quiet=quiet)
        self.schedule.last_demand = time.monotonic()
        self.flights: set[Flight] = set()
        self.parked = 0
        """Blocks that wait for room on the disk."""
        self.asked = 0
        """Requests of readers so far that were not ready at once."""
        self.served: deque[Request] = deque()
        """Requests that found all their blocks ready; the clock answers them."""
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.work_came = threading.Condition(self.lock)
        self.work_done = threading.Condition(self.lock)
        self.alarm = threading.Condition(self.lock)
        self.hurry = threading.Condition(self.lock)

    def idle(self) -> bool:
        """Under the lock: whether nothing is queued, in flight, or waiting for room."""
        return not (self.flights or self.parked or self.schedule.pending)

    def take(self, demand_only: bool) -> Batch | None:
        """Under the lock: what a free thread is to fetch now, if anything."""
        if self.closing.is_set():
            return None
        pending = self.schedule.pending
        batch = self.schedule.take(time.monotonic(), self.flights, demand_only)
        if pending and batch is None and not self.schedule.pending:
            self.work_done.notify_all()
        return batch

    def put_back(self, batch: Batch, stream: HotStream | None) -> None:
        """``batch`` did not come; somebody else may try."""
        with self.lock:
            self.schedule.put_back(batch, stream)
            self.work_came.notify_all()

    def count(self, priority: Priority, length: int, *, requests: int = 1) -> None:
        """A source answered with ``length`` bytes."""
        with self.lock:
            self.stats.requests += requests
            if priority is Priority.DEMAND:
                self.stats.demand_bytes += length
            elif priority is Priority.HOT:
                self.stats.hot_bytes += length
            else:
                self.stats.background_bytes += length
