"""Messages on a stream to a DataNode, as Hadoop's data transfer protocol, version 28, delimits them."""

from __future__ import annotations

import struct

VERSION = 28
READ_BLOCK = 81


def operation(number: int, message: bytes) -> bytes:
    """The bytes that begin the operation ``number``."""
    return struct.pack(">HB", VERSION, number) + delimited(message)


def delimited(message: bytes) -> bytes:
    """``message`` after its length."""
    length, prefix = len(message), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + message


def prefix(raw: bytes) -> tuple[int, int] | None:
    """(bytes that the length takes, length) at the beginning of ``raw``; None when more bytes are needed.

    `ValueError` when no length begins so.
    """
    value = 0
    for i, byte in enumerate(raw[:5]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return i + 1, value
    if len(raw) >= 5:
        raise ValueError("no length")
    return None
