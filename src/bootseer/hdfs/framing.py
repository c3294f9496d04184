"""Messages as Hadoop's protocols delimit them: each behind its length as a varint."""

from __future__ import annotations

import contextlib
import struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from bootseer.errors import DataError

M = TypeVar("M", bound=Message)

VERSION = 28
"""Of the data transfer protocol."""

WRITE_BLOCK, READ_BLOCK, TRANSFER_BLOCK = 80, 81, 86

SUCCESS, BAD_TOKEN, CHECKSUM_OK = 0, 5, 6
_STATUS = {1: "error", 2: "checksum error", 3: "invalid", 4: "exists already", 5: "token refused", 8: "restarting"}


def delimited(message: Message) -> bytes:
    """The message behind its length."""
    raw = message.SerializeToString()
    length, head = len(raw), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head + raw)


def locate(raw: bytes | bytearray | memoryview, start: int = 0) -> tuple[int, int] | None:
    """Where the message behind the length at ``start`` begins and ends, perhaps behind the end of ``raw``; None when
    more bytes are needed to tell. `ValueError` when no length begins so."""
    length = 0
    for i, byte in enumerate(raw[start : start + 5]):
        length |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            begin = start + i + 1
            return begin, begin + length
    if len(raw) - start >= 5:
        raise ValueError("a length of more than 5 bytes")
    return None


def operation(number: int, message: Message) -> bytes:
    """What a client sends to a DataNode to begin the operation ``number``."""
    return struct.pack(">HB", VERSION, number) + delimited(message)


def status_text(status: int) -> str:
    """What a DataNode's ``status`` means."""
    return _STATUS.get(status, f"status {status}")


def frame(*messages: Message) -> bytes:
    """The messages, each behind its length, behind the length of all."""
    body = b"".join(map(delimited, messages))
    return struct.pack(">I", len(body)) + body


def take(data: memoryview, start: int) -> tuple[memoryview, int]:
    """The message of the frame ``data`` whose length is at ``start``, and where the next one begins."""
    with contextlib.suppress(ValueError):
        if (found := locate(data, start)) and found[1] <= len(data):
            return data[slice(*found)], found[1]
    raise DataError(f"an RPC answer of {len(data)} bytes is torn at byte {start}")


def text(value: object) -> str:
    """A field that should be text: protobuf gives bytes for what is not UTF-8."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def line(value: object) -> str:
    """What another side said, for a message of one line."""
    return " ".join(text(value).split())[:300]


def parse(kind: type[M], data: memoryview | bytes) -> M:
    """The message in ``data``; `DataError` when it is none, or lacks what one must have."""
    message = kind()
    try:
        message.ParseFromString(bytes(data))
    except (DecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"an RPC answer is no {kind.__name__}: {exc}") from None
    if not message.IsInitialized():
        raise DataError(f"an RPC answer is no {kind.__name__}: it lacks what one must have")
    return message
