"""Connections to registries: directly or through a proxy, with TLS as docker and podman are set up for it.

Reads of answers are judged by progress: `http.client` has a deadline for each read of a socket only. They are stricter
as well. `http.client` takes any 1xx answer but 100 for the final one, so that the real one is left for the next request
on the connection; it skips 100s and trailers without end; and it takes a chunk of -1 bytes for all that is to come."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import http.client
import io
import logging
import os
import re
import socket
import ssl
import stat
import time
import urllib.request
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from bootseer.closing import descriptor
from bootseer.errors import ConfigError, PrivilegeError
from bootseer.oci import hosts
from bootseer.oci.hosts import Host
from bootseer.oci.reference import is_local, is_own
from bootseer.oci.wire import PIECE, Origin, TlsError, TransportError, number, passing, why
from bootseer.wiretypes import MOST

log = logging.getLogger(__name__)

CERTS = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))
CONNECT = 10.0
"""Seconds to connect."""
PROGRESS = 16 << 10
"""Bytes that must come within the limit of waiting: a server that drips is as bad as a silent one."""

_INTERIM = 16
"""1xx answers taken before one, and trailer lines after one."""
_LINE = 4096
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?\n\Z", re.DOTALL)


def proxy_for(scheme: str, host: str) -> str | None:
    """The URL of the proxy for ``scheme://host`` as the environment names it (``HTTP_PROXY``, ``HTTPS_PROXY`` and
    ``NO_PROXY`` in either case), or None, as for loopback and private addresses."""
    if is_local(host):
        return None
    found = urllib.request.getproxies_environment().get(scheme)
    if not found or urllib.request.proxy_bypass_environment(host):  # type: ignore[attr-defined]
        return None
    return found if "://" in found else f"http://{found}"


def login_header(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if not parts.username:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def context_for(host: str, port: int, said: Host | None = None, stranger: bool = False) -> ssl.SSLContext:
    """Reads all CAs of the machine, and what is ``said``: once per host. A ``stranger`` is not shown as this machine.
    `ConfigError` for what is no certificate."""
    names = (f"{host}:{port}", *((host,) if port == 443 else ()))
    context = ssl.create_default_context()
    if said and said.skip_verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    folders = [base / name for base in CERTS for name in names]
    beside = [folder for base in hosts.FOLDERS for name in names for folder in hosts.folders(base, name)]
    folders += [one for one in beside if one not in folders and not os.path.exists(one / "hosts.toml")]
    path = Path()
    try:
        cas = (path for folder in folders for path in sorted(folder.glob("*.crt")))
        for path in [*map(Path, said.ca if said else ()), *cas]:
            if _may_read(path):
                context.load_verify_locations(path)
        certs = [path for folder in folders if not stranger for path in sorted(folder.glob("*.cert"))]
        pairs = [(path, own if os.path.exists(own := path.with_suffix(".key")) else None) for path in certs]
        for path, key in [*pairs, *((Path(one), key or None) for one, key in (said.client if said else ()))]:
            if _may_read(path) and _may_read(key or path):
                context.load_cert_chain(path, key, password=_no_password)
    except OSError as exc:  # ssl.SSLError is one
        none = "it is no certificate in PEM, or not with its key"
        why = none if isinstance(exc, ssl.SSLError) else exc.strerror or "cannot be read"
        raise ConfigError(
            f"certificate {path} for registry {names[0]}: {why}", hint="replace it, or take it away"
        ) from None
    return context


def _may_read(path: str | Path) -> bool:
    """What is for root alone is no mistake of who asks as another user: without it a registry says what it wants.
    Raises `OSError` for what OpenSSL would read without end."""
    try:
        with descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)) as fd:
            found = os.fstat(fd)
    except PermissionError:
        log.warning("%s is not used: this user cannot read it", path)
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST:
        raise OSError(errno.EINVAL, "it is no file of certificates")
    return True


def _no_password() -> str:
    """Of a key: nobody is there to be asked for one."""
    return ""


def _addresses(origin: Origin, named: Container[str]) -> list[str]:
    """Of a host that a stranger may have us ask. `PrivilegeError` when one is this machine's own, and the host is not
    ``named``; `socket.gaierror` when it has none."""
    found = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(there[0]) for *_, there in found))
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    known = f"{host}:{origin.port}" in named or (origin.port in (80, 443) and host in named)
    if not known and any(map(is_own, addresses)):
        raise PrivilegeError(
            f"{host}:{origin.port} is a loopback or link-local address of the node: it is not asked for others",
            hint="plain_http in the settings of the node names registries that are",
        )
    return addresses


def connect(
    origin: Origin,
    proxy: str | None,
    context: Callable[[str, int], ssl.SSLContext],
    named: Container[str] | None = None,
    patience: float = CONNECT,
) -> http.client.HTTPConnection:
    """A connection to ``origin``, by way of ``proxy``, within ``patience`` seconds. ``named``: it is for a stranger,
    who may reach no address of this machine's own but those of these hosts. `TransportError`, `TlsError`,
    `PrivilegeError`."""
    via = Origin.of(proxy) if proxy else origin
    connection: http.client.HTTPConnection
    if origin.scheme == "https":
        tls = context(origin.host, origin.port)
        connection = http.client.HTTPSConnection(via.host, via.port, timeout=patience, context=tls)
        if proxy:
            connection.set_tunnel(origin.host, origin.port, login_header(proxy))
    else:
        connection = http.client.HTTPConnection(via.host, via.port, timeout=patience)
    connection.blocksize = PIECE
    connection.response_class = limited(CONNECT)

    def reach(there: tuple[str, int], *args: Any) -> socket.socket:
        """As `socket.create_connection`, to the addresses that were looked at."""
        errors: list[OSError] = []
        for address in _addresses(origin, named or ()):
            try:
                return socket.create_connection((address, there[1]), *args)
            except OSError as exc:
                errors.append(exc)
        raise errors[0]

    try:
        if named is not None and not proxy:
            connection._create_connection = reach  # type: ignore[attr-defined]
        elif named is not None:
            with contextlib.suppress(socket.gaierror):  # the proxy may know names that this machine does not
                _addresses(origin, named)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except ssl.SSLCertVerificationError as exc:
        connection.close()
        hint = f"add the CA to this machine's, or as {CERTS[0]}/HOST/ca.crt, or set SSL_CERT_FILE"
        raise TlsError(f"its certificate is not trusted ({exc.verify_message})", hint) from None
    except ssl.SSLError as exc:
        connection.close()
        if passing(exc):
            raise TransportError("the connection ended in the TLS handshake") from None
        plain = exc.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
        hint = "if it has none, --plain-http for an image, registry+http:// for a store, or BOOTSEER_PLAIN_HTTP says so"
        hint = hint if plain else "look at its TLS settings"
        raise TlsError(f"no TLS ({(exc.reason or str(exc)).lower().replace('_', ' ')})", hint) from None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        connection.close()
        raise TransportError(why(exc), fresh=not passing(exc)) from None
    return connection


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
    """A socket's raw file whose reads give up when ``PROGRESS`` bytes cost more than ``limit`` seconds of waiting. Only
    time inside a read counts: a consumer may pause as long as it likes."""

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
