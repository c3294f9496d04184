"""Answers whose reads are judged by progress: `http.client` has a deadline for each read of a socket only.

They are read more strictly as well. `http.client` takes any 1xx answer but 100 for the final one, so that the real one
is left for the next request on the connection; it skips 100s and trailers without end; and it takes a chunk of -1
bytes for all that is to come.
"""

from __future__ import annotations

import functools
import http.client
import io
import re
import socket
import time
from typing import Any, cast

from bootseer.oci.wire import number

PROGRESS = 16 << 10
"""Bytes that must come within the limit of waiting: a server that drips is as bad as a silent one."""

_INTERIM = 16
"""1xx answers taken before one, and trailer lines after one."""
_LINE = 4096
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?\n\Z", re.DOTALL)


class Response(http.client.HTTPResponse):
    """Reads through a watched file; `http.client.HTTPConnection` calls it with a socket and a method."""

    def __init__(self, sock: socket.socket, *args: Any, limit: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.watched = _Watched(sock, self.fp.detach(), limit)
        self.fp = io.BufferedReader(self.watched, 64 << 10)

    def begin(self) -> None:
        super().begin()
        length = self.headers.get_all("content-length") or []
        if not self.chunked and (len(set(length)) > 1 or any(number(text) is None for text in length)):
            raise http.client.HTTPException  # where it ends, and another begins, is not known

    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(_INTERIM):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if status >= 200:
                return version, status, reason
            if status == 101:  # to another protocol, which nobody asked for
                break
            http.client.parse_headers(self.fp)
        raise http.client.BadStatusLine("1xx")

    def _read_next_chunk_size(self) -> int:
        if not (match := _CHUNK_SIZE.match(self.fp.readline(_LINE))):
            raise http.client.IncompleteRead(b"")
        return int(match[1], 16)

    def _read_and_discard_trailer(self) -> None:
        for _ in range(_INTERIM):
            if self.fp.readline(_LINE) in (b"\r\n", b"\n", b""):
                return
        raise http.client.IncompleteRead(b"")


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
