"""The fetcher: threads that bring missing blocks from the sources into the cache file, verified.

This is what others call; behind it `board` (what the threads share, and the lock), `crew` (the threads), `pilot`
(requests and retries), `landing` (verify, write, answer) and `clock` (deadlines). Lock: that of the `Board` (see
there); it is not held while a reader is answered or a thread joined. A block is in flight once, unless a reader waits
for one whose range is late: then it is fetched a second time, alone. See ``docs/internals/blocks-concurrency.md``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.fetch.board import Board
from bootseer.blocks.fetch.clock import Clock
from bootseer.blocks.fetch.crew import Crew
from bootseer.blocks.fetch.deadlines import Done, Request
from bootseer.blocks.fetch.landing import Landing
from bootseer.blocks.fetch.source import Source, Sources
from bootseer.blocks.fetch.stream import HotStream, Pieces
from bootseer.blocks.fetch.workers import Pilot
from bootseer.errors import BootseerError, UnavailableError

log = logging.getLogger(__name__)

DEMAND_WINDOW = 1 << 20
"""Without a profile a miss fetches this aligned window: more would make readers wait, less would be more requests."""

_GRACE = 5.0
"""After its deadline a reader looks for itself."""


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
        streams = max(1, streams)
        self._cache = cache
        self._sources = Sources(sources)
        self._stream_sources: list[Pieces] = []
        self._board = Board(cache.map, cache.ready, window=window, streams=streams, quiet=quiet, deadline=deadline)
        self.stats = self._board.stats
        self._landing = Landing(self._board, cache, self._sources, make_room)
        self._pilot = Pilot(self._board, self._sources, self._landing)
        self._crew = Crew(self._board, self._pilot.fly, streams)
        self._clock = Clock(self._board, self._crew, self._sources.name)
        self._clock.start()
        if not self._crew.start():
            self.close()
            raise UnavailableError("cannot start a thread to fetch blocks with", hint="raise the limit of processes")

    def submit(self, first: int, last: int, done: Done) -> None:
        """Bring blocks ``first`` to ``last``; ``done(error, memory)`` is called once, from a thread of the fetcher
        (or the one in `close`): it must be short and take no lock that is held while calling the fetcher.

        ``error`` is None when all blocks are ready or, those that could not be cached, in ``memory``; else
        `UnavailableError` (after the deadline) or `DataError` (a block is damaged in every source). Raises
        `UnavailableError`, and never calls ``done``, after `close`.
        """
        board = self._board
        now = time.monotonic()
        ready = self._cache.ready
        with board.lock:
            if board.closing.is_set():
                raise UnavailableError("the block server is stopping")
            pending = [block for block in range(first, last + 1) if not ready[block]]
            request = Request(set(pending), done, now + board.deadline)
            board.schedule.last_demand = now
            if pending:
                board.waiting.add(request)
                for block in pending:
                    if (late := board.schedule.want(block, now, board.flights)) is not None:
                        board.waiting.alarm(late, request, block)
                # One thread: if one request cannot bring all, that thread wakes the next.
                board.work_came.notify()
                board.asked += 1
                board.hurry.notify()
            else:
                request.settled = True
                board.served.append(request)
            board.alarm.notify()

    def demand(self, first: int, last: int) -> dict[int, bytes]:
        """`submit`, and wait: returns the bytes of the blocks that could not be cached, or raises the error."""
        done = threading.Event()
        answer: list[tuple[BootseerError | None, dict[int, bytes]]] = []

        def settle(error: BootseerError | None, memory: dict[int, bytes]) -> None:
            answer.append((error, memory))
            done.set()

        self.submit(first, last, settle)
        if not done.wait(self._board.deadline + _GRACE):
            raise UnavailableError(f"blocks {first} to {last} did not come, and their deadline passed unnoticed")
        error, memory = answer[0]
        if error is not None:
            raise error
        return memory

    def hot(self, order: Sequence[int]) -> None:
        """Fetch these blocks next, in this order; from now on a miss fetches only what it needs."""
        board = self._board
        with board.lock:
            board.schedule.hot(order)
            board.work_came.notify_all()

    def stream(self, stream: HotStream) -> None:
        """Fetch a hot pack, before what `hot` names. Its source is closed with the others."""
        board = self._board
        with board.lock:
            self._stream_sources.append(stream.source)
            board.schedule.stream(stream)
            board.work_came.notify_all()

    def streamed(self, timeout: float) -> bool:
        """Wait until the hot stream has ended, or was left; False when that takes longer than ``timeout`` seconds."""
        board = self._board
        with board.lock:
            return board.work_done.wait_for(lambda: board.closing.is_set() or not board.schedule.streaming, timeout)

    def background(self, on: bool = True) -> None:
        """Fetch everything else when nothing more urgent is wanted."""
        board = self._board
        with board.lock:
            board.schedule.background(on)
            board.work_came.notify_all()

    def eager(self) -> None:
        """The start is over: background fill need not wait for a quiet moment any more."""
        board = self._board
        with board.lock:
            board.schedule.quiet = 0.0
            board.work_came.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is queued or in flight; False when that takes longer than ``timeout`` seconds."""
        board = self._board
        with board.lock:
            return board.work_done.wait_for(lambda: board.closing.is_set() or board.idle(), timeout)

    @property
    def prefetching(self) -> bool:
        """Whether the hot stream is on its way, or ranges of a hot list have not been asked for yet."""
        with self._board.lock:
            return self._board.schedule.prefetching

    @property
    def closed(self) -> bool:
        return self._board.closing.is_set()

    @property
    def full(self) -> bool:
        """Whether the cache ran out of space: demand is served from memory, prefetch has stopped."""
        return self._board.schedule.full

    def close(self, timeout: float = 10.0) -> None:
        """Stop all threads; readers that wait get `UnavailableError`."""
        board = self._board
        with board.lock:
            board.closing.set()
            left = board.waiting.all()
            for request in left:
                board.waiting.settle(request, UnavailableError("the block server is stopping"))
            for condition in (board.work_came, board.work_done, board.alarm, board.hurry):
                condition.notify_all()
        for request in left:
            request.answer()
        until = time.monotonic() + timeout
        self._crew.join(until)
        self._clock.join(until)
        if stuck := self._crew.stuck:
            log.warning("%d fetch threads are stuck in a source that does not answer; leaving them", stuck)
        with board.lock:
            board.work_done.wait_for(lambda: not board.parked, max(0.0, until - time.monotonic()))
        self._sources.close()
        for source in self._stream_sources:
            source.close()
