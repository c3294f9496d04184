"""From the traces of several starts to one hot list, and how well a hot list foretold a start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.chunks.blockmap import BlockMap

RARE = 1 / 8
"""Blocks that a smaller share of the runs touched are left out."""


def blocks_of(trace: Trace, blocks: BlockMap) -> dict[int, int]:
    """Block -> milliseconds of its first touch."""
    first: dict[int, int] = {}
    for touch in trace.touches:
        low = touch.unit * UNIT >> blocks.shift
        high = ((touch.unit + touch.count) * UNIT - 1) >> blocks.shift
        for block in range(low, min(high, blocks.count - 1) + 1):
            first.setdefault(block, touch.ms)
    return first


def units_of(trace: Trace) -> dict[int, int]:
    """Unit of 4 KiB -> milliseconds of its first touch."""
    return {unit: touch.ms for touch in trace.touches for unit in range(touch.unit, touch.unit + touch.count)}


def select(traces: Sequence[Trace]) -> list[Trace]:
    """The traces that count: the complete ones, or all where there is no complete one."""
    return [trace for trace in traces if trace.complete] or list(traces)


def merge(traces: Sequence[Trace], blocks: BlockMap) -> list[int]:
    """The hot list: blocks in the order to fetch them. Which traces count: `select`; the order: `in_order`."""
    return in_order([blocks_of(trace, blocks) for trace in select(traces)], RARE)


def in_order(runs: Sequence[Mapping[int, int]], least: float) -> list[int]:
    """What at least the share ``least`` of the ``runs`` (item -> time of its first touch) touched, by the median of the
    first touches; what fewer than half of them touched comes after the rest."""
    import statistics  # which loads fractions and random

    times: dict[int, list[int]] = {}
    for run in runs:
        for item, ms in run.items():
            times.setdefault(item, []).append(ms)
    ranked = sorted(
        (2 * len(seen) < len(runs), statistics.median(seen), order, item)
        for order, (item, seen) in enumerate(times.items())
        if len(seen) >= least * len(runs)
    )
    return [item for _, _, _, item in ranked]


class HotUse(msgspec.Struct, frozen=True):
    """How well a hot list foretold a start: stored bytes fetched ahead and never touched (waste), and of blocks touched
    though not in the list (misses)."""

    unused_bytes: int = 0
    missed_bytes: int = 0


def hot_use(order: Iterable[int], trace: Trace, blocks: BlockMap) -> HotUse:
    """Compare the hot list ``order`` with what the recorded start touched."""
    hot, touched = set(order), set(blocks_of(trace, blocks))
    return HotUse(*(sum(blocks.lengths[block] for block in some) for some in (hot - touched, touched - hot)))
