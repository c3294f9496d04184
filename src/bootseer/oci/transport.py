"""HTTP/1.1 for registries: a pool of kept connections over `http.client`, with deadlines judged by progress.

Why not a library: a cold start makes a thousand range requests, and one of 1 MiB takes 0.8 times the CPU here that it
takes with urllib3 (measured by turns); none of those we know judges a transfer by its progress.

Concurrency: any thread may call `Transport.request`; a connection belongs to one answer until that is closed. No
threads of its own. Waits: ``CONNECT`` seconds to connect; afterwards every 16 KiB (or the end of what is sent or
expected) must take less than ``STALL`` seconds of waiting, so neither a silent nor a dripping server holds us."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import functools
import http.client
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Container, Mapping
from http.client import HTTPMessage
from typing import Any

from bootseer.closing import Closing
from bootseer.oci import connect
from bootseer.oci.connect import Response, limited
from bootseer.oci.hosts import Host
from bootseer.oci.wire import FilePart, Origin, TransportError, number, target, why

STALL = 30.0
_IDLE = 16
_AGE = 50.0
"""Idle connections kept, and for how long: common servers and balancers cut them after 60 s."""


class Answer(Closing):
    """A server's answer. Read it, then `close` it (or use it as a context manager): its connection is reused only if
    the body was read to its end."""

    def __init__(self, url: str, response: http.client.HTTPResponse, give_back: Any) -> None:
        self.url = url
        self.status = response.status
        self.headers: HTTPMessage = response.headers
        self.body = b""
        """What `document` has read."""
        self._response = response
        self._give_back = give_back
        self._open = True

    @property
    def retry_after(self) -> float | None:
        """``Retry-After`` as seconds from now: a number, or an HTTP date (RFC 9110, 10.2.3). None also for now and
        before, as of a clock that is slow: nobody asks at once a server that is busy."""
        text = self.headers.get("retry-after", "").strip()
        if (seconds := number(text)) is not None:
            return float(seconds) or None
        try:
            then = email.utils.parsedate_to_datetime(text)
            if then.tzinfo is None:
                then = then.replace(tzinfo=datetime.UTC)
            return max(0.0, (then - datetime.datetime.now(datetime.UTC)).total_seconds()) or None
        except (ValueError, TypeError, OverflowError, IndexError):
            return None

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, fewer only at the end. Raises `TransportError`."""
        try:
            return self._response.read(size)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            self._response.will_close = True
            raise TransportError(why(exc)) from None

    def document(self, limit: int) -> bytes:
        """The whole body; `TransportError` when it is cut short. One byte more than ``limit`` at most is read."""
        body = b""
        while len(body) <= limit and (piece := self.read(limit + 1 - len(body))):
            body += piece
        length = number(self.headers.get("content-length", ""))
        if length and self._response._method != "HEAD" and len(body) < min(length, limit):  # type: ignore[attr-defined]
            raise TransportError(f"the answer ends after {len(body)} of {length} bytes")
        self.body = body
        return body

    def close(self) -> None:
        if self._open:
            self._open = False
            ended = self._response.isclosed()
            self._response.close()
            self._give_back(ended and not self._response.will_close)


class Transport:
    """Connections to any number of hosts. ``close`` drops the idle ones; later requests still work. ``named``: see
    `connect.connect`."""

    def __init__(self, named: Container[str] | None = None) -> None:
        self.named = named
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[tuple[http.client.HTTPConnection, float]]] = {}
        self._pid = os.getpid()
        self._said: dict[tuple[str, int], Host | None] = {}
        self._contexts: dict[tuple[str, int], ssl.SSLContext] = {}

    def connect_as(self, origin: Origin, said: Host | None) -> None:
        """Connect to ``origin`` as ``said``: within that time, with these certificates beside those of this machine.
        What was said first of a host and port counts."""
        self._said.setdefault((origin.host, origin.port), said)

    def _context(self, host: str, port: int) -> ssl.SSLContext:
        if (made := self._contexts.get((host, port))) is None:
            made = self._contexts[host, port] = connect.context_for(
                host, port, self._said.get((host, port)), self.named is not None
            )
        return made

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | FilePart | None = None,
        patience: float | None = None,
    ) -> Answer:
        """One request, no redirects followed; ``patience`` seconds (default ``STALL``) until the answer begins; where
        that is less than ``STALL`` it limits each stretch of the body as well. Raises `TransportError`. A kept
        connection that turns out dead is replaced by a new one, unseen."""
        origin = Origin.of(url)
        proxy = connect.proxy_for(origin.scheme, origin.host)
        path = url if proxy and origin.scheme == "http" else target(url)
        length = body.length if isinstance(body, FilePart) else len(body or b"")
        sent = {"User-Agent": "bootseer", "Accept-Encoding": "identity", **headers}
        if proxy and origin.scheme == "http":
            sent.update(connect.login_header(proxy))
        if body is not None:
            sent["Content-Length"] = str(length)
        while True:
            connection, used = self._connection(origin, proxy)
            try:
                response = _exchange(connection, method, path, sent, body, patience or STALL)
            except (OSError, http.client.HTTPException, ValueError) as exc:
                connection.close()
                if used and not isinstance(exc, TimeoutError):
                    continue
                raise TransportError(why(exc)) from None
            except BaseException:
                connection.close()
                raise
            return Answer(url, response, functools.partial(self._back, origin, connection))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection, _ in connections:
                connection.close()

    def __del__(self) -> None:
        # Stores are opened and dropped without being closed.
        for connections in getattr(self, "_idle", {}).values():
            for connection, _ in connections:
                connection.close()

    @property
    def idle(self) -> int:
        """Connections that wait for use."""
        with self._lock:
            return sum(map(len, self._idle.values()))

    def _connection(self, origin: Origin, proxy: str | None) -> tuple[http.client.HTTPConnection, bool]:
        if os.getpid() != self._pid:  # a fork: two processes on one connection would get each other's answers
            self._pid = os.getpid()
            self.close()
        while True:
            with self._lock:
                connections = self._idle.get(origin)
                if not connections:
                    break
                connection, since = connections.pop()
            if time.monotonic() - since < _AGE and not _ended(connection.sock):
                return connection, True
            connection.close()
        said = self._said.get((origin.host, origin.port))
        patience = said.dial_timeout if said else 0.0
        return connect.connect(origin, proxy, self._context, self.named, patience or connect.CONNECT), False

    def _back(self, origin: Origin, connection: http.client.HTTPConnection, ended: bool) -> None:
        if ended and connection.sock is not None:
            with self._lock:
                connections = self._idle.setdefault(origin, [])
                if len(connections) < _IDLE:
                    connections.append((connection, time.monotonic()))
                    return
        connection.close()


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | FilePart | None,
    patience: float,
) -> http.client.HTTPResponse:
    connection.sock.settimeout(STALL)  # for each piece sent
    try:
        connection.request(method, target, body.pieces() if isinstance(body, FilePart) else body, dict(headers))
    except (BrokenPipeError, ConnectionResetError):
        # A server that refuses a body answers and closes before it is sent: that answer says why.
        with contextlib.suppress(OSError, http.client.HTTPException):
            return _begin(connection, patience)
        raise
    return _begin(connection, patience)


def _begin(connection: http.client.HTTPConnection, patience: float) -> http.client.HTTPResponse:
    connection.response_class = limited(patience)
    response = connection.getresponse()
    assert isinstance(response, Response)
    response.watched.restart(min(STALL, patience))
    return response


def _ended(sock: socket.socket) -> bool:
    """Whether a kept connection has been closed by the server (it is readable without a request)."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
