"""Where a rank waited for others: at the barrier after a stage, inside a rendezvous, for the slowest first step, and
where it said so itself.

A rank is only said to wait where its own events show it: it went on after the slowest one arrived, not before. Each
wait belongs to the stage that it follows or lies in.
"""

from __future__ import annotations

from collections import defaultdict

from bootseer.profile import intervals
from bootseer.profile.clock import RENDEZVOUS, TOLERANCE_NS
from bootseer.profile.events import State
from bootseer.profile.intervals import Intervals
from bootseer.profile.timeline import ORDER, Timeline, Track, begins, done

BARRIERS = ("alloc", "image", "env")
"""Job-wide barrier at their end."""

Waits = defaultdict[Track, dict[str, Intervals]]
"""track -> stage -> when it waited."""


def find_waits(line: Timeline) -> tuple[Waits, Waits]:
    """Waits inside of a rendezvous, which are part of the stage's work, and those between stages, which may lie beside
    other work. Where there is one rank alone, there are only those that its node tells of."""
    inside: Waits = defaultdict(dict)
    between: Waits = defaultdict(dict)
    if len(line.spans) > 1:
        for stage in BARRIERS:
            _barrier(line, stage, between)
        for stage in RENDEZVOUS:
            _rendezvous(line, stage, inside)
        if line.complete:
            for track, ready in line.ready.items():
                if ready < line.end:
                    between[track]["first_step"] = [(ready, line.end)]
    _turns(line, inside)
    return inside, between


def _turns(line: Timeline, waits: Waits) -> None:
    """Until another node had done what only one of them does, in whatever stage that was."""
    for track, work in line.work.items():
        if turns := line.turns[track[0]]:
            for stage, at in work.items():
                told = intervals.intersect(at, turns)
                waits[track][stage] = intervals.union([*waits[track].get(stage, []), *told])


def _barrier(line: Timeline, stage: str, waits: Waits) -> None:
    ends: dict[Track, int] = {}
    running = False
    for track, stages in line.spans.items():
        if spans := stages.get(stage):
            still = any(line.states[one.row] is State.OPEN for one in spans)
            running = running or still
            if not still and (found := done(spans)):
                ends[track] = max(end for _, end in found)
    if not ends:
        return
    release = line.end if running else max(ends.values())
    for track, end in ends.items():
        onward = _next_begin(line, track, stage)
        if onward is None or onward >= release - TOLERANCE_NS:
            begin, until = max(end, line.begin), min(release, line.end if onward is None else onward, line.end)
            if begin < until:
                waits[track][stage] = [(begin, until)]


def _rendezvous(line: Timeline, stage: str, waits: Waits) -> None:
    arrivals: dict[Track, int] = {}
    for track, stages in line.spans.items():
        if found := begins(stages.get(stage, ())):
            arrivals[track] = max(found)
    last = max(arrivals.values(), default=0)
    for track, arrival in arrivals.items():
        ends = [end for _, end in done(line.spans[track][stage])]
        if ends and max(ends) >= last - TOLERANCE_NS:
            waits[track][stage] = intervals.clip(line.work[track].get(stage, []), arrival, last)


def _next_begin(line: Timeline, track: Track, stage: str) -> int | None:
    """Where its next top-level stage begins; children of init stand for it where it has no span."""
    place = ORDER[stage]
    later = [spans for name, spans in line.spans[track].items() if ORDER.get(name, 0) > place]
    return min((begin for spans in later for begin in begins(spans)), default=None)
