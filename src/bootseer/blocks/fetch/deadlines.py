"""Who waits for which blocks: requests of readers, their deadlines, and the moments to look whether a block is late.

Bookkeeping without threads or locks: the fetcher calls it under its lock, and `Request.answer` without it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable

from bootseer.errors import BootseerError

log = logging.getLogger(__name__)

Done = Callable[[BootseerError | None, dict[int, bytes]], None]
"""Called once with what failed (None: the blocks are ready) and the bytes of blocks that could not be cached."""

DEADLINE = -1
"""In place of a block: the alarm is the request's deadline."""

_FEW = 1024


class Request:
    """A reader waits for the blocks ``pending``. Settled once: when there is none left, at an error, at ``until``."""

    __slots__ = ("_done", "error", "memory", "pending", "settled", "until")

    def __init__(self, pending: set[int], done: Done, until: float) -> None:
        self.pending = pending
        self.until = until
        self.memory: dict[int, bytes] = {}
        self.error: BootseerError | None = None
        self.settled = False
        self._done = done

    def answer(self) -> None:
        """Tell the reader; not under a lock. An exception of its callback ends here, in the log."""
        try:
            self._done(self.error, {} if self.error is not None else self.memory)
        except Exception:
            log.exception("the answer to a reader failed")
        self.memory = {}


class Waiting:
    """The requests that are not settled, by block."""

    def __init__(self) -> None:
        self._by_block: dict[int, list[Request]] = {}
        self._alarms: list[tuple[float, int, Request, int]] = []
        self._most = _FEW
        self._serial = itertools.count()

    def __contains__(self, block: object) -> bool:
        return block in self._by_block

    def add(self, request: Request) -> None:
        for block in request.pending:
            self._by_block.setdefault(block, []).append(request)
        self.alarm(request.until, request, DEADLINE)

    def came(self, block: int, data: bytes | None = None, error: BootseerError | None = None) -> list[Request]:
        """``block`` is ready, or there are its bytes, or it failed. Returns the requests that this settles."""
        settled = []
        for request in self._by_block.pop(block, ()):
            request.pending.discard(block)
            if data is not None:
                request.memory[block] = data
            if error is not None or not request.pending:
                self.settle(request, error)
                settled.append(request)
        return settled

    def settle(self, request: Request, error: BootseerError | None) -> None:
        """Nothing else will be said about ``request``; the caller has to call its `answer`."""
        request.settled = True
        request.error = error
        for block in request.pending:
            if (others := self._by_block.get(block)) is not None and request in others:
                others.remove(request)
                if not others:
                    del self._by_block[block]

    def all(self) -> list[Request]:
        return list({id(request): request for requests in self._by_block.values() for request in requests}.values())

    def alarm(self, at: float, request: Request, block: int) -> None:
        """Return (``request``, ``block``) from `due` at monotonic time ``at``, unless it came before."""
        heapq.heappush(self._alarms, (at, next(self._serial), request, block))
        if len(self._alarms) > self._most:
            # One old request at the top must not keep those of a million that were settled since.
            self._alarms = [one for one in self._alarms if _rings(one[2], one[3])]
            heapq.heapify(self._alarms)
            self._most = max(_FEW, 2 * len(self._alarms))

    def due(self, now: float) -> list[tuple[Request, int]]:
        """The alarms that are due, of what is still waited for."""
        due = []
        while self._alarms and self._alarms[0][0] <= now:
            _, _, request, block = heapq.heappop(self._alarms)
            if _rings(request, block):
                due.append((request, block))
        return due

    def next_alarm(self) -> float | None:
        """When the next one is due; alarms of settled requests are forgotten on the way."""
        while self._alarms and self._alarms[0][2].settled:
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None


def _rings(request: Request, block: int) -> bool:
    return not request.settled and (block == DEADLINE or block in request.pending)
