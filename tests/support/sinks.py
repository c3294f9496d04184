"""Data devices of EROFS images, for tests: kept in memory, or by nobody."""

from __future__ import annotations

from bootseer.erofs import Buffer


class Memory:
    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def position(self) -> int:
        return len(self.data)

    def write(self, data: Buffer, /) -> None:
        self.data += data

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


class Nowhere:
    def __init__(self) -> None:
        self.position = 0

    def write(self, data: Buffer, /) -> None:
        self.position += len(data)
