"""Sets of time as sorted, disjoint, half-open intervals of integer nanoseconds, so that sums are exact."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
Intervals = list[Interval]


def union(parts: Iterable[Interval]) -> Intervals:
    """The set covered by ``parts`` in any order; empty and backward intervals cover nothing."""
    ordered = sorted(parts)
    if len(ordered) == 1 and ordered[0][0] < ordered[0][1]:
        return ordered
    result: Intervals = []
    for begin, end in ordered:
        if end <= begin:
            continue
        if result and begin <= result[-1][1]:
            if end > result[-1][1]:
                result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result


def subtract(minuend: Intervals, subtrahend: Intervals) -> Intervals:
    """What of ``minuend`` is not in ``subtrahend``; both as `union` returns them."""
    if not subtrahend or not minuend:
        return minuend
    result: Intervals = []
    index = 0
    for begin, end in minuend:
        while index < len(subtrahend) and subtrahend[index][1] <= begin:
            index += 1
        at = index
        while at < len(subtrahend) and subtrahend[at][0] < end:
            if subtrahend[at][0] > begin:
                result.append((begin, subtrahend[at][0]))
            begin = max(begin, subtrahend[at][1])
            at += 1
        if begin < end:
            result.append((begin, end))
    return result


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """What lies in both; both as `union` returns them."""
    return subtract(one, subtract(one, other)) if other else []


def clip(parts: Intervals, begin: int, end: int) -> Intervals:
    """What of ``parts`` lies in [begin, end)."""
    return [(max(a, begin), min(b, end)) for a, b in parts if a < end and b > begin]


def measure(parts: Intervals) -> int:
    """Nanoseconds covered."""
    total = 0
    for begin, end in parts:
        total += end - begin
    return total
