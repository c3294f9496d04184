"""Where the bytes of a file lie in the data of an image (`Extent`), and whose a range of it is (`ExtentIndex`)."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Extent(NamedTuple):
    """``length`` bytes of a file from ``file_offset`` on, at ``data_offset`` of the data."""

    file_offset: int
    data_offset: int
    length: int


class ExtentIndex:
    """Which file each part of the data is of. Every byte counts for one file: where several have it (``mkfs.erofs``
    stores equal chunks once), for the one added first. Padding belongs to nobody and is in no answer."""

    def __init__(self, files: Iterable[tuple[bytes, Iterable[tuple[int, int]]]]) -> None:
        """``files``: each with its (offset, length) ranges. Takes n log n for n ranges, however they lie."""
        self.paths: list[bytes] = []
        self._starts = array("Q")
        self._ends = array("Q")
        self._files = array("L")
        added: list[tuple[int, int, int]] = []
        for path, ranges in files:
            added += ((offset, len(self.paths), offset + length) for offset, length in ranges if length > 0)
            self.paths.append(path)
        active: list[tuple[int, int]] = []
        at = 0
        for start, file, end in [*sorted(added), (1 << 64, 0, 0)]:
            # Up to where this range begins, each stretch goes to the active file that was added first.
            while active and at < start:
                owner, until = active[0]
                if until <= at:
                    heapq.heappop(active)
                    continue
                self._put(at, min(until, start), owner)
                at = min(until, start)
            at = start
            heapq.heappush(active, (file, end))

    def _put(self, start: int, end: int, file: int) -> None:
        if self._ends and self._ends[-1] == start and self._files[-1] == file:
            self._ends[-1] = end
            return
        self._starts.append(start)
        self._ends.append(end)
        self._files.append(file)

    def files(self, offset: int, length: int) -> list[tuple[bytes, int]]:
        """Files in ``length`` bytes from ``offset`` on, each once, and how many of these bytes are theirs."""
        stop = offset + length
        found: dict[bytes, int] = {}
        for index in range(max(0, bisect_right(self._starts, offset) - 1), len(self._starts)):
            start, end = max(offset, self._starts[index]), min(stop, self._ends[index])
            if start >= stop:
                break
            if start < end:
                path = self.paths[self._files[index]]
                found[path] = found.get(path, 0) + end - start
        return list(found.items())

    def sizes(self) -> dict[bytes, int]:
        """Bytes of the data that count for each file."""
        found: dict[bytes, int] = {}
        for start, end, file in zip(self._starts, self._ends, self._files, strict=True):
            found[self.paths[file]] = found.get(self.paths[file], 0) + end - start
        return found
