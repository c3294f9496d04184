"""The spans of one start-up on one axis: what each rank did when, from the first GPU held to the last first step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from bootseer.profile import intervals
from bootseer.profile.clock import Axis
from bootseer.profile.events import INIT_STAGES, TOP_STAGES, WAIT, Span, State
from bootseer.profile.intervals import Interval, Intervals

Track = tuple[str, int | None]
"""Node and rank; rank None where no event of the node names one. What is done once for a node is on all its tracks."""


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A span on the axis: where it begins, if that was seen, and where it ends, if it is ``DONE``."""

    begin: int | None
    end: int | None
    uncertain: bool
    span: Span


_ORDER = {name: place for place, name in enumerate((*TOP_STAGES, *INIT_STAGES))}


class Timeline:
    """Built once per analysis; read-only afterwards. Times in ns on ``axis``; ``queue`` costs nothing and stays out.

    Not ``whole``: ranks without any span are not waited for.
    """

    def __init__(self, spans: Sequence[Span], axis: Axis, *, whole: bool = True) -> None:
        self.axis = axis
        by_node = _by_node(spans)
        self.nodes = sorted(by_node, key=_natural)
        self.tracks = {node: _tracks(node, by_node[node]) for node in self.nodes}
        """node -> its tracks."""
        self.spans: dict[Track, dict[str, list[Placed]]] = {}
        """track -> stage -> spans."""
        for node in self.nodes:
            self.spans |= self._by_stage(self.tracks[node], by_node[node])
        told = defaultdict(list)
        for span in spans:
            if span.stage == WAIT:
                told[span.node].append(self._place(span))
        self.turns = {node: intervals.union(done(told[node])) for node in self.nodes}
        """node -> when it waited for another node, which did for all what one of them does."""
        self.gpus = {node: max(span.gpus for span in by_node[node]) for node in self.nodes}
        self.stages = sorted({span.stage for found in by_node.values() for span in found}, key=_place)
        self.nodes_expected = _expected(spans, "nodes")
        self.ranks_expected = _expected(spans, "ranks")
        self.ready = self._ready()
        """track -> end of its first step."""
        self.ranks_ready = len({rank for _, rank in self.ready if rank is not None})
        self.complete = (
            bool(self.ready)
            and (not whole or self.ranks_ready >= (self.ranks_expected or 0))
            and not any(self._on_its_way(track) for track in self.spans)
        )
        queue = done([self._place(span) for span in spans if span.stage == "queue"])
        self.queue_ns = sum(end - begin for begin, end in queue) if queue else None
        self.begin, self.end = self._bounds([span for found in by_node.values() for span in found], queue)
        self.length = self.end - self.begin
        self._init_end = self._init_ends()
        self.work = {track: self._work(track) for track in self.spans}
        """track -> stage -> when it was at work, inside the bounds; an instant belongs to one stage at most."""

    def state(self, span: Span) -> State:
        """That of the span; an ``init`` that has begun ends with the first step, although its own end is missing."""
        ended = span.stage == "init" and span.begin is not None and (span.node, span.rank) in self._init_end
        return State.DONE if ended else span.state

    def _place(self, span: Span) -> Placed:
        """Begin on the axis, length from the duration."""
        begin = self.axis.at(span.node, span.begin) if span.begin is not None else None
        if begin is None or (duration := span.duration) is None:
            return Placed(begin, None, False, span)
        return Placed(begin, begin + duration.ns, duration.uncertain, span)

    def _by_stage(self, tracks: Sequence[Track], spans: Iterable[Span]) -> dict[Track, dict[str, list[Placed]]]:
        found: dict[Track, dict[str, list[Placed]]] = {track: {} for track in tracks}
        for span in spans:
            placed = self._place(span)
            for track in tracks if span.rank is None else ((span.node, span.rank),):
                found[track].setdefault(span.stage, []).append(placed)
        return found

    def _ready(self) -> dict[Track, int]:
        steps = {track: done(stages.get("first_step", ())) for track, stages in self.spans.items()}
        return {track: max(end for _, end in found) for track, found in steps.items() if found}

    def _on_its_way(self, track: Track) -> bool:
        """Whether its first step is to come, as far as its spans say: not every rank emits one."""
        stages = ("first_step",) if track in self.ready else set(self.spans[track]) & _ORDER.keys() - {"init"}
        return any(one.span.state is State.OPEN for stage in stages for one in self.spans[track].get(stage, ()))

    def _bounds(self, spans: Sequence[Span], queue: Iterable[Interval]) -> Interval:
        begins = [self.axis.at(span.node, span.begin) for span in spans if span.begin is not None]
        begins += [end for _, end in queue]
        ends = [self.axis.at(span.node, stamp) for span in spans for stamp in (span.begin, span.end) if stamp]
        begin = min(begins or ends, default=0)
        end = max(self.ready.values()) if self.complete else max(ends, default=begin)
        return begin, max(begin, end)

    def _init_ends(self) -> dict[Track, int]:
        """Where ``init`` ends: with the first step of the track, for one without with the last of its node.

        Whoever began it (a launcher) often cannot know when the first step inside the training process has ended.
        """
        found: dict[Track, int] = {}
        for node, tracks in self.tracks.items():
            steps = [one for track in tracks for one in self.spans[track].get("first_step", ())]
            if steps and all(one.span.state is State.DONE for one in steps):
                last = max(self.ready[track] for track in tracks if track in self.ready)
                found |= {track: self.ready.get(track, last) for track in tracks}
                found[node, None] = last
        return found

    def _work(self, track: Track) -> dict[str, Intervals]:
        parts: list[tuple[int, int, str]] = []
        for stage, spans in self.spans[track].items():
            found = done(spans)
            if stage == "init" and track in self._init_end:
                found = [(begin, self._init_end[track]) for begin in begins(spans)]
            parts += [(begin, end, stage) for begin, end in intervals.clip(found, self.begin, self.end)]
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


def _tracks(node: str, spans: Sequence[Span]) -> list[Track]:
    ranks = sorted({span.rank for span in spans if span.rank is not None})
    return [(node, rank) for rank in ranks] or [(node, None)]


def _by_node(spans: Iterable[Span]) -> Mapping[str, list[Span]]:
    listed = list(spans)
    by_id = {span.id: span for span in listed}
    nodes: defaultdict[str, list[Span]] = defaultdict(list)
    for span in listed:
        if span.stage not in ("", "queue", WAIT) and (span.stage in _ORDER or not _is_detail(span, by_id)):
            nodes[span.node].append(span)
    return nodes


def _is_detail(span: Span, by_id: dict[str, Span]) -> bool:
    """Whether a span with a name of its own lies inside a stage, which then accounts for it."""
    seen = set[str]()
    while (span_above := by_id.get(span.parent)) is not None and span_above.id not in seen:
        if span_above.stage in _ORDER:
            return True
        seen.add(span_above.id)
        span = span_above
    return False


def _expected(spans: Iterable[Span], name: str) -> int | None:
    """The largest number that an attribute of this name gives."""
    numbers = (
        n for span in spans if span.attrs and isinstance(n := span.attrs.get(name), int) and n > 0 and n is not True
    )
    return max(numbers, default=None)


def _place(stage: str) -> tuple[int, str]:
    return _ORDER.get(stage, len(_ORDER)), stage


def _natural(node: str) -> list[tuple[int, int, str]]:
    """Sorts n2 before n10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", node) if part]
