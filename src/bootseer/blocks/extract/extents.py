"""`Shares`: which files have bytes in a block of a tree's data, also where files share data in any way."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate

Share = tuple[int, int, int, int]
"""Offset in the data, number of the file, offset in the file, length (over 0)."""


class Shares:
    """The extents of all files, by block. Takes 24 bytes per extent and 8 per block that it lies in, so a caller bounds
    the sum of lengths; no look-up costs more than the extents in the blocks asked for."""

    def __init__(self, shift: int, count: int, extents: Iterable[Share] = ()) -> None:
        """Of data of ``count`` blocks of ``1 << shift`` bytes; no extent leads out of it."""
        self._shift = shift
        self._starts = array("Q")
        self._lengths = array("Q")
        self._owners = array("Q")
        self._inner = array("Q")
        counts = array("Q", bytes(8 * count))
        for start, number, inner, length in sorted(extents):
            self._starts.append(start)
            self._lengths.append(length)
            self._owners.append(number)
            self._inner.append(inner)
            for block in self._blocks(start, length):
                counts[block] += 1
        # the extents of block b are `_of_block[_first[b] : _first[b + 1]]`
        self._first = array("Q", [0, *accumulate(counts)])
        self._of_block = array("Q", bytes(8 * self._first[-1]))
        fill = self._first[:]
        for index, (start, length) in enumerate(zip(self._starts, self._lengths, strict=True)):
            for block in self._blocks(start, length):
                self._of_block[fill[block]] = index
                fill[block] += 1

    def _blocks(self, start: int, length: int) -> range:
        return range(start >> self._shift, ((start + length - 1) >> self._shift) + 1)

    def needed(self) -> bytearray:
        """1 for each block that files have bytes in, else 0."""
        return bytearray(before < after for before, after in zip(self._first, self._first[1:], strict=False))

    def overlaps(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(file, offset in it, start, end) of what files have between ``start`` and ``end`` of the data; all of an
        extent's part at once."""
        top = start >> self._shift
        for block in self._blocks(start, end - start):
            for index in self._of_block[self._first[block] : self._first[block + 1]]:
                begin = self._starts[index]
                if block > top and begin >> self._shift < block:
                    continue  # seen with the block before
                low, high = max(start, begin), min(end, begin + self._lengths[index])
                if low < high:
                    yield self._owners[index], self._inner[index] + low - begin, low, high
