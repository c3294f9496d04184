"""Divides the time of each rank into own work and waiting, by stage, and gaps; together they are the whole start-up."""

from __future__ import annotations

from typing import NamedTuple

from bootseer.profile import intervals
from bootseer.profile.intervals import Intervals
from bootseer.profile.timeline import Timeline, Track
from bootseer.profile.waits import find_waits


class Parts(NamedTuple):
    """Of one track; ``own`` and ``wait`` by stage."""

    own: dict[str, Intervals]
    wait: dict[str, Intervals]
    gap: Intervals

    @property
    def own_ns(self) -> int:
        """All own work, in ns."""
        return sum(map(intervals.measure, self.own.values()))


def share_out(line: Timeline) -> dict[Track, Parts]:
    """The parts of every track. Gaps are what neither covers, so that sums can tell of what counts twice."""
    inside, between = find_waits(line)
    whole = [(line.begin, line.end)] if line.length else []
    found: dict[Track, Parts] = {}
    for track, work in line.work.items():
        wait = inside.get(track, {})
        own = {stage: intervals.subtract(at, wait[stage]) if stage in wait else at for stage, at in work.items()}
        gap = intervals.subtract(whole, intervals.union([part for at in work.values() for part in at]))
        for stage, (begin, end) in between.get(track, {}).items():
            if rest := intervals.clip(gap, begin, end):
                wait[stage] = intervals.union([*wait.get(stage, []), *rest])
                gap = intervals.subtract(gap, rest)
        found[track] = Parts(own, wait, gap)
    return found
