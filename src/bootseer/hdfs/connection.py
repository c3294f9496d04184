"""One connection to a DataNode: a deadline for all it does in a turn, and another thread may cancel it.

A `Connection` has one user at a time, who begins each turn with `Connection.begin`. `Transfer` is the handle that other
threads hold: `Transfer.cancel` shuts the socket down, which wakes its user wherever it waits. Connections are made and
kept by `bootseer.hdfs.connections`.

Sockets are blocking, and the kernel keeps the deadline (``SO_RCVTIMEO``): so one ``recvmsg`` with ``MSG_WAITALL``
gathers a MiB in many buffers without Python between, where sockets with Python's own timeouts poll before each call and
return what there is. In the main thread those are used nevertheless, because there signal handlers interrupt a wait,
and Python would then begin it anew with its whole time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence

from bootseer.hdfs.replica_errors import Cancelled

_TIMEVAL = struct.Struct("@ll")
_LATE = 0.02  # a wait may end so much after the deadline; saves a system call per wait
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_VECTORS = 512  # buffers of one call; Linux takes 1024

Address = tuple[str, int]


class Transfer:
    """One read under way, for those who watch it from other threads.

    ``received``: bytes that have arrived, not yet verified; with those of headers until a batch of packets is complete,
    and counted again after a retry.
    """

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
                _shut(self._socket)

    def attach(self, sock: socket.socket | None) -> None:
        """The socket that the read waits for; None: none, and the one before is no longer touched."""
        with self._lock:
            self._socket = sock
            if sock is not None and self.cancelled:
                raise Cancelled("the read was cancelled")


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class Connection:
    """A connected socket to ``address``. Every wait ends by the deadline of `begin` with `TimeoutError`.

    Other failures are `OSError`; `EOFError` when the other side closed.
    """

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.address = address
        self._socket = sock
        self._transfer = Transfer()
        self._until = 0.0
        self._limit = -1.0  # what the kernel was told last, in seconds
        self._polled = False
        self._ahead = b""  # arrived, not asked for yet

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

    def abandon(self) -> None:
        """Close this process's copy; safe in a forked child."""
        self._socket.close()

    @property
    def in_step(self) -> bool:
        """Nothing has arrived that was not asked for."""
        return not self._ahead

    def alive(self) -> bool:
        """Not closed by the other side, and nothing unread."""
        try:
            self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _set_limit(self, left: float) -> None:
        if left <= 0:
            raise TimeoutError
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
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise TimeoutError from None

    def some(self, size: int) -> bytes:
        """What there is, at least one and at most ``size`` bytes."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data
        while True:
            self._check()
            with contextlib.suppress(
                BlockingIOError
            ):  # the kernel's limit came first: `_check` knows whether it is time
                if not (data := self._socket.recv(size)):
                    raise self._closed()
                return data

    def unread(self, data: bytes) -> None:
        """Give back what was received before its turn."""
        self._ahead = data + self._ahead

    def fill(self, views: Sequence[memoryview], count: int, *, quick: bool = False) -> None:
        """Receive exactly ``count`` bytes, the sum of all ``views``, into them in order.

        ``quick``: they are near, so let the kernel wait for all; else `Transfer.received` is kept up to date meanwhile.
        """
        flags = socket.MSG_WAITALL if quick else 0
        if self._ahead:
            views, count = self._fill_ahead(views, count)
        while count:
            self._check()
            now = views if len(views) <= _VECTORS else views[:_VECTORS]
            try:
                if len(now) == 1:
                    got = self._socket.recv_into(now[0], 0, flags)
                else:
                    got = self._socket.recvmsg_into(now, 0, flags)[0]
            except BlockingIOError:
                continue  # as in `some`
            if not got:
                raise self._closed()
            count -= got
            self._transfer.received += got
            if count:
                views = _rest(views, got)

    def _fill_ahead(self, views: Sequence[memoryview], count: int) -> tuple[Sequence[memoryview], int]:
        used = 0
        for view in views:
            part = self._ahead[used : used + len(view)]
            view[: len(part)] = part
            used += len(part)
            if len(part) < len(view):
                break
        self._ahead = self._ahead[used:]
        return _rest(views, used), count - used

    def _closed(self) -> Exception:
        if self._transfer.cancelled:
            return Cancelled("the read was cancelled")
        return EOFError("the DataNode closed the connection")


def _rest(views: Sequence[memoryview], used: int) -> Sequence[memoryview]:
    """What follows the first ``used`` bytes of ``views``."""
    for index, view in enumerate(views):
        if used < len(view):
            return [view[used:], *views[index + 1 :]]
        used -= len(view)
    return []


def name(address: Address) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    host = address[0].strip("[]")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
