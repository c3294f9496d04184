"""From the traces of several starts to one hot list, and how well a hot list foretold a start."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.trace import UNIT, Trace

_RARE = 8


def blocks_of(trace: Trace, blocks: BlockMap) -> dict[int, int]:
    """Block -> milliseconds of its first touch."""
    first: dict[int, int] = {}
    for touch in trace.touches:
        low = touch.unit * UNIT >> blocks.shift
        high = ((touch.unit + touch.count) * UNIT - 1) >> blocks.shift
        for block in range(low, min(high, blocks.count - 1) + 1):
            first.setdefault(block, touch.ms)
    return first


def select(traces: Sequence[Trace]) -> list[Trace]:
    """The traces that count: the complete ones, or all where there is no complete one."""
    return [trace for trace in traces if trace.complete] or list(traces)


def merge(traces: Sequence[Trace], blocks: BlockMap) -> list[int]:
    """The hot list: blocks in the order to fetch them.

    A block's score is the share of runs that touched it, its place the median of its first touches; blocks that fewer
    than half of the runs touched come after the others, and of many runs what hardly any touched is left out. Which
    traces count: `select`.
    """
    times: dict[int, list[int]] = {}
    used = select(traces)
    for trace in used:
        for block, ms in blocks_of(trace, blocks).items():
            times.setdefault(block, []).append(ms)
    ranked = sorted(
        (2 * len(seen) < len(used), statistics.median(seen), order, block)
        for order, (block, seen) in enumerate(times.items())
        if len(seen) * _RARE >= len(used)
    )
    return [block for _, _, _, block in ranked]


class HotUse(msgspec.Struct, frozen=True):
    """How well a hot list foretold a start: blocks and stored bytes fetched ahead, of these never touched (waste), and
    touched though not in the list (misses)."""

    blocks: int = 0
    bytes: int = 0
    unused_blocks: int = 0
    unused_bytes: int = 0
    missed_blocks: int = 0
    missed_bytes: int = 0


def hot_use(order: Iterable[int], trace: Trace, blocks: BlockMap) -> HotUse:
    """Compare the hot list ``order`` with what the recorded start touched."""
    hot = {block for block in order if not blocks.is_zero(block)}
    touched = {block for block in blocks_of(trace, blocks) if not blocks.is_zero(block)}
    unused, missed = hot - touched, touched - hot
    sizes = (sum(blocks.lengths[block] for block in some) for some in (hot, unused, missed))
    hot_bytes, unused_bytes, missed_bytes = sizes
    return HotUse(len(hot), hot_bytes, len(unused), unused_bytes, len(missed), missed_bytes)
