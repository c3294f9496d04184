"""Where a node waited for others: at the barrier after a stage, inside a rendezvous, for the slowest first step, and
where it said so itself.

A node is only said to wait where its own events show it: it went on after the slowest node arrived, not before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from bootseer.profile.clock import RENDEZVOUS, TOLERANCE_NS
from bootseer.profile.events import INIT_STAGES, State
from bootseer.profile.intervals import Intervals, union
from bootseer.profile.timeline import Timeline

BARRIERS = ("alloc", "image", "env")
"""Job-wide barrier at their end."""


class Waits(NamedTuple):
    """node -> disjoint intervals in order; ``between`` stages, ``inside`` a rendezvous stage, and inside of any stage
    until another node had done what only one of them does (``turns``)."""

    between: defaultdict[str, Intervals]
    inside: defaultdict[str, Intervals]
    turns: defaultdict[str, Intervals]

    def within(self, node: str) -> Intervals:
        """Those that lie inside of its stages and are no work."""
        return union([*self.inside.get(node, []), *self.turns.get(node, [])])


def find_waits(line: Timeline) -> Waits:
    """All waits of a start-up. On one node there are none but those that it tells of itself."""
    waits = Waits(defaultdict(list), defaultdict(list), defaultdict(list))
    for node in line.nodes:
        waits.turns[node].extend(line.done(line.turns.get(node, ())))
    if len(line.nodes) > 1:
        for stage in BARRIERS:
            _barrier(line, stage, waits)
        for stage in RENDEZVOUS:
            _rendezvous(line, stage, waits)
        if line.complete:
            for node, ready in line.ready.items():
                waits.between[node].append((ready, line.end))
    for where in waits:
        for node, parts in where.items():
            where[node] = union(parts)
    return waits


def _barrier(line: Timeline, stage: str, waits: Waits) -> None:
    ends: dict[str, int] = {}
    running = False
    for node in line.nodes:
        spans = line.spans[node].get(stage, [])
        running = running or any(span.state is State.OPEN for span in spans)
        found = [end for _, end in line.done(spans)]
        if found and not any(span.state is State.OPEN for span in spans):
            ends[node] = max(found)
    if not ends:
        return
    release = line.end if running else max(ends.values())
    for node, end in ends.items():
        onward = _next_begin(line, node, stage)
        if onward is None or onward >= release - TOLERANCE_NS:
            until = min(release, line.end if onward is None else onward)
            waits.between[node].append((end, until))


def _rendezvous(line: Timeline, stage: str, waits: Waits) -> None:
    arrivals: dict[str, int] = {}
    for node in line.nodes:
        if begins := list(line.begins(line.spans[node].get(stage, ()))):
            arrivals[node] = max(begins)
    last = max(arrivals.values(), default=0)
    for node, arrival in arrivals.items():
        ends = [end for _, end in line.done(line.spans[node][stage])]
        if ends and max(ends) >= last - TOLERANCE_NS:
            end = min(last, max(ends), line.end)
            waits.inside[node].append((max(arrival, line.begin), end))


def _next_begin(line: Timeline, node: str, stage: str) -> int | None:
    """Where the node's next top-level stage begins; children of init stand for it where it has no span."""
    later = (*BARRIERS[BARRIERS.index(stage) + 1 :], "init", *INIT_STAGES)
    return min(line.begins(span for name in later for span in line.spans[node].get(name, ())), default=None)
