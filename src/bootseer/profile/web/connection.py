"""A connection to the pages: who does not go on asking, or does not take an answer, is not waited for, as any number of
such visitors would hold memory and descriptors for as long as they like. Where no place is left, they go at once."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 60.0
"""For all that comes before a request is whole, and for some of an answer to be taken."""


class Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._came = self.loop.time()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()
        self.loop.call_later(SECONDS, self._look, None, 0)

    def _make_room(self) -> None:
        """Half of those who would not be waited for go, who came first: a newcomer who asks finds a place, however many
        come who do not."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        idle = sorted((one for one in others if one._asks() or one._waiting()), key=lambda one: one._came)
        for one in idle[: len(idle) // 2 + 1]:
            self.connections.discard(one)
            one.transport.abort()

    def _asks(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _waiting(self) -> int:
        return self.transport.get_write_buffer_size()

    def _look(self, last: object, left: int) -> None:
        """``last``, ``left``: the request of the look before, and how many bytes of its answer were waiting."""
        if self not in self.connections:  # one that is being closed is, until all was taken
            return
        waiting = self._waiting()
        if self.cycle is last and (self._asks() if not waiting else waiting >= left > 0):
            self.transport.abort()
        else:
            self.loop.call_later(SECONDS, self._look, self.cycle, waiting)
