"""Connections to daemons of HDFS, made within a deadline; a forked child closes its copies of them.

Concurrency: any thread.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref

from bootseer.errors import ConfigError
from bootseer.hdfs.deadline import Workers

_workers = Workers()
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget() -> None:
    # A child's copy holds the connection open when its parent closes it. Closing the copy leaves the parent's alone.
    for sock in list(_open):
        sock.close()
    _open.clear()


os.register_at_fork(after_in_child=_forget)


def left(until: float) -> float:
    """Seconds until then, by the monotonic clock; `TimeoutError` when it has passed."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


def dial(host: str, port: int, until: float) -> socket.socket:
    """A connection to the first address of ``host`` that takes it; small writes go out at once.

    Looking the name up has the deadline, too. `OSError`, of which `TimeoutError` is one; `ConfigError` for what cannot
    be the name of a host.
    """
    found = _resolve(host, port, until)
    problem: OSError = ConnectionError(f"{host} has no address")
    for i, (family, kind, protocol, _, address) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            _open.add(sock)
            sock.settimeout(left(until) / (len(found) - i))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():
                # a connection to a port of this machine where nobody listens may come from that very port
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except BaseException as exc:
            sock.close()
            if not isinstance(exc, OSError):
                raise
            problem = exc
    raise problem


def _resolve(
    host: str, port: int, until: float
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]]:
    try:
        try:
            flags = socket.AI_NUMERICHOST
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)  # type: ignore[return-value]
        except socket.gaierror:  # a name: the resolver has timeouts of its own, longer than ours
            return _workers.call(
                lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),  # type: ignore[return-value,arg-type]
                left(until),
            )
    except UnicodeError:
        hint = "what stands between two dots has 1 to 63 characters"
        raise ConfigError(f"{host!r} cannot be the name of a host", hint=hint) from None
