"""What starts of one tree foretell of a start of another, such as the next build of an image. No I/O."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.blocks.formats.trace import MAX_TOUCHES, UNIT, Touch, Trace
from bootseer.blocks.profiles.layout import Part
from bootseer.blocks.profiles.merge import RARE, in_order, select, units_of
from bootseer.chunks.blockmap import BlockMap

_NUMBERS = re.compile(rb"[0-9]+([._][0-9]+)*")


class Side(NamedTuple):
    """A tree: its digest, block map and the parts of its files, ascending."""

    tree: str
    map: BlockMap
    parts: Sequence[Part]


class Prediction(NamedTuple):
    """A trace that nobody recorded, and which share of what the starts touched has a place in the new tree."""

    trace: Trace
    share: float


def predict(traces: Sequence[Trace], old: Side, new: Side, *, began: int) -> Prediction:
    """The trace of a start of ``new`` that reads the files which the starts ``traces`` of ``old`` read, in their order.

    A unit of a file is that of the file of the same path; else of the only file whose path differs in its numbers alone
    (``torch-2.6.0.dist-info``, ``python3.11``), or whose name is the same besides; else that with the same content.
    Each foretells one unit at most. It is incomplete: any recorded start takes its place. ``began``: its Unix time."""
    runs = [units_of(trace) for trace in select(traces)]
    order = in_order(runs, RARE)
    places = _Places(old, new)
    first: dict[int, int] = {}
    for run in runs:
        for unit, ms in run.items():
            first[unit] = min(ms, first.get(unit, ms))
    touches: list[Touch] = []
    taken: set[int] = set()
    clock = 0
    for unit in order:
        place = places.of(unit)
        if place is None or place in taken:
            continue
        taken.add(place)
        clock = max(clock, first[unit])
        last = touches[-1] if touches else None
        if last is not None and (last.ms, last.unit + last.count) == (clock, place):
            touches[-1] = Touch(clock, 0, last.unit, last.count + 1)
        elif len(touches) < MAX_TOUCHES:
            touches.append(Touch(clock, 0, place, 1))
    source = traces[0].source or old.tree
    made = Trace(new.tree, new.map.size, began, False, tuple(touches), source=source)
    return Prediction(made, len(taken) / len(order) if order else 0.0)


class _Places:
    """Where units of ``old`` are in ``new``."""

    def __init__(self, old: Side, new: Side) -> None:
        self._old, self._new = old, new
        self._starts = [part.unit for part in old.parts]
        self._files: dict[bytes, list[Part]] = {}
        for part in new.parts:
            self._files.setdefault(part.path, []).append(part)
        self._alike: dict[bytes, list[bytes]] = {}
        for path in self._files:
            self._alike.setdefault(_NUMBERS.sub(b"#", path), []).append(path)
        self._blocks: dict[bytes, int] | None = None

    def of(self, unit: int) -> int | None:
        """The unit of the new tree that ``unit`` of the old one foretells."""
        index = bisect_right(self._starts, unit) - 1
        part = self._old.parts[index] if index >= 0 else None
        if part is None or unit >= part.unit + part.units:
            return None  # padding, which readahead brought
        path = self._path(part.path)
        found = self._same_content(unit) if path is None else self._in_file(path, part.offset + unit - part.unit)
        return None if found is None or self._new.map.is_zero(found * UNIT >> self._new.map.shift) else found

    def _path(self, path: bytes) -> bytes | None:
        if path in self._files:
            return path
        alike = self._alike.get(_NUMBERS.sub(b"#", path), [])
        if len(alike) > 1:
            name = path.rpartition(b"/")[2]
            alike = [one for one in alike if one.rpartition(b"/")[2] == name]
        return alike[0] if len(alike) == 1 else None

    def _in_file(self, path: bytes, at: int) -> int | None:
        for part in self._files[path]:
            if part.offset <= at < part.offset + part.units:
                return part.unit + at - part.offset
        return None

    def _same_content(self, unit: int) -> int | None:
        old, new = self._old.map, self._new.map
        if old.shift != new.shift:
            return None
        if self._blocks is None:
            self._blocks = {new.hash_of(block): block for block in reversed(range(new.count))}
        block, rest = divmod(unit, old.block_size // UNIT)
        there = self._blocks.get(old.hash_of(block))
        return None if there is None else there * (new.block_size // UNIT) + rest
