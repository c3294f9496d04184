"""One time axis for a job: each node's monotonic clock, moved to wall time once per boot.

Within a node, order and distance come from the monotonic clock, so a wall clock that is set during start-up moves
nothing. Across nodes the axis is only as good as the nodes' wall clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low

from bootseer.profile.events import Span, Stamp

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
        for key, stamps in seen.items():
            self._offsets[key], spread = _offset(stamps)
            self.spread_ns = max(self.spread_ns, spread)

    def at(self, node: str, stamp: Stamp) -> int:
        """Where ``stamp``, taken on ``node``, lies."""
        if stamp.mono is None or (node, stamp.boot) not in self._offsets:
            return stamp.wall
        return stamp.mono + self._offsets[node, stamp.boot]


def _offset(stamps: list[Stamp]) -> tuple[int, int]:
    whole = [stamp for stamp in stamps if stamp.wall % _SECOND]
    if not whole:  # a shell whose date knows only seconds cuts the wall clock off, so the largest offset is the best
        offsets = [stamp.wall - (stamp.mono or 0) for stamp in stamps]
        return max(offsets), 0
    fine = [stamp for stamp in whole if stamp.res == 0] or whole
    offsets = [stamp.wall - (stamp.mono or 0) for stamp in fine]
    spread = max(offsets) - min(offsets) - max(stamp.res for stamp in fine)
    return median_low(offsets), max(spread, 0)
