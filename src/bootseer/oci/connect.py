"""New connections to registries: directly or through a proxy, with TLS as docker and podman are set up for it."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bootseer.errors import ConfigError
from bootseer.oci._progress import limited
from bootseer.oci.reference import is_local
from bootseer.oci.wire import PIECE, Origin, TlsError, TransportError, passing, why

CERTS = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))
CONNECT = 10.0
"""Seconds to connect."""


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


def context_for(host: str, port: int) -> ssl.SSLContext:
    """Reads all CAs of the machine: once per host. `ConfigError` for a certificate that is not understood."""
    names = (f"{host}:{port}", *((host,) if port == 443 else ()))
    context = ssl.create_default_context()
    for folder in (base / name for base in CERTS for name in names):
        path = folder
        try:
            for path in sorted(folder.glob("*.crt")):
                context.load_verify_locations(path)
            for path in sorted(folder.glob("*.cert")):
                context.load_cert_chain(path, path.with_suffix(".key"))
        except OSError as exc:  # ssl.SSLError is one
            why = "it is no certificate in PEM" if isinstance(exc, ssl.SSLError) else exc.strerror or "cannot be read"
            raise ConfigError(
                f"certificate {path} for registry {names[0]}: {why}", hint="replace it, or take it away"
            ) from None
    return context


def connect(
    origin: Origin, proxy: str | None, context: Callable[[str, int], ssl.SSLContext]
) -> http.client.HTTPConnection:
    """A connection to ``origin``, by way of ``proxy``. `TransportError` and `TlsError`."""
    via = Origin.of(proxy) if proxy else origin
    connection: http.client.HTTPConnection
    if origin.scheme == "https":
        tls = context(origin.host, origin.port)
        connection = http.client.HTTPSConnection(via.host, via.port, timeout=CONNECT, context=tls)
        if proxy:
            connection.set_tunnel(origin.host, origin.port, login_header(proxy))
    else:
        connection = http.client.HTTPConnection(via.host, via.port, timeout=CONNECT)
    connection.blocksize = PIECE
    connection.response_class = limited(CONNECT)
    try:
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
