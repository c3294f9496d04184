"""Neighbours among numbers of blocks or units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """``numbers``, which are all different, as (first, count) of consecutive ones, ascending."""
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        neighbours = [number for _, number in run]
        yield neighbours[0], len(neighbours)
