"""One time axis for a job: each node's monotonic clock, moved to wall time once per boot.

Within a node, order and distance come from the monotonic clock, so a wall clock that is set during start-up moves
nothing. Across nodes the axis is only as good as the nodes' wall clocks, but for what `Axis.align` can prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_low

from bootseer.profile.events import Span, Stamp

RENDEZVOUS = ("dist_init", "first_step")
"""Stages that begin with a collective operation: whoever arrives early waits inside."""
TOLERANCE_NS = 250_000_000
"""Nodes' wall clocks agree to about this (NTP); a node that goes on this much too early has still waited."""
_SECOND = 1_000_000_000


class Axis:
    """Places stamps of many nodes on wall time (ns since 1970)."""

    def __init__(self, spans: Iterable[Span]) -> None:
        seen: dict[tuple[str, str], list[Stamp]] = {}
        for span in spans:
            for stamp in (span.begin, span.end):
                if stamp is not None and stamp.mono is not None and stamp.boot:
                    seen.setdefault((span.node, stamp.boot), []).append(stamp)
        self._offsets: dict[tuple[str, str], int] = {}
        self.spread_ns = 0
        """How far the wall clock of any one node moved against its monotonic clock."""
        self.ahead_ns: dict[str, int] = {}
        """By how much `align` found the clocks of nodes ahead of the others' (behind: negative)."""
        for key, stamps in seen.items():
            self._offsets[key], spread = _offset(stamps)
            self.spread_ns = max(self.spread_ns, spread)

    def at(self, node: str, stamp: Stamp) -> int:
        """Where ``stamp``, taken on ``node``, lies."""
        ahead = self.ahead_ns.get(node, 0)
        if stamp.mono is None or (node, stamp.boot) not in self._offsets:
            return stamp.wall - ahead
        return stamp.mono + self._offsets[node, stamp.boot] - ahead

    def align(self, spans: Sequence[Span]) -> None:
        """Move the nodes of one start-up so that all leave a rendezvous together, where they cannot have entered it
        together: one left before another came. It is no rendezvous where that makes the start-up no shorter."""
        first: dict[str, int] = {}
        for span in spans:
            if span.begin is not None and span.stage != "queue":
                when = self.at(span.node, span.begin)
                first[span.node] = min(when, first.get(span.node, when))
        for stage in RENDEZVOUS:
            inside = self._first_inside([span for span in spans if span.stage == stage])
            if len(inside) < 2:
                continue
            left = {node: min(end for _, end in parts) for node, parts in inside.items()}
            came = max(begin for parts in inside.values() for begin, _ in parts)
            together = median_low(left.values())
            length = max(left.values()) - min(first.values())
            aligned = together - min(when - (left.get(node, together) - together) for node, when in first.items())
            if came - min(left.values()) > TOLERANCE_NS and length - aligned > TOLERANCE_NS:
                self.ahead_ns = {n: end - together for n, end in left.items() if abs(end - together) > TOLERANCE_NS}
                return

    def _first_inside(self, spans: Iterable[Span]) -> dict[str, list[tuple[int, int]]]:
        """node -> begin and end of the first of ``spans`` of each of its ranks, if that has ended."""
        ranks: dict[tuple[str, int | None], tuple[int, int | None]] = {}
        for span in spans:
            if span.begin is not None:
                begin, duration = self.at(span.node, span.begin), span.duration
                key, found = (span.node, span.rank), (begin, begin + duration.ns if duration else None)
                ranks[key] = min(found, ranks.get(key, found), key=lambda part: part[0])
        inside: dict[str, list[tuple[int, int]]] = {}
        for (node, _), (begin, end) in ranks.items():
            if end is not None:
                inside.setdefault(node, []).append((begin, end))
        return inside


def _offset(stamps: list[Stamp]) -> tuple[int, int]:
    whole = [stamp for stamp in stamps if stamp.wall % _SECOND]
    if not whole:  # a shell whose date knows only seconds cuts the wall clock off, so the largest offset is the best
        offsets = [stamp.wall - (stamp.mono or 0) for stamp in stamps]
        return max(offsets), 0
    fine = [stamp for stamp in whole if stamp.res == 0] or whole
    offsets = [stamp.wall - (stamp.mono or 0) for stamp in fine]
    spread = max(offsets) - min(offsets) - max(stamp.res for stamp in fine)
    return median_low(offsets), max(spread, 0)
