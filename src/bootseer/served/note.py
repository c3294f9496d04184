"""A note in shared memory, which one process of a server leaves for the others."""

from __future__ import annotations

import mmap
import struct

_LENGTH = struct.Struct("<I")


class Note:
    """The bytes that were written last; none at first. It has room for a little less than half its memory. Byte 0
    numbers the notes, which are in two places by turns: until a new one is whole the old one is there."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._room = len(memory) // 2 - 2 * _LENGTH.size

    def write(self, data: bytes) -> None:
        if len(data) > self._room:
            raise ValueError(f"a note of {len(data)} bytes is too long")
        number = (self._memory[0] + 1) % 256
        at = self._place(number)
        _LENGTH.pack_into(self._memory, at - _LENGTH.size, len(data))
        self._memory[at : at + len(data)] = data
        self._memory[0] = number

    def read(self) -> bytes:
        while True:
            number = self._memory[0]
            at = self._place(number)
            (length,) = _LENGTH.unpack_from(self._memory, at - _LENGTH.size)
            data = self._memory[at : at + length]
            if self._memory[0] == number:  # else it was replaced, and the next may be written in its place
                return data

    def _place(self, number: int) -> int:
        """Where the bytes of a note are; its length is before them."""
        return 2 * _LENGTH.size + number % 2 * (_LENGTH.size + self._room)
