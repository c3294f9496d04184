"""Hadoop RPC, version 9, without security: calls with deadlines over a few kept-alive connections.

    connection: "hrpc" 09 00 00 | frame(header, context) | frame(header, method, request) ...
    frame:      length as 4 bytes, big-endian | messages, each behind its length as a varint
    answer:     frame(answer header, answer)

The NameNode recognises a repeated call by its client id and call id, and answers it from its *retry cache* instead of
doing it again (kept for 10 minutes, and over a restart). So a call that got no answer is sent again under the same ids
until its deadline, whether it changes anything or not: every call of the NameNode's client protocol that this project
makes is either idempotent or guarded by that cache (``dfs.namenode.enable.retrycache``, on unless a site turns it off).

Concurrency: any thread may call; a call has a connection for itself, and its own thread reads the answer. More calls
than `CONNECTIONS` wait for one another. A forked child begins with no connections and a client id of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import socket
import struct
import threading
import time
import uuid
import weakref
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from bootseer import faults
from bootseer.errors import DataError, UnavailableError
from bootseer.hdfs.deadline import Workers
from bootseer.hdfs.errors import REACH, RemoteError, SaslRequired, remote
from bootseer.hdfs.proto import hdfs_pb2 as wire

M = TypeVar("M", bound=Message)

CONNECTIONS = 8
"""Calls that one process has under way at one NameNode."""

FIRST_CONTACT = 2.0
"""Seconds of trying a server that never answered this process: a wrong name or port should fail soon."""

LIMIT = 128 << 20
"""The longest answer in bytes; Hadoop's own client has the same limit (``ipc.maximum.response.length``)."""

_HELLO = b"hrpc\x09\x00\x00"  # magic, version, service class, no SASL
_CONTEXT_CALL, _SASL_CALL = -3, -33
_SILENT = 5_000  # ms until bytes that a dead network swallows end a connection (TCP_USER_TIMEOUT)
_IDLE = 60.0  # s: firewalls forget connections that were silent for minutes

_log = logging.getLogger(__name__)
_workers = Workers()
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget() -> None:
    for channel in list(_channels):
        channel.forget()


def _close() -> None:
    for channel in list(_channels):
        channel.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close)


# -- frames -----------------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def frame(*messages: Message) -> bytes:
    """The messages, each behind its length, behind the length of all."""
    parts = []
    for message in messages:
        data = message.SerializeToString()
        parts += [_varint(len(data)), data]
    body = b"".join(parts)
    return struct.pack(">I", len(body)) + body


def _take(data: memoryview, start: int) -> tuple[memoryview, int]:
    """The length-prefixed piece of ``data`` that begins at ``start``, and where the next one begins."""
    length = 0
    for i, byte in enumerate(data[start : start + 5]):
        length |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            begin = start + i + 1
            if begin + length > len(data):
                break
            return data[begin : begin + length], begin + length
    raise DataError(f"an RPC answer of {len(data)} bytes is torn at byte {start}")


def _parse(kind: type[M], data: memoryview | bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(bytes(data))
    except (DecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"an RPC answer is no {kind.__name__}: {exc}") from None
    return message


def _text(value: object) -> str:
    """A field that should be text: protobuf gives bytes for what is not UTF-8."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def parse_answer(data: bytes, call_id: int) -> memoryview:
    """The answer to call ``call_id`` in ``data``, a frame without its length.

    Raises `RemoteError` for an exception of the server, `SaslRequired` when it wants authentication, `DataError` for
    anything that is not an answer to this call.
    """
    view = memoryview(data)
    head, end = _take(view, 0)
    header = _parse(wire.RpcResponseHeader, head)
    answered = header.call_id - (1 << 32) if header.call_id >> 31 else header.call_id
    if answered == _SASL_CALL:
        wanted = _parse(wire.RpcSasl, _take(view, end)[0])
        raise SaslRequired(", ".join(sorted({_text(auth.method) for auth in wanted.auths})) or "SASL")
    if header.status:
        java, text = _text(header.exception), _text(header.message)
        if "SIMPLE authentication is not enabled" in text:
            raise SaslRequired(text.partition("Available:")[2].strip("[] \n") or "SASL")
        if header.status == 2 or answered == call_id:
            raise RemoteError(java, text, fatal=header.status == 2)
    if answered != call_id:
        raise DataError(f"an RPC answer is for call {answered}, not {call_id}")
    body, end = _take(view, end)
    if end != len(view):
        raise DataError(f"an RPC answer has {len(view) - end} bytes too many")
    return body


# -- one connection ---------------------------------------------------------------------------------------------------


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _dial(host: str, port: int, until: float) -> socket.socket:
    """A connection to the first address of ``host`` that takes it. Looking the name up has the deadline, too."""
    flags = socket.AI_NUMERICHOST
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        found = _workers.call(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), _left(until))
    problem: OSError = ConnectionError(f"{host} has no address")
    for i, (family, kind, protocol, _, address) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(until) / (len(found) - i))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT)
            return sock
        except OSError as exc:
            sock.close()
            problem = exc
    raise problem


class _Connection:
    """One call at a time. After any exception but a `RemoteError` that is not fatal it must be closed."""

    def __init__(self, sock: socket.socket, greeting: bytes) -> None:
        self._sock, self._greeting = sock, greeting
        self._used = time.monotonic()

    def usable(self) -> bool:
        """Neither silent for long nor closed by the server, as far as can be told without sending."""
        if time.monotonic() - self._used > _IDLE:
            return False
        try:
            self._sock.settimeout(0)  # with any other, Python waits for bytes first, whatever the flags say
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # its end, or bytes that nobody asked for

    def exchange(self, request: bytes, call_id: int, until: float) -> memoryview:
        self._sock.settimeout(_left(until))
        self._sock.sendall(self._greeting + request)
        self._greeting = b""
        faults.point("hdfs.rpc.sent")
        length = int.from_bytes(self._receive(4, until), "big")
        if length > LIMIT:
            raise DataError(f"not Hadoop RPC: an answer that claims {length} bytes")
        data = self._receive(length, until)
        faults.point("hdfs.rpc.answered")
        answer = parse_answer(data, call_id)
        self._used = time.monotonic()
        return answer

    def _receive(self, length: int, until: float) -> bytes:
        parts, missing = [], length
        while missing:
            self._sock.settimeout(_left(until))
            part = self._sock.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionResetError("the connection was closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


# -- calls ------------------------------------------------------------------------------------------------------------


class Channel:
    """Calls of one protocol at one server as one user. ``name`` is how messages call it: ``hdfs://host:port``."""

    def __init__(
        self, host: str, port: int, protocol: str, *, version: int = 1, user: str, real_user: str = ""
    ) -> None:
        self.name = f"hdfs://{f'[{host}]' if ':' in host else host}:{port}"
        self._host, self._port = host, port
        self._protocol, self._version = protocol, version
        self._user, self._real_user = user, real_user
        self._reached = self._down = False
        self.forget()
        _channels.add(self)

    def forget(self) -> None:
        """Begin anew, as another client: nothing of a forked child's parent may be used by both."""
        for connection in getattr(self, "_idle", []):
            connection.close()  # this process's copy of the descriptor
        self._idle: list[_Connection] = []
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._client_id = uuid.uuid4().bytes
        self._last_call = 0

    def close(self) -> None:
        """Close the connections that no call uses; calls go on working."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def call(self, method: str, request: Message, answer: type[M], doing: str, *, deadline: float) -> M:
        """Call ``method``; ``doing`` is a phrase such as ``"create /a"``.

        Tries again while the server cannot be reached, restarts, is in safe mode or not active, for ``deadline``
        seconds. Raises what `bootseer.hdfs.errors.remote` makes of the server's exception, `UnavailableError` when the
        time is over (the operation may have happened all the same), `DataError` for an answer that makes no sense.
        """
        began = time.monotonic()
        until = began + deadline
        with self._lock:
            self._last_call = call_id = self._last_call % 0x7FFFFFFF + 1
        head = wire.MethodHeader(method=method, protocol=self._protocol, version=self._version)
        where = f"{doing} on {self.name}"
        attempt = 0
        while True:
            try:
                packed = frame(self._header(call_id, attempt), head, request)
                found = _parse(answer, self._attempt(packed, call_id, until))
                self._note("")
                return found
            except RemoteError as exc:
                self._reached = True
                if not exc.passing:
                    raise remote(exc, where) from exc
                problem: Exception = exc
            except DataError as exc:
                raise DataError(f"cannot {where}: {exc.message}", hint="is this the RPC port of a NameNode?") from None
            except OSError as exc:
                problem = exc
                if not self._reached:
                    until = min(until, began + FIRST_CONTACT)
            pause = min(0.05 * 2**attempt, 1.0) * random.uniform(0.5, 1.0)
            attempt += 1
            if time.monotonic() + pause >= until:
                raise self._late(where, problem, time.monotonic() - began) from problem
            self._note(f"{type(problem).__name__}: {problem}")
            time.sleep(pause)

    def _late(self, where: str, problem: Exception, seconds: float) -> Exception:
        if isinstance(problem, RemoteError):
            return remote(problem, where)
        what = (getattr(problem, "strerror", None) or str(problem)).lower()
        return UnavailableError(f"cannot {where}: {what} (tried for {seconds:.1f} s)", hint=REACH)

    def _note(self, problem: str) -> None:
        """One log line when trouble begins, one when it is over."""
        if problem and not self._down:
            self._down = True
            _log.warning("%s does not answer (%s); trying again", self.name, problem)
        elif not problem:
            self._reached = True
            if self._down:
                self._down = False
                _log.warning("%s answers again", self.name)

    def _header(self, call_id: int, attempt: int) -> wire.RpcRequestHeader:
        return wire.RpcRequestHeader(
            rpc_kind=2, rpc_op=0, call_id=call_id, client_id=self._client_id, retry_count=attempt
        )

    def _attempt(self, packed: bytes, call_id: int, until: float) -> memoryview:
        slots = self._slots
        if not slots.acquire(timeout=_left(until)):
            raise TimeoutError(f"{CONNECTIONS} other calls are under way")
        try:
            connection = self._connection(until)
            keep = False
            try:
                answer = connection.exchange(packed, call_id, until)
                keep = True
                return answer
            except RemoteError as exc:
                keep = not exc.fatal
                raise
            finally:
                self._give_back(connection, keep)
        finally:
            slots.release()

    def _connection(self, until: float) -> _Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if connection.usable():
                return connection
            connection.close()
        context = wire.ConnectionContext(
            user=wire.ConnectionContext.User(effective=self._user, real=self._real_user or None),
            protocol=self._protocol,
        )
        return _Connection(
            _dial(self._host, self._port, until), _HELLO + frame(self._header(_CONTEXT_CALL, -1), context)
        )

    def _give_back(self, connection: _Connection, keep: bool) -> None:
        if keep:
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()
