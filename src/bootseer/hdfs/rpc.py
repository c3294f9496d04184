"""Hadoop RPC, version 9, without security: frames, and one connection.

    connection: "hrpc" 09 00 00 | frame(header, context) | frame(header, method, request) ...
    frame:      length as 4 bytes, big-endian | messages, each behind its length as a varint
    answer:     frame(answer header, answer)

`bootseer.hdfs.channel` makes calls of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from bootseer import faults
from bootseer.errors import DataError
from bootseer.hdfs.dial import left
from bootseer.hdfs.errors import RemoteError, SaslRequired
from bootseer.hdfs.proto import hdfs_pb2 as wire

M = TypeVar("M", bound=Message)

LIMIT = 128 << 20
"""The longest answer in bytes; Hadoop's own client has the same limit (``ipc.maximum.response.length``)."""

HELLO = b"hrpc\x09\x00\x00"
"""Magic, version, service class, and 0 for "no SASL"."""

CONTEXT_CALL, _SASL_CALL = -3, -33
_IDLE = 60.0  # s: firewalls forget connections that were silent for minutes


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


def parse(kind: type[M], data: memoryview | bytes) -> M:
    """The message in ``data``; `DataError` when it is none."""
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
    header = parse(wire.RpcResponseHeader, head)
    answered = header.call_id - (1 << 32) if header.call_id >> 31 else header.call_id
    if answered == _SASL_CALL:
        wanted = parse(wire.RpcSasl, _take(view, end)[0])
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


class Connection:
    """One call at a time. After any exception but a `RemoteError` that is not fatal it must be closed."""

    def __init__(self, sock: socket.socket, greeting: bytes) -> None:
        """``greeting`` goes before the first request: `HELLO` and the connection context."""
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
        """Send a frame, receive the answer. `OSError` when connection or time end; else as `parse_answer`."""
        self._sock.settimeout(left(until))
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
            self._sock.settimeout(left(until))
            part = self._sock.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionResetError("the connection was closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()
