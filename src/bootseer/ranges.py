"""Turns numbers of blocks or units into runs of consecutive ones; merges ranges of bytes that touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """``numbers``, which are all different, as (first, count) of consecutive ones, ascending."""
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        neighbours = [number for _, number in run]
        yield neighbours[0], len(neighbours)


def merge(ranges: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """``ranges`` (start, end) in order, those that overlap or are at most ``gap`` apart as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
