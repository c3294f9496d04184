"""Connections to DataNodes: made within a deadline, kept for the next read, forgotten by a forked child.

Who has a connection from `take` or `connect` has it alone, and ends with `give_back` or `Connection.close`. The pool of
idle ones is shared by all threads; while there are any, a thread waits to close those that are too old. At the end of
the process the rest are closed.
"""

from __future__ import annotations

import atexit
import errno
import os
import resource
import socket
import threading
import time
import weakref

from bootseer.errors import UnavailableError
from bootseer.hdfs.connection import Address, Connection, Transfer, name
from bootseer.hdfs.deadline import Workers
from bootseer.hdfs.replica_errors import Cancelled, OwnLimit

IDLE = 4.0
"""Seconds after which a DataNode closes an idle connection (``dfs.datanode.socket.reuse.keepalive``)."""

PER_NODE = 8
"""Idle connections kept to one DataNode."""

IN_ALL = 64
"""Idle connections kept to all DataNodes together."""

_LIMITS = {
    errno.ENFILE: "this machine has too many open files (fs.file-max)",
    errno.ENOBUFS: "this machine has no memory left for sockets (net.ipv4.tcp_mem)",
    errno.ENOMEM: "this machine has no memory left for sockets (net.ipv4.tcp_mem)",
    errno.EADDRNOTAVAIL: "this machine has no free port left to connect from (net.ipv4.ip_local_port_range)",
}

_idle: dict[Address, list[tuple[float, Connection]]] = {}
_lock = threading.Lock()
_changed = threading.Condition(_lock)
_sweeper: threading.Thread | None = None
_open: weakref.WeakSet[Connection] = weakref.WeakSet()
_resolvers = Workers()


def _forget() -> None:
    # Sockets are shared with the parent: shutting one down would end the parent's read, closing this copy does not;
    # keeping it would hold the connection open when the parent closes it.
    global _lock, _changed, _sweeper
    _lock = threading.Lock()
    _changed, _sweeper = threading.Condition(_lock), None
    _idle.clear()
    for connection in list(_open):
        connection.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_forget)


def take(address: Address) -> Connection | None:
    """An idle connection to ``address`` that seems alive, or None."""
    while True:
        with _lock:
            kept = _idle.get(address)
            if not kept:
                return None
            since, connection = kept.pop()
        if time.monotonic() - since < IDLE and connection.alive():
            return connection
        connection.close()


def give_back(connection: Connection) -> None:
    """End its turn; keep it, unless it is out of step or there are enough."""
    connection.end()
    stale: Connection | None = connection
    with _lock:
        kept = _idle.setdefault(connection.address, [])
        if connection.in_step and len(kept) < PER_NODE and _sweeping():
            kept.append((time.monotonic(), connection))
            stale = _oldest() if sum(map(len, _idle.values())) > IN_ALL else None
    if stale is not None:
        stale.close()


def _oldest() -> Connection:
    kept = min((kept for kept in _idle.values() if kept), key=lambda kept: kept[0][0])
    return kept.pop(0)[1]


def _sweeping() -> bool:
    """See to it that what is kept now will be closed. Under the lock; False where no thread can be had."""
    global _sweeper
    if _sweeper is None:
        sweeper = threading.Thread(target=_sweep, name="bootseer-idle-connections", daemon=True)
        try:
            sweeper.start()
        except RuntimeError:  # no more threads, or the end of the process
            return False
        _sweeper = sweeper
    return True


def _sweep() -> None:
    """Close what DataNodes close by then themselves, until nothing is left."""
    global _sweeper
    while True:
        with _changed:
            now = time.monotonic()
            stale = []
            for address, kept in list(_idle.items()):
                while kept and now - kept[0][0] >= IDLE:
                    stale.append(kept.pop(0)[1])
                if not kept:
                    del _idle[address]
            if not stale:
                if not _idle:
                    _sweeper = None
                    return
                _changed.wait(min(kept[0][0] for kept in _idle.values()) + IDLE - now)
        for old in stale:
            old.close()


def clear() -> None:
    """Close all idle connections."""
    with _lock:
        all_kept = [connection for kept in _idle.values() for _, connection in kept]
        _idle.clear()
        _changed.notify_all()
    for connection in all_kept:
        connection.close()


atexit.register(clear)


def idle(address: Address) -> int:
    """How many idle connections to ``address`` are kept."""
    with _lock:
        return len(_idle.get(address, ()))


def connect(address: Address, until: float, transfer: Transfer) -> Connection:
    """A new connection, its turn begun. Raises `OSError` (`TimeoutError` past ``until``), `Cancelled`."""
    problem: OSError = OSError(errno.EHOSTUNREACH, "no address")
    for family, where in resolve(address, until):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            transfer.attach(sock)
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
            sock.connect(where)
            sock.settimeout(None)
            if sock.getsockname() == sock.getpeername():
                # a connection to a port of this machine where nobody listens may come from that very port
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made = Connection(sock, address)
            _open.add(made)
            made.begin(until, transfer)
            return made
        except BaseException as exc:
            transfer.attach(None)
            sock.close()
            if transfer.cancelled:
                raise Cancelled("the read was cancelled") from None
            if not isinstance(exc, OSError) or isinstance(exc, TimeoutError):
                raise
            problem = exc
    raise problem


def resolve(address: Address, until: float) -> list[tuple[int, tuple[str, int] | tuple[str, int, int, int]]]:
    """(address family, socket address) of each way to ``address``. Raises `OSError` (`TimeoutError` past ``until``)."""
    host, port = address[0].strip("[]"), address[1]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        # a name: the resolver has timeouts of its own, longer than ours
        left = max(until - time.monotonic(), 0.001)
        try:
            found = _resolvers.call(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), left)
        except UnicodeError:
            raise _no_name() from None
    except UnicodeError:  # an empty or too long part between dots
        raise _no_name() from None
    return [(family, where) for family, _, _, _, where in found]  # type: ignore[misc]


def _no_name() -> OSError:
    return socket.gaierror(socket.EAI_NONAME, "that is no host name")


def own_limit(exc: OSError) -> str:
    """What this process or machine ran out of, "" when ``exc`` says something of the other side."""
    if isinstance(exc, socket.gaierror):
        return ""  # numbers of another kind
    if exc.errno == errno.EMFILE:
        return f"this process has too many open files (its limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return _LIMITS.get(exc.errno or 0, "")


def unavailable(address: Address, exc: Exception, doing: str, seconds: float) -> UnavailableError:
    """One line for a failure of the connection while ``doing`` (a phrase such as ``"read block 7"``)."""
    what = f"cannot {doing} from DataNode {name(address)}"
    if isinstance(exc, OSError) and (limit := own_limit(exc)):
        return OwnLimit(f"{what}: {limit}", hint="raise that limit, or read less at once")
    if isinstance(exc, TimeoutError) and exc.errno is None:
        return UnavailableError(f"{what}: no answer within {seconds:.3g} s", hint="check that it runs and is reachable")
    if isinstance(exc, OSError):
        return UnavailableError(f"{what}: {exc.strerror or exc}", hint="check that it runs and is reachable")
    return UnavailableError(f"{what}: {exc}")
