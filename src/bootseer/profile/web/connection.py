"""A connection to the pages: who does not go on asking, or does not take an answer, is not waited for, as any number of
such visitors would hold memory and descriptors for as long as they like."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 60.0
"""For all that comes before a request is whole, and for some of an answer to be taken."""


class Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(SECONDS, self._look, None, 0)

    def _look(self, last: object, left: int) -> None:
        """``last``, ``left``: the request of the look before, and how many bytes of its answer were waiting."""
        if self not in self.connections:  # one that is being closed is, until all was taken
            return
        asks = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        waiting = self.transport.get_write_buffer_size()
        if self.cycle is last and (asks if not waiting else waiting >= left > 0):
            self.transport.abort()
        else:
            self.loop.call_later(SECONDS, self._look, self.cycle, waiting)
