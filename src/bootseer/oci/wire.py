"""Small parts of HTTP that the client's modules share: addresses, numbers in headers, bodies from files, what failed.
Nothing a server sends may raise anything but `TransportError` here, and no message quotes an address: its path and
query may be signed."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import msgspec

PIECE = 256 << 10
_NUMBER = re.compile(r"[0-9]{1,18}\Z")
_TUNNEL = re.compile(r"Tunnel connection failed: ([0-9]{3})\b")
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))


class TransportError(Exception):
    """No or half an answer; ``fresh`` when another try would end alike: nobody is there."""

    def __init__(self, why: str, *, fresh: bool = False) -> None:
        super().__init__(why)
        self.fresh = fresh


class TlsError(TransportError):
    """The two sides do not agree on TLS: trying again does not help. ``hint`` says what might."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why, fresh=True)
        self.hint = hint


class FilePart(msgspec.Struct, frozen=True):
    """``length`` bytes from ``offset`` of a local file, as a request's body that can be sent again."""

    path: Path
    offset: int
    length: int

    def pieces(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            left = self.length
            while left and (piece := file.read(min(PIECE, left))):
                left -= len(piece)
                yield piece


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Scheme, host and port of ``url``; `TransportError` when it is no HTTP URL."""
        try:
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            if not parts.hostname:  # the socket would take this machine
                raise ValueError
        except (KeyError, ValueError):
            raise TransportError("it names an address that is not understood", fresh=True) from None
        return cls(parts.scheme, parts.hostname, port)


def number(text: str) -> int | None:
    """``text`` as a count: 1 to 18 ASCII digits, else None. ``int`` takes more, and raises for other digits."""
    text = text.strip(" \t")
    return int(text) if _NUMBER.match(text) else None


def onward(url: str, location: str) -> str:
    """Where ``location``, said by the server at ``url``, leads to, in ASCII. `TransportError` when that is nowhere."""
    try:
        # Header bytes are read as Latin-1; servers put UTF-8 into them.
        return str(urljoin(url, quote(location.encode("latin-1", "replace"), safe=_PRINTABLE)))
    except ValueError:
        raise TransportError("it sends us on to an address that is not understood", fresh=True) from None


def secured(url: str, there: str) -> str:
    """``there``, with TLS when ``url`` has it and both are of one host (registries behind a balancer that ends TLS
    often name themselves ``http``); empty when it would lead elsewhere without."""
    ours, theirs = Origin.of(url), Origin.of(there)
    if ours.scheme != "https" or theirs.scheme == "https":
        return there
    if theirs.host != ours.host or theirs.port not in (80, ours.port):
        return ""
    return urlsplit(there)._replace(scheme="https", netloc=urlsplit(url).netloc).geturl()


def target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def why(exc: BaseException) -> str:
    """What went wrong, without anything an exception quotes of requests or answers."""
    if isinstance(exc, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(exc, http.client.HTTPException | ValueError) and not isinstance(exc, OSError):
        return f"the answer is cut or no HTTP ({type(exc).__name__})"
    if isinstance(exc, TimeoutError) and not exc.errno:
        return str(exc) or "no answer in time"
    if isinstance(exc, OSError) and exc.errno and exc.strerror:
        return os.strerror(exc.errno) if exc.errno > 0 and not isinstance(exc, ssl.SSLError) else exc.strerror
    if isinstance(exc, OSError) and (match := _TUNNEL.match(str(exc))):
        return f"the proxy refuses it (HTTP {match[1]})"
    return type(exc).__name__


def passing(exc: BaseException) -> bool:
    """Whether trouble in connecting may be over at the next try: balancers that restart, a name server that is busy."""
    if isinstance(exc, socket.gaierror):
        return exc.errno == socket.EAI_AGAIN
    ended = ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionResetError | ConnectionAbortedError | BrokenPipeError
    return isinstance(exc, ended | http.client.HTTPException) or bool(_TUNNEL.match(str(exc)) and "50" in str(exc))
