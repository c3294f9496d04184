"""Ranks of a job find each other through the job's store, and talk over TCP connections of their own.

Why not over the job's process groups: docs/internals/shared-read.md. Who comes first to a rendezvous collects what the
others need, until all are there or the deadline has passed, and tells everybody the same. Whoever connects shows a
random token, which only the store of the job has.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from crc32c import crc32c

from bootseer import faults
from bootseer.errors import UnavailableError
from bootseer.hdfs.deadline import Workers

if TYPE_CHECKING:
    from torch.distributed import Store

_log = logging.getLogger(__name__)

JOIN, FETCH = 1, 2
_HELLO = struct.Struct("<16sBI")
"""Token, what is asked, rank of who asks."""
_MESSAGE = struct.Struct("<QI")
"""Length of a message, and its CRC-32C."""
_LONGEST = 1 << 28
"""Most bytes of a message; needs are some bytes for each run of chunks."""
_STRANGER = 5.0
"""Seconds in which who connects must have shown the token."""
_GRACE = 5.0
"""Seconds by which the first rank may have come later than another one thinks."""
_POLL = (0.005, 0.1)
_VIEWS = 512
"""Pieces of memory in one system call; Linux takes 1024."""
_store_calls = Workers("the store of the job")


class Member(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    host: str
    port: int


class Roll(msgspec.Struct, frozen=True):
    """What all ranks plan with. ``needs``: who needs the same, and what that is, encoded."""

    members: list[Member]
    needs: list[tuple[list[int], bytes]]
    bucket: int


class _Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: bytes


class _Joining(msgspec.Struct, frozen=True):
    port: int
    needs: bytes


def send(sock: socket.socket, parts: Sequence[bytes | memoryview], until: float) -> None:
    """Send ``parts``, one after the other. `TimeoutError` when that is not done at ``until`` (monotonic)."""
    left = [memoryview(part) for part in parts]
    while left:
        _limit(sock, socket.SO_SNDTIMEO, until)
        try:
            left = _rest(left, sock.sendmsg(left[:_VIEWS]))
        except BlockingIOError:
            raise TimeoutError("timed out") from None


def receive(sock: socket.socket, parts: Sequence[memoryview], until: float) -> None:
    """Fill ``parts``. `TimeoutError` when that is not done at ``until``, `ConnectionError` when the other side ends."""
    left = list(parts)
    while left:
        _limit(sock, socket.SO_RCVTIMEO, until)
        try:
            count = sock.recvmsg_into(left[:_VIEWS], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not count:
            raise ConnectionResetError("it closed the connection")
        left = _rest(left, count)


def _limit(sock: socket.socket, option: int, until: float) -> None:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1))


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    for number, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[number + 1 :]]
        count -= len(part)
    return []


def _send_message(sock: socket.socket, data: bytes, until: float) -> None:
    send(sock, [_MESSAGE.pack(len(data), crc32c(data)), data], until)


def _receive_message(sock: socket.socket, until: float) -> bytes:
    head = bytearray(_MESSAGE.size)
    receive(sock, [memoryview(head)], until)
    length, crc = _MESSAGE.unpack(head)
    if length > _LONGEST:
        raise ConnectionAbortedError("its message is damaged")
    data = bytearray(length)
    if data:
        receive(sock, [memoryview(data)], until)
    if crc32c(data) != crc:
        raise ConnectionAbortedError("its message is damaged")
    return bytes(data)


def dial(host: str, port: int, token: bytes, what: int, rank: int, until: float) -> socket.socket:
    """A connection to the `Door` of another rank. Raises `OSError`."""
    sock = socket.create_connection((host, port), max(until - time.monotonic(), 0.001))
    try:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(sock, [_HELLO.pack(token, what, rank)], until)
    except BaseException:
        sock.close()
        raise
    return sock


Handler = Callable[[socket.socket, int], None]
"""Called with a connection and the rank at its other end, in a thread of its own. An `OSError` ends the connection."""


class Door:
    """Accepts connections of those who know the token, on one address of this machine. ``close`` ends all of them."""

    def __init__(self, host: str, token: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._token, self._handlers = token, dict[int, Handler]()
        self._lock, self._open = threading.Lock(), True
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []  # of connections, also of some that have ended
        self._thread = threading.Thread(target=self._accept, name="bootseer-door", daemon=True)

    def open(self, handlers: dict[int, Handler]) -> None:
        self._handlers = handlers
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._open:
                    return
                time.sleep(_POLL[1])  # too many open files, or a connection that was gone again
                continue
            thread = threading.Thread(target=self._talk, args=(sock,), name="bootseer-peer", daemon=True)
            with self._lock:
                if not self._open:
                    sock.close()
                    return
                try:
                    thread.start()
                except RuntimeError as exc:  # no more threads
                    _log.warning("a connection to this rank is not answered: %s", exc)
                    sock.close()
                    continue
                self._connections.add(sock)
                self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _talk(self, sock: socket.socket) -> None:
        try:
            hello = bytearray(_HELLO.size)
            receive(sock, [memoryview(hello)], time.monotonic() + _STRANGER)
            token, what, rank = _HELLO.unpack(hello)
            if hmac.compare_digest(token, self._token) and what in self._handlers:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._handlers[what](sock, rank)
        except (OSError, msgspec.MsgspecError) as exc:
            _log.debug("a connection to this rank ended: %s", exc)
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def close(self) -> None:
        with self._lock:
            self._open = False
            talking, threads = list(self._connections), self._threads
        for sock in (self._listener, *talking):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in threads:
            thread.join()
        if self._thread.is_alive():
            self._thread.join()
        self._handlers = {}  # they refer to who has this door: no circle


class Rendezvous:
    """One meeting of the ``size`` ranks of a group, with the ``rank`` of this process; ``key``: a name that it alone
    has in ``store``. ``door`` and ``token`` are there after `join`, and the caller closes the door.
    """

    def __init__(self, store: Store, key: str, rank: int, size: int) -> None:
        self._store, self._key, self._rank, self._size = store, key, rank, size
        self.door: Door | None = None
        self.token = b""
        self._joined: dict[int, tuple[Member, bytes]] = {}
        self._changed = threading.Condition()
        self._told = {rank}
        self._roll, self._over = b"", False

    def join(self, needs: bytes, bucket: int, serve: Handler, deadline: float) -> Roll:
        """Wait ``deadline`` seconds for the other ranks; what those need who came. This rank may not be among them.

        ``serve``: answers the ranks that fetch something here. Raises `OSError`, `UnavailableError`, and errors of the
        store when there is nobody to meet.
        """
        until = time.monotonic() + deadline
        store = self._store
        first = _store_calls.call(lambda: store.add(f"{self._key}/arrivals", 1), deadline) == 1
        faults.point("stripefs.shared.arrived")
        if first:
            self.token = secrets.token_bytes(16)
            host = _store_calls.call(lambda: own_address(store), deadline)
            self.door = Door(host, self.token)
            self.door.open({JOIN: self._welcome, FETCH: serve})
            address = msgspec.msgpack.encode(_Address(self.door.host, self.door.port, self.token)).hex()
            try:
                _store_calls.call(lambda: store.set(f"{self._key}/address", address), deadline)
                return msgspec.msgpack.decode(self._collect(needs, bucket, until), type=Roll)
            finally:  # `_welcome` waits for it, also where another rank has the address and this one has failed
                with self._changed:
                    self._over = True
                    self._changed.notify_all()
        found = bytes.fromhex(self._address(until).decode())
        address_of = msgspec.msgpack.decode(found, type=_Address)
        self.token = address_of.token
        with dial(address_of.host, address_of.port, self.token, JOIN, self._rank, until) as sock:
            self.door = Door(sock.getsockname()[0], self.token)
            self.door.open({FETCH: serve})
            _send_message(sock, msgspec.msgpack.encode(_Joining(self.door.port, needs)), until)
            faults.point("stripefs.shared.joined")
            return msgspec.msgpack.decode(_receive_message(sock, until + _GRACE), type=Roll)

    def _address(self, until: float) -> bytes:
        key, pause = f"{self._key}/address", _POLL[0]
        while not _store_calls.call(lambda: self._store.check([key]), max(until - time.monotonic(), 0.001)):
            if time.monotonic() > until:
                raise UnavailableError("the rank that came first did not say where it is")
            time.sleep(pause)  # not Store.wait: it keeps other threads from the store
            pause = min(2 * pause, _POLL[1])
        found: bytes = _store_calls.call(lambda: self._store.get(key), max(until - time.monotonic(), 1.0))
        return found

    def _collect(self, needs: bytes, bucket: int, until: float) -> bytes:
        assert self.door is not None
        with self._changed:
            self._joined[self._rank] = Member(self._rank, self.door.host, self.door.port), needs
            self._changed.wait_for(lambda: len(self._joined) >= self._size, until - time.monotonic())
            if len(self._joined) < self._size:
                _log.warning("%d of %d ranks came to read together", len(self._joined), self._size)
            same: dict[bytes, list[int]] = {}
            for rank, (_, one) in sorted(self._joined.items()):
                same.setdefault(one, []).append(rank)
            members = [member for _, (member, _) in sorted(self._joined.items())]
            faults.point("stripefs.shared.collected")
            self._roll = msgspec.msgpack.encode(Roll(members, [(ranks, one) for one, ranks in same.items()], bucket))
            self._over = True  # with the lock: who is not on the roll is not welcomed any more
        return self._roll

    def _welcome(self, sock: socket.socket, rank: int) -> None:
        joining = msgspec.msgpack.decode(_receive_message(sock, time.monotonic() + 2 * _STRANGER), type=_Joining)
        with self._changed:
            if not self._over:
                self._joined[rank] = Member(rank, sock.getpeername()[0], joining.port), joining.needs
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._over)  # `join` says so in any case
        try:
            if self._roll:
                _send_message(sock, self._roll, time.monotonic() + 2 * _STRANGER)
        finally:
            with self._changed:
                self._told.add(rank)
                self._changed.notify_all()

    def finish(self) -> None:
        """Before the door is closed: have everybody told who waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._told >= self._joined.keys(), 2 * _STRANGER)


def own_address(store: Store) -> str:
    """The address of this machine at which the other ranks reach it: of the interface in ``GLOO_SOCKET_IFNAME``, or
    else the one from which this machine reaches the job's store."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            packed = fcntl.ioctl(sock.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            return socket.inet_ntoa(packed[20:24])
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host = getattr(inner, "host", "") or socket.gethostname()
    with contextlib.suppress(OSError):
        family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as sock:
            sock.connect(address)  # sends nothing: it asks the routing table
            return str(sock.getsockname()[0])
    return "127.0.0.1"
