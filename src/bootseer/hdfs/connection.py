"""Connections with a deadline for all that one does in a turn, and pools of idle ones, for the next turn.

A `Connection` has one user at a time, who has it from `Pool.take` or `connect`, begins the turn with
`Connection.begin`, and ends it with `Pool.give_back` or `Connection.close`. `Transfer` is the handle that other threads
hold: `Transfer.cancel` shuts the socket down, which wakes its user wherever it waits.

Sockets are blocking, and the kernel keeps the deadline (``SO_RCVTIMEO``), where sockets with Python's own timeouts poll
before each call (a tenth more CPU). In the main thread those are used nevertheless, because there signal handlers
interrupt a wait, and Python would then begin it anew with its whole time."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from bootseer.hdfs.dial import Address, dial, remaining
from bootseer.hdfs.replica_errors import Cancelled
from bootseer.hdfs.sasl.streams import Stream

_TIMEVAL = struct.Struct("@ll")
_LATE = 0.02  # a wait may end so much after the deadline; saves a system call per wait
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_SOME = 64 << 10  # bytes of one `Connection.pull`
_MUCH = 256 << 10  # bytes asked for where messages must be whole before they are of use
_VECTORS = 512  # buffers of one call; Linux takes 1024


class Transfer:
    """One read under way, for those who watch it from other threads. ``received``: bytes that have arrived, not yet
    verified; with those of headers until a batch of packets is complete, and counted again after a retry."""

    def __init__(self) -> None:
        self.received = 0
        self.cancelled = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def cancel(self) -> None:
        """End the read with `Cancelled` as soon as it waits, or at once if it waits; no effect after its end."""
        with self._lock:
            self.cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def attach(self, sock: socket.socket | None) -> None:
        """The socket that the read waits for; None: none, and the one before is no longer touched."""
        with self._lock:
            self._socket = sock
            if sock is not None and self.cancelled:
                raise Cancelled("the read was cancelled")


class Connection:
    """A connected socket to ``address``. Every wait ends by the deadline of `begin` with `TimeoutError`. Other failures
    are `OSError`; `EOFError` when the other side closed; `Cancelled`."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        sock.settimeout(None)
        self.address = address
        self._socket = sock
        self._transfer = Transfer()
        self._until = 0.0
        self._limit = -1.0  # what the kernel was told last, in seconds
        self._polled = False
        self._unread = b""  # arrived, not asked for yet
        self._stream: Stream | None = None  # what protects its bytes

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return str(self._socket.getpeername()[0])

    @property
    def left(self) -> float:
        """Seconds until the turn ends."""
        return self._until - time.monotonic()

    def protect(self, stream: Stream | None) -> None:
        """What comes and goes from now on goes through ``stream``."""
        if self._unread:
            raise OSError("bytes came before the login was over")
        self._stream = stream

    def begin(self, until: float, transfer: Transfer) -> None:
        """Begin a turn that ends by ``until`` (monotonic seconds)."""
        transfer.attach(self._socket)
        self._transfer, self._until = transfer, until
        self._polled = threading.current_thread() is threading.main_thread()
        self._set_limit(until - time.monotonic())

    def end(self) -> None:
        """End the turn: its `Transfer` no longer reaches this connection."""
        self._detach()
        if self._polled:
            self._socket.settimeout(None)
            self._polled = False

    def close(self) -> None:
        self._detach()
        self._socket.close()

    def _detach(self) -> None:
        self._transfer.attach(None)
        self._transfer = Transfer()

    def alive(self) -> bool:
        """Not closed by the other side, and nothing has arrived that was not asked for."""
        if self._unread:
            return False
        try:
            self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _set_limit(self, left: float) -> None:
        if left <= 0:
            raise TimeoutError("no answer in time")
        if self._polled:
            self._socket.settimeout(left)
        elif not left <= self._limit <= left + _LATE:
            limit = left + _LATE / 2
            whole = int(limit)
            value = _TIMEVAL.pack(whole, int((limit - whole) * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._limit = limit

    def _check(self) -> None:
        if self._transfer.cancelled:
            raise Cancelled("the read was cancelled")
        left = self._until - time.monotonic()
        if self._polled or self._limit > left + _LATE:
            self._set_limit(left)

    def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        self._check()
        if self._stream is not None:
            data = b"".join(self._stream.out([data]))
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise TimeoutError("no answer in time") from None

    def some(self, size: int) -> bytes:
        """What there is, at least one and at most ``size`` bytes."""
        if self._unread:
            data, self._unread = self._unread[:size], self._unread[size:]
            return data
        while True:
            self._check()
            try:
                data = self._socket.recv(size)
            except BlockingIOError:
                continue  # the kernel's limit came first: `_check` knows whether it is time
            if not data:
                raise self._closed()
            if self._stream is None:
                return data
            if data := self._stream.plain(data):
                self._unread = data[size:]
                return data[:size]

    # -- outside of turns: one thread sends and one receives at the same time -----------------------------------------

    def push(self, data: bytes, until: float) -> None:
        """Send all of ``data``."""
        view = memoryview(data if self._stream is None else b"".join(self._stream.out([data])))
        while view:
            try:
                view = view[self._socket.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._await(select.POLLOUT, until)

    def pull(self, until: float) -> bytes:
        """What comes next, at least one byte."""
        while True:
            self._await(select.POLLIN, until)
            try:
                data = self._socket.recv(_SOME, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not data:
                raise self._closed()
            if data := data if self._stream is None else self._stream.plain(data):
                return data

    def _await(self, events: int, until: float) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        if not poll.poll(remaining(until) * 1000):
            raise TimeoutError("no answer in time")

    def shut(self) -> None:
        """Nothing comes or goes any more: who waits is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # -- in a turn ----------------------------------------------------------------------------------------------------

    def unread(self, data: bytes) -> None:
        """Give back what was received before its turn."""
        self._unread = data + self._unread

    def fill(self, views: Sequence[memoryview], count: int) -> None:
        """Receive exactly ``count`` bytes, the sum of all ``views``, into them in order."""
        if self._unread:
            used = _copy(self._unread, views)
            self._unread = self._unread[used:]
            views, count = _rest(views, used), count - used
        if self._stream is not None and not self._stream.in_place:
            while count:
                came = self.some(_MUCH)
                used = _copy(came, views)
                self._transfer.received += used
                self._unread = came[used:] + self._unread
                views, count = _rest(views, used), count - used
            return
        whole = views
        while count:
            self._check()
            try:
                got = self._socket.recvmsg_into(views[:_VECTORS])[0]
            except BlockingIOError:
                continue  # as in `some`
            if not got:
                raise self._closed()
            count -= got
            self._transfer.received += got
            if count:
                views = _rest(views, got)
        if self._stream is not None:
            self._stream.fill(whole)

    def _closed(self) -> Exception:
        if self._transfer.cancelled:
            return Cancelled("the read was cancelled")
        return EOFError("the other side closed the connection")


def _copy(data: bytes, views: Sequence[memoryview]) -> int:
    """Copy the beginning of ``data`` into ``views``; how many bytes that were."""
    used = 0
    for view in views:
        part = data[used : used + len(view)]
        view[: len(part)] = part
        used += len(part)
    return used


def _rest(views: Sequence[memoryview], used: int) -> Sequence[memoryview]:
    """What follows the first ``used`` bytes of ``views``."""
    for index, view in enumerate(views):
        if used < len(view):
            return [view[used:], *views[index + 1 :]]
        used -= len(view)
    return []


def connect(address: Address, until: float, transfer: Transfer, *, silent_ms: int = 0) -> Connection:
    """A new connection. `OSError` (`TimeoutError` past ``until``), `ConfigError`, `Cancelled`. ``silent_ms``: bytes
    that a dead network swallows for so long end it (``TCP_USER_TIMEOUT``); 0: the kernel decides."""
    try:
        sock = dial(*address, until, transfer.attach)
    except OSError:
        if transfer.cancelled:
            raise Cancelled("the read was cancelled") from None
        raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)
    return Connection(sock, address)


class Pool:
    """Idle connections, kept for ``seconds`` and at most ``most`` to all addresses together. All threads share it. A
    pool closes them at its process's end. That of a forked child is empty: `hdfs.dial` closes its copies."""

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most = seconds, most
        self.forget()
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.clear)

    def forget(self) -> None:
        """In a forked child: another thread of the parent may have had the lock."""
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Connection]] = []  # since when, the oldest first

    def take(self, address: Address) -> Connection | None:
        """An idle connection to ``address`` that seems alive, or None."""
        while True:
            with self._lock:
                found = next((kept for kept in reversed(self._idle) if kept[1].address == address), None)
                if found is None:
                    return None
                self._idle.remove(found)
            since, connection = found
            if time.monotonic() - since < self.seconds and connection.alive():
                return connection
            connection.close()

    def give_back(self, connection: Connection) -> None:
        """End its turn, and keep it for the next `take`; close those that idle for too long."""
        connection.end()
        now, stale = time.monotonic(), list[Connection]()
        with self._lock:
            self._idle.append((now, connection))
            while self._idle and (len(self._idle) > self.most or now - self._idle[0][0] >= self.seconds):
                stale.append(self._idle.pop(0)[1])
        for each in stale:
            each.close()

    def clear(self) -> None:
        """Close all."""
        with self._lock:
            kept, self._idle = self._idle, []
        for _, connection in kept:
            connection.close()

    def count(self, address: Address) -> int:
        """How many are connected to ``address``."""
        with self._lock:
            return sum(connection.address == address for _, connection in self._idle)
