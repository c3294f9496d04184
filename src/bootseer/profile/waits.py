"""The time of each rank divided into own work and waiting, by stage, and gaps; together they are the whole start-up. A
rank waits at the barrier after a stage, inside a rendezvous, for the slowest first step, and where it said so itself,
and is only said to where its own events show it: it went on after the slowest one arrived, not before. Each wait
belongs to the stage that it follows or lies in."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from bootseer.profile import intervals
from bootseer.profile.clock import RENDEZVOUS, TOLERANCE_NS
from bootseer.profile.events import State
from bootseer.profile.intervals import Interval, Intervals
from bootseer.profile.timeline import ORDER, Timeline, Track, begins, done

BARRIERS = ("alloc", "image", "env")
"""Job-wide barrier at their end."""

Inside = defaultdict[Track, dict[str, Intervals]]
Between = defaultdict[Track, dict[str, Interval]]
"""track -> stage -> when it waited."""


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
    inside, between = _find_waits(line)
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


def _find_waits(line: Timeline) -> tuple[Inside, Between]:
    """Waits inside of a rendezvous, which are part of the stage's work, and those between stages, which may lie beside
    other work. Where there is one rank alone, there are only those that its node tells of."""
    inside: Inside = defaultdict(dict)
    between: Between = defaultdict(dict)
    if len(line.spans) > 1:
        _barriers(line, between)
        for stage in RENDEZVOUS:
            _rendezvous(line, stage, inside)
        if line.complete:
            for track, ready in line.ready.items():
                between[track]["first_step"] = (ready, line.end)
    _turns(line, inside)
    return inside, between


def _turns(line: Timeline, waits: Inside) -> None:
    """Until another node had done what only one of them does, in whatever stage that was."""
    for track, work in line.work.items():
        if turns := line.turns[track[0]]:
            for stage, at in work.items():
                told = intervals.intersect(at, turns)
                waits[track][stage] = intervals.union([*waits[track].get(stage, []), *told])


def _barriers(line: Timeline, waits: Between) -> None:
    ended: dict[str, dict[Track, tuple[int, int]]] = {stage: {} for stage in BARRIERS}
    """stage -> track -> its end, and the begin of the next stage, whichever it is."""
    running = set[str]()
    for track, stages in line.spans.items():
        after = [spans for stage, spans in stages.items() if stage in ORDER and stage not in BARRIERS]
        then = min((begin for spans in after for begin in begins(spans)), default=_NEVER)
        for stage in reversed(BARRIERS):
            if spans := stages.get(stage):
                if any(line.states[one.row] is State.OPEN for one in spans):
                    running.add(stage)
                elif found := done(spans):
                    ended[stage][track] = max(end for _, end in found), then
                then = min([then, *begins(spans)])
    for stage, tracks in ended.items():
        release = line.end if stage in running else max((end for end, _ in tracks.values()), default=0)
        for track, (end, then) in tracks.items():
            if then >= release - TOLERANCE_NS and end < min(release, then):
                waits[track][stage] = (end, min(release, then))


def _rendezvous(line: Timeline, stage: str, waits: Inside) -> None:
    arrivals: dict[Track, int] = {}
    for track, stages in line.spans.items():
        if found := begins(stages.get(stage, ())):
            arrivals[track] = max(found)
    last = max(arrivals.values(), default=0)
    to_come = len(arrivals) < (line.ranks_expected or 0) or any(
        stage not in stages and track not in line.ready for track, stages in line.spans.items()
    )
    for track, arrival in arrivals.items():
        left = max((end for _, end in done(line.spans[track][stage])), default=0)
        if not line.complete and any(line.states[one.row] is State.OPEN for one in line.spans[track][stage]):
            left = line.end
            if to_come:  # it waits for those until now
                waits[track][stage] = intervals.clip(line.work[track].get(stage, []), arrival, line.end)
                continue
        at = intervals.clip(line.work[track].get(stage, []), arrival, last)
        if at and left >= last - TOLERANCE_NS:
            waits[track][stage] = at


_NEVER = 1 << 65
"""Later than any time."""
