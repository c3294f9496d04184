"""Where a rank waited for others: at the barrier after a stage, inside a rendezvous, for the slowest first step, and
where it said so itself. A rank is only said to wait where its own events show it: it went on after the slowest one
arrived, not before. Each wait belongs to the stage that it follows or lies in."""

from __future__ import annotations

from collections import defaultdict

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


def find_waits(line: Timeline) -> tuple[Inside, Between]:
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
