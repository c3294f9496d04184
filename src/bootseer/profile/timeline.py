"""The spans of one start-up on one axis: what each rank did when, from the first GPU held to the last first step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from bootseer.errors import DataError
from bootseer.profile import ending, intervals
from bootseer.profile.clock import Axis
from bootseer.profile.events import INIT_STAGES, TOP_STAGES, WAIT, Spans, State
from bootseer.profile.intervals import Interval, Intervals

Track = tuple[str, int | None]
"""Node and rank; rank None where no event of the node names one. What is done once for a node is on all its tracks."""


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A span on the axis: its row, where it begins, if that was seen, and where it ends, if it is ``DONE``."""

    row: int
    begin: int | None
    end: int | None


GIVEN_UP_NS = 86_400 * 10**9
"""A start of which nothing was heard for so long does not go on."""
_MOST_STAGES, _MOST_PLACED, _MOST_NODES = 256, 5_000_000, 1 << 24
ORDER = {name: place for place, name in enumerate((*TOP_STAGES, *INIT_STAGES))}


class Timeline:
    """Built once per analysis; read-only afterwards. Times in ns on ``axis``; ``queue`` costs nothing and stays out.
    Not ``whole``: ranks without any span are not waited for. ``now``: until when a start without an end goes on, in ns;
    None: nobody knows."""

    def __init__(self, rows: Spans, axis: Axis, *, whole: bool = True, now: int | None = None) -> None:
        self.rows, self.axis = rows, axis
        self.states = list(rows.state)
        """By row; an ``init`` that has begun ends with the first step, although its own end is missing."""
        by_node: defaultdict[str, list[Placed]] = defaultdict(list)
        told: defaultdict[str, list[Placed]] = defaultdict(list)
        queue: list[Placed] = []
        for row, (lane, stage, detail) in enumerate(zip(rows.lane, rows.stage, rows.detail, strict=True)):
            if stage == "queue":
                queue.append(self._place(row))
            elif stage == WAIT:
                told[lane.node].append(self._place(row))
            elif stage and not detail:
                by_node[lane.node].append(self._place(row))
        _check(rows, by_node, told)
        self.nodes = sorted(by_node, key=_natural)
        self.tracks: dict[str, list[Track]] = {}
        """node -> its tracks."""
        self.spans: dict[Track, dict[str, list[Placed]]] = {}
        """track -> stage -> spans."""
        self.gpus: dict[str, int] = {}
        for node in self.nodes:
            lanes = {rows.lane[one.row] for one in by_node[node]}
            self.gpus[node] = max(lane.gpus for lane in lanes)
            ranks = sorted({lane.rank for lane in lanes if lane.rank is not None})
            self.tracks[node] = [(node, rank) for rank in ranks] or [(node, None)]
            self._put(self.tracks[node], by_node[node])
        self.stages = sorted({stage for stages in self.spans.values() for stage in stages}, key=_place)
        self.nodes_expected = _expected(rows, "nodes")
        self.ranks_expected = _expected(rows, "ranks")
        if self.ranks_expected is None and any(len(tracks) > 1 for tracks in self.tracks.values()):
            self.ranks_expected = _expected(rows, "world")  # by hand: where one alone emits, it speaks for its node
        self.ready = self._ready()
        """track -> end of its first step."""
        self.ranks_ready = len({rank for _, rank in self.ready if rank is not None})
        self.complete = (
            bool(self.ready)
            and (not whole or self.ranks_ready >= (self.ranks_expected or 0))
            and not any(self._on_its_way(track) or self._failed(track) for track in self.spans)
        )
        queued = done(queue)
        self.queue_ns = intervals.measure(queued) if queued else None
        self.queue_held = _expected(rows, "held_seconds")
        open_ = [one for one in queue if self.states[one.row] is State.OPEN]
        left = not self.nodes or len(self.nodes) < (_expected(rows, "pods") or 0)
        self.queued = begins(open_) if left and not self.complete else []
        """Since when it has been in the queue, or some of its pods."""
        self.outside = ending.outside(rows)
        self.ended = {} if self.complete else {n: how for n in self.nodes if (how := self._ended(n, by_node[n]))}
        """Nodes that have ended before their first step -> how."""
        self.heard, self.goes_on = 0, False
        """When the last event was, and whether anything may still come."""
        self.begin, self.end = self._bounds([one for found in by_node.values() for one in found], queued, now)
        self.length = self.end - self.begin
        waits = {node: [] if self.complete else told[node] for node in self.nodes}
        self.waiting = {n: begins(one for one in waits[n] if self.states[one.row] is State.OPEN) for n in self.nodes}
        """node -> since when it has waited for another node."""
        self.turns = {
            node: intervals.union([*done(told[node]), *((begin, self.end) for begin in self.waiting[node])])
            for node in self.nodes
        }
        """node -> when it waited for another node, which did for all what one of them does."""
        self._init_end = self._init_ends()
        self.work = {track: self._work(track) for track in self.spans}
        """track -> stage -> when it was at work, inside the bounds; an instant belongs to one stage at most."""

    def _place(self, row: int) -> Placed:
        return Placed(row, *self.axis.place(row))

    def _put(self, tracks: Sequence[Track], spans: Iterable[Placed]) -> None:
        for track in tracks:
            self.spans[track] = {}
        for one in spans:
            lane = self.rows.lane[one.row]
            for track in tracks if lane.rank is None else ((lane.node, lane.rank),):
                self.spans[track].setdefault(self.rows.stage[one.row], []).append(one)

    def _ready(self) -> dict[Track, int]:
        steps = {
            track: done(one for one in stages.get("first_step", ()) if not ending.failure(self.rows.attrs[one.row]))
            for track, stages in self.spans.items()
        }
        return {track: max(end for _, end in found) for track, found in steps.items() if found}

    def _failed(self, track: Track) -> str:
        """What went wrong in the last of its own spans, of a track that has come to no first step."""
        if track in self.ready:
            return ""
        rows, own = self.rows, [one for spans in self.spans[track].values() for one in spans]
        return ending.last_failure(
            (end, rows.stage[one.row], rows.attrs[one.row])
            for one in own
            if (rows.lane[one.row].rank is not None or rows.stage[one.row] == "first_step")
            and (end := self.axis.last(one.row)) is not None
        )

    def _on_its_way(self, track: Track) -> bool:
        """Whether its first step is to come, as far as its spans say: not every rank emits one."""
        stages = ("first_step",) if track in self.ready else set(self.spans[track]) & ORDER.keys() - {"init"}
        return any(self.states[one.row] is State.OPEN for stage in stages for one in self.spans[track].get(stage, ()))

    def _ended(self, node: str, spans: Sequence[Placed]) -> str:
        """How a node ended without a first step; nothing where it may still come, or has come."""
        if any(track in self.ready for track in self.tracks[node]):
            return next(filter(None, map(self._failed, self.tracks[node])), "")
        if self.outside:
            return self.outside
        if any(self.states[one.row] is State.OPEN for one in spans):
            return ""
        ends = ((end, one.row) for one in spans if (end := self.axis.last(one.row)) is not None)
        if said := ending.last_failure((end, self.rows.stage[row], self.rows.attrs[row]) for end, row in ends):
            return said
        latest = max(spans, key=lambda one: one.begin or 0)
        if latest.begin is not None and self.states[latest.row] is State.LOST:
            return f"cut off in {self.rows.stage[latest.row]}"
        return "init ended" if any(self.rows.stage[one.row] == "init" for one in spans) else ""

    def _bounds(self, spans: Sequence[Placed], queue: Intervals, now: int | None) -> Interval:
        first = [*begins(spans), *(end for _, end in queue)]
        if self.complete:
            begin, end = min(first), max(self.ready.values())
        else:
            last = [*begins(spans), *(when for one in spans if (when := self.axis.last(one.row)) is not None)]
            begin = min(first or last or self.queued, default=0)
            self.heard = end = max(last, default=begin)
            self.goes_on = any(not self._is_ready(node) and node not in self.ended for node in self.nodes)
            self.goes_on |= bool(self.queued)
            self.goes_on = self.goes_on and (now is None or now - end < GIVEN_UP_NS)
            if self.goes_on and self.nodes:  # the queue costs nothing
                end = max(end, now or 0)
        return begin, max(begin, end)

    def _is_ready(self, node: str) -> bool:
        return all(track in self.ready for track in self.tracks[node])

    def _init_ends(self) -> dict[Track, int]:
        """Where ``init`` ends: with the first step of the track, for one without with the last of its node. Who began
        it (a launcher) often cannot know."""
        found: dict[Track, int] = {}
        for tracks in self.tracks.values():
            steps = [one for track in tracks for one in self.spans[track].get("first_step", ())]
            last = max((self.ready[track] for track in tracks if track in self.ready), default=None)
            if last is not None and all(self.states[one.row] is State.DONE for one in steps):
                for track in tracks:
                    found[track] = self.ready.get(track, last)
                    for one in self.spans[track].get("init", ()):
                        if one.begin is not None:
                            self.states[one.row] = State.DONE
        return found

    def _work(self, track: Track) -> dict[str, Intervals]:
        parts: list[tuple[int, int, str]] = []
        for stage, spans in self.spans[track].items():
            until = self._init_end.get(track) if stage == "init" else None
            for one in spans:
                begin, end = one.begin, one.end if until is None else until
                if end is None and not self.complete and self.states[one.row] is State.OPEN:
                    end = self.end  # so far
                if begin is not None and end is not None and begin < self.end and end > self.begin:
                    parts.append((max(begin, self.begin), min(end, self.end), stage))
        return _innermost(parts)


def done(spans: Iterable[Placed]) -> Intervals:
    """Where those that are ``DONE`` lie."""
    return [(one.begin, one.end) for one in spans if one.begin is not None and one.end is not None]


def begins(spans: Iterable[Placed]) -> list[int]:
    """Where they begin, whatever their state."""
    return [one.begin for one in spans if one.begin is not None]


def _innermost(parts: list[tuple[int, int, str]]) -> dict[str, Intervals]:
    """stage -> its intervals of ``parts``; where several overlap, the one that began last counts, and of two that began
    together the shorter one."""
    work: dict[str, Intervals] = {stage: [] for _, _, stage in parts}
    parts.sort()
    if len(work) == len(parts) and all(one[1] <= other[0] for one, other in pairwise(parts)):
        return {stage: [(begin, end)] if begin < end else [] for begin, end, stage in parts}  # as most do
    parts.sort(key=lambda part: (part[0], -part[1], _place(part[2])))
    open_parts: list[tuple[int, int, str]] = []  # by begin: the last one counts
    at = 0

    def until(limit: int) -> None:
        nonlocal at
        while open_parts and at < limit:
            _, end, stage = open_parts[-1]
            if end > at:
                work[stage].append((at, min(end, limit)))
                at = min(end, limit)
            if end <= at:
                open_parts.pop()

    for part in parts:
        until(part[0])
        at = part[0]
        open_parts.append(part)
    until(max((end for _, end, _ in parts), default=0))
    return {stage: intervals.union(found) for stage, found in work.items()}


def _expected(rows: Spans, name: str) -> int | None:
    """The largest number that an attribute of this name gives."""
    numbers = (n for attrs in rows.attrs if attrs and isinstance(n := attrs.get(name), int) and n is not True)
    return max((n for n in numbers if 0 < n < _MOST_NODES), default=None)


def _check(rows: Spans, by_node: Mapping[str, Sequence[Placed]], told: Mapping[str, Sequence[Placed]]) -> None:
    """What is done once for a node is on all its tracks, and each stage is looked at on each track: what a few lines
    multiply is bounded. Raises `DataError`."""
    placed = 0
    for node, spans in by_node.items():
        ranks = [rows.lane[one.row].rank for one in spans]
        shared, tracks = ranks.count(None), len(set(ranks) - {None}) or 1
        placed += (len(spans) - shared + tracks * shared) * (1 + len(told.get(node, ())))
    if placed > _MOST_PLACED:
        raise DataError("it is no start-up: its events have too many spans and ranks on one node")
    stages = {stage for stage, detail in zip(rows.stage, rows.detail, strict=True) if not detail}
    if len(stages) > _MOST_STAGES:
        raise DataError(f"it is no start-up: its events have {len(stages)} stages")


def _place(stage: str) -> tuple[int, str]:
    return ORDER.get(stage, len(ORDER)), stage


def _natural(node: str) -> list[tuple[int, int, str]]:
    """Sorts n2 before n10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", node) if part]
