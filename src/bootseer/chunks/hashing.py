"""BLAKE3-256, the one hash of this package."""

from __future__ import annotations

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
    state = blake3()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            state.update(piece)
    return state.hexdigest()


def is_hexdigest(text: str) -> bool:
    return len(text) == 2 * SIZE and all(char in "0123456789abcdef" for char in text)
