"""One time axis for a job: each node's monotonic clock, moved to wall time once per boot. Within a node, order and
distance come from the monotonic clock, so a wall clock that is set during start-up moves nothing. Across nodes the axis
is only as good as the nodes' wall clocks, but for what `Axis.align` can prove."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from statistics import median_low

from bootseer.profile.events import Spans, Stamps, numbers

RENDEZVOUS = ("dist_init", "first_step")
"""Stages that begin with a collective operation: whoever arrives early waits inside."""
TOLERANCE_NS = 250_000_000
"""Nodes' wall clocks agree to about this (NTP); a node that goes on this much too early has still waited."""
_SCHEDULER = ("queue", "alloc")
"""Stages whose times are of the scheduler's clock, whichever node they are of."""
_SECOND = 1_000_000_000
_NEVER = 1 << 63


class Axis:
    """Places the stamps of ``spans`` on wall time (ns since 1970)."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        seen: dict[tuple[str, str], dict[tuple[bool, int], array[int]]] = defaultdict(lambda: defaultdict(numbers))
        for stamps in (spans.begin, spans.end):
            for lane, wall, mono, (boot, res) in zip(spans.lane, stamps.wall, stamps.mono, stamps.clock, strict=True):
                if mono >= 0 and boot:
                    seen[lane.node, boot][wall % _SECOND > 0, res].append(wall - mono)
        self._offsets: dict[tuple[str, str], int] = {}
        self.spread_ns = 0
        """How far the wall clock of any one node moved against its monotonic clock."""
        self.ahead_ns: dict[str, int] = {}
        """By how much `align` found the clocks of nodes ahead of the others' (behind: negative)."""
        for key, offsets in seen.items():
            self._offsets[key], spread = _offset(offsets)
            self.spread_ns = max(self.spread_ns, spread)

    def place(self, row: int) -> tuple[int | None, int | None]:
        """Where the span in this row begins, if that was seen, and where it ends, if it is ``DONE``: the begin and its
        duration say so."""
        begin, ns = self._at(row, self._spans.begin), self._spans.ns[row]
        return begin, begin + ns if begin is not None and ns >= 0 else None

    def last(self, row: int) -> int | None:
        """Where the event of its end lies, if there is one."""
        return self._at(row, self._spans.end)

    def _at(self, row: int, stamps: Stamps) -> int | None:
        wall, mono = stamps.wall[row], stamps.mono[row]
        if wall < 0:
            return None
        node = self._spans.lane[row].node
        if mono >= 0 and (offset := self._offsets.get((node, stamps.clock[row][0]))) is not None:
            wall = mono + offset
        own = self.ahead_ns and self._spans.stage[row] not in _SCHEDULER
        return wall - self.ahead_ns.get(node, 0) if own else wall

    def align(self) -> None:
        """Move the nodes of one start-up so that all leave a rendezvous together, where they cannot have entered it
        together: one left before another came; or where most nodes leave every rendezvous together, and a few each time
        by as much too late or too early. It is no rendezvous where that makes the start-up no shorter."""
        seen: list[dict[str, int]] = []
        for stage in RENDEZVOUS:
            inside = self._first_inside(stage)
            if len(inside) < 2:
                continue
            left = {node: min(end for _, end in parts) for node, parts in inside.items()}
            together = median_low(left.values())
            off = {node: end - together for node, end in left.items()}
            came = max(begin for parts in inside.values() for begin, _ in parts)
            if came - min(left.values()) > TOLERANCE_NS and self._moved(off, together):
                return
            seen.append(off)
        if len(seen) < 2:
            return
        first, last = seen
        if (
            sum(max(abs(first.get(node, _SECOND)), abs(ns)) <= TOLERANCE_NS for node, ns in last.items())
            > len(last) / 2
        ):
            same = {node: ns for node, ns in last.items() if abs(ns - first.get(node, _NEVER)) <= TOLERANCE_NS}
            self._moved(same, together, max(last.values()))

    def _moved(self, off: Mapping[str, int], together: int, last: int | None = None) -> bool:
        """Move nodes by how much later than ``together`` they left, if that makes the start-up shorter; ``last``: the
        latest of all."""
        first = self._first_begins()
        length = together + (max(off.values()) if last is None else last) - min(first.values())
        aligned = together - min(when - off.get(node, 0) for node, when in first.items())
        if length - aligned <= TOLERANCE_NS:
            return False
        self.ahead_ns = {node: ns for node, ns in off.items() if abs(ns) > TOLERANCE_NS}
        return True

    def _first_begins(self) -> dict[str, int]:
        """node -> when its first span began, by its own clock."""
        first: dict[str, int] = {}
        for row, (lane, stage) in enumerate(zip(self._spans.lane, self._spans.stage, strict=True)):
            if stage not in _SCHEDULER and (when := self._at(row, self._spans.begin)) is not None:
                first[lane.node] = min(when, first.get(lane.node, when))
        return first

    def _first_inside(self, stage: str) -> dict[str, list[tuple[int, int]]]:
        """node -> begin and end of the first span of that stage of each of its ranks, if that has ended."""
        ranks: dict[tuple[str, int | None], tuple[int, int | None]] = {}
        for row, name in enumerate(self._spans.stage):
            if name == stage:
                lane, (begin, end) = self._spans.lane[row], self.place(row)
                key = (lane.node, lane.rank)
                if begin is not None and (key not in ranks or begin <= ranks[key][0]):
                    ranks[key] = begin, end
        inside: dict[str, list[tuple[int, int]]] = {}
        for (node, _), (begin, end) in ranks.items():
            if end is not None:
                inside.setdefault(node, []).append((begin, end))
        return inside


def _offset(seen: Mapping[tuple[bool, int], array[int]]) -> tuple[int, int]:
    """The offset of a clock and how far it moved, from offsets by whether the wall clock knows parts of a second, and
    by resolution."""
    whole = {res: offsets for (parts, res), offsets in seen.items() if parts}
    if not whole:  # a shell whose date knows only seconds cuts the wall clock off, so the largest offset is the best
        return max(map(max, seen.values())), 0
    fine = {0: whole[0]} if 0 in whole else whole
    offsets = list(chain.from_iterable(fine.values()))
    return median_low(offsets), max(max(offsets) - min(offsets) - max(fine), 0)
