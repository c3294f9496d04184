"""Answers whose reads are judged by progress: `http.client` has a deadline for each read of a socket only."""

from __future__ import annotations

import functools
import http.client
import io
import socket
import time
from typing import Any, cast

PROGRESS = 16 << 10
"""Bytes that must come within the limit of waiting: a server that drips is as bad as a silent one."""


class Response(http.client.HTTPResponse):
    """Reads through a watched file; `http.client.HTTPConnection` calls it with a socket and a method."""

    def __init__(self, sock: socket.socket, *args: Any, limit: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.watched = _Watched(sock, self.fp.detach(), limit)
        self.fp = io.BufferedReader(self.watched, 64 << 10)


def limited(limit: float) -> type[http.client.HTTPResponse]:
    return cast("type[http.client.HTTPResponse]", functools.partial(Response, limit=limit))


class _Watched(io.RawIOBase):
    """A socket's raw file whose reads give up when ``PROGRESS`` bytes cost more than ``limit`` seconds of waiting.

    Only time inside a read counts: a consumer may pause as long as it likes.
    """

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, limit: float) -> None:
        self._sock, self._raw = sock, raw
        self.limit = limit
        self._waited = 0.0
        self._came = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self.limit - self._waited
        if left <= 0:
            raise TimeoutError(f"fewer than {PROGRESS} bytes in {self.limit:.0f} s")
        self._sock.settimeout(left)
        began = time.monotonic()
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self.limit:.0f} s") from None
        self._came += count or 0
        self._waited += time.monotonic() - began
        if self._came >= PROGRESS:
            self.restart(self.limit)
        return count

    def restart(self, limit: float) -> None:
        self.limit, self._waited, self._came = limit, 0.0, 0

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
