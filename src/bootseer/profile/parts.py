"""What each rank did with the time of a start-up: own work and waiting by stage, and gaps; disjoint, with no rest."""

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

    @property
    def wait_ns(self) -> int:
        """All waiting, in ns."""
        return sum(map(intervals.measure, self.wait.values()))

    @property
    def gap_ns(self) -> int:
        """All gaps, in ns."""
        return intervals.measure(self.gap)


def share_out(line: Timeline) -> dict[Track, Parts]:
    """The parts of every track. Gaps are what neither covers, so that sums can tell of what counts twice."""
    inside, between = find_waits(line)
    found: dict[Track, Parts] = {}
    for track, work in line.work.items():
        waited = inside.get(track, {})
        own = {stage: intervals.subtract(at, waited[stage]) if stage in waited else at for stage, at in work.items()}
        wait = dict(waited)
        covered = intervals.union(part for at in work.values() for part in at)
        for stage, at in between.get(track, {}).items():
            rest = intervals.subtract(intervals.clip(intervals.union(at), line.begin, line.end), covered)
            wait[stage] = intervals.union([*wait.get(stage, []), *rest])
            covered = intervals.union([*covered, *rest])
        whole = [(line.begin, line.end)] if line.length else []
        found[track] = Parts(own, wait, intervals.subtract(whole, covered))
    return found
