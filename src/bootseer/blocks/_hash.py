"""BLAKE3-256, the one hash of this package."""

from __future__ import annotations

import hashlib
from pathlib import Path

from blake3 import blake3

SIZE = 32
"""Bytes in a digest; twice as many hexadecimal digits."""

Buffer = bytes | bytearray | memoryview

hasher = blake3


def digest(data: Buffer) -> bytes:
    return blake3(data).digest()


def hexdigest(data: Buffer) -> str:
    return blake3(data).hexdigest()


def file_hexdigest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, hasher).hexdigest()


def is_hexdigest(text: str) -> bool:
    return len(text) == 2 * SIZE and all(char in "0123456789abcdef" for char in text)
