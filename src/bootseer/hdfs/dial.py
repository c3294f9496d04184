"""Connections to daemons of HDFS, made within a deadline, by any thread; a forked child closes its copies of them."""

from __future__ import annotations

import encodings.idna  # noqa: F401  which each look-up of a name needs; see `bootseer.backends.cluster`
import errno
import os
import resource
import socket
import time
import weakref
from collections.abc import Callable

from bootseer.errors import ConfigError
from bootseer.hdfs.deadline import Workers

Address = tuple[str, int]
"""Host (or IP address) and port."""

_LIMITS = {
    errno.ENFILE: "this machine has too many open files (fs.file-max)",
    errno.ENOBUFS: "this machine has no memory left for sockets (net.ipv4.tcp_mem)",
    errno.ENOMEM: "this machine has no memory left for sockets (net.ipv4.tcp_mem)",
    errno.EADDRNOTAVAIL: "this machine has no free port left to connect from (net.ipv4.ip_local_port_range)",
}

_resolvers = Workers()
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    # A child's copy holds the connection open when its parent closes it. Closing the copy leaves the parent's alone.
    for sock in list(_open):
        sock.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_inherited)


def remaining(until: float) -> float:
    """Seconds until then, by the monotonic clock; `TimeoutError` when it has passed."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


def dial(
    host: str, port: int, until: float, watch: Callable[[socket.socket | None], None] = lambda sock: None
) -> socket.socket:
    """A connection to the first address of ``host`` that takes it; small writes go out at once. Looking the name up has
    the deadline, too. ``watch`` is given each socket before it is connected, and None when that failed; what it raises
    ends the attempt. `OSError`, of which `TimeoutError` is one; `ConfigError` for what cannot be the name of a host."""
    found = _resolve(host, port, until)
    problem: OSError = ConnectionError(f"{host} has no address")
    for i, (family, kind, protocol, _, address) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            _open.add(sock)
            watch(sock)
            sock.settimeout(remaining(until) / (len(found) - i))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():
                # a connection to a port of this machine where nobody listens may come from that very port
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except BaseException as exc:
            watch(None)
            sock.close()
            if not isinstance(exc, OSError):
                raise
            problem = exc
    raise problem


def _resolve(
    host: str, port: int, until: float
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]]:
    host = host.strip("[]")
    try:
        try:
            flags = socket.AI_NUMERICHOST
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)  # type: ignore[return-value]
        except socket.gaierror:  # a name: the resolver has timeouts of its own, longer than ours
            return _resolvers.call(
                lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),  # type: ignore[return-value,arg-type]
                remaining(until),
            )
    except UnicodeError:
        hint = "what stands between two dots has 1 to 63 characters"
        raise ConfigError(f"{host!r} cannot be the name of a host", hint=hint) from None


def machines(host: str, port: int, until: float) -> list[Address]:
    """Each machine that ``host`` stands for, by its own name where it has one (Kerberos wants it). Raises `OSError`."""
    found = _resolve(host, port, until)
    names = _resolvers.call(lambda: [socket.getnameinfo(each[-1], 0)[0] for each in found], remaining(until))  # type: ignore[arg-type]
    return [(name, port) for name in names]


def own_limit(exc: OSError) -> str:
    """What this process or machine ran out of, "" when ``exc`` says something of the other side."""
    if isinstance(exc, socket.gaierror):
        return ""  # numbers of another kind
    if exc.errno == errno.EMFILE:
        return f"this process has too many open files (its limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return _LIMITS.get(exc.errno or 0, "")


def host_port(address: Address) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    host = address[0].strip("[]")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
