"""Who waits for which blocks, since when and until when. Bookkeeping without threads or locks: the fetcher calls it
under its lock, and `BlockRequest.answer` without it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bootseer.errors import BootseerError

log = logging.getLogger(__name__)

Done = Callable[[BootseerError | None, dict[int, bytes]], None]
"""Called once with what failed (None: the blocks are ready) and the bytes of blocks that could not be cached."""


class BlockRequest:
    """A reader waits for the blocks ``pending`` since monotonic time ``began``. Settled once: when there is none left,
    at an error, at ``until``."""

    def __init__(self, pending: set[int], done: Done, began: float, until: float) -> None:
        self.pending = pending
        self.began = began
        self.until = until
        self.memory: dict[int, bytes] = {}
        self.error: BootseerError | None = None
        self._done = done

    def answer(self) -> None:
        """Tell the reader; not under a lock. An exception of its callback ends here, in the log."""
        try:
            self._done(self.error, {} if self.error is not None else self.memory)
        except Exception:
            log.exception("the answer to a reader failed")


class Waiting:
    """The requests that are not settled."""

    def __init__(self) -> None:
        self.requests: set[BlockRequest] = set()
        self._by_block: dict[int, list[BlockRequest]] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._by_block

    def add(self, request: BlockRequest) -> None:
        self.requests.add(request)
        for block in request.pending:
            self._by_block.setdefault(block, []).append(request)

    def expired(self, now: float) -> list[BlockRequest]:
        return [request for request in self.requests if now >= request.until]

    def since(self, block: int) -> float:
        """When the first of those who wait for ``block`` began to."""
        return min(request.began for request in self._by_block[block])

    def came(self, block: int, data: bytes | None = None, error: BootseerError | None = None) -> list[BlockRequest]:
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

    def settle(self, request: BlockRequest, error: BootseerError | None) -> None:
        """Nothing else will be said about ``request``; the caller has to call its `answer`."""
        self.requests.discard(request)
        request.error = error
        for block in request.pending:
            if (others := self._by_block.get(block)) is not None and request in others:
                others.remove(request)
                if not others:
                    del self._by_block[block]
