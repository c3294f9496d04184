"""Numbers of blocks or units as runs of consecutive ones; ranges of bytes that touch, merged; buffers as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def flat(data: ReadableBuffer) -> memoryview:
    """The bytes of ``data``. An array of no elements has no view of them."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


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
