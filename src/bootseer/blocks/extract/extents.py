"""`Shares`: which files have bytes in a block of a tree's data, also where files share data in any way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

_File = TypeVar("_File")


class Shares(Generic[_File]):
    """From the number of a block to the extents of files that need it. An extent takes memory for each block that it
    lies in, so a caller bounds the sum of lengths; no look-up costs more than the extents in the blocks asked for."""

    def __init__(self, shift: int, extents: Iterable[tuple[int, _File, int, int]] = ()) -> None:
        """Blocks have ``1 << shift`` bytes; ``extents``: offset in the data, file, offset in it, length (over 0)."""
        self._shift = shift
        self._of_block: dict[int, list[tuple[int, _File, int, int]]] = {}
        for extent in extents:
            for block in self._blocks(extent[0], extent[3]):
                self._of_block.setdefault(block, []).append(extent)

    def _blocks(self, start: int, length: int) -> range:
        return range(start >> self._shift, ((start + length - 1) >> self._shift) + 1)

    def needed(self) -> list[int]:
        """The blocks that files have bytes in, ascending."""
        return sorted(self._of_block)

    def overlaps(self, start: int, end: int) -> Iterator[tuple[_File, int, int, int]]:
        """(file, offset in it, start, end) of what files have between ``start`` and ``end`` of the data, an extent's
        all at once."""
        top = start >> self._shift
        for block in self._blocks(start, end - start):
            for begin, file, inner, length in self._of_block.get(block, ()):
                if block > top and begin >> self._shift < block:
                    continue  # seen with the block before
                low, high = max(start, begin), min(end, begin + length)
                if low < high:
                    yield file, inner + low - begin, low, high
