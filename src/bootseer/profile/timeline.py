"""The spans of one start-up on one axis: what each node did when, from the first GPU held to the last first step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bootseer.profile import intervals
from bootseer.profile.clock import Axis
from bootseer.profile.events import INIT_STAGES, TOP_STAGES, WAIT, Span, State
from bootseer.profile.intervals import Interval, Intervals

_ORDER = {name: place for place, name in enumerate((*TOP_STAGES, *INIT_STAGES))}


class Timeline:
    """Built once per analysis; read-only afterwards. Times in ns on ``axis``; ``queue`` costs nothing and stays out."""

    def __init__(self, spans: Sequence[Span], axis: Axis) -> None:
        self.axis = axis
        self.spans = _by_node(spans)
        """node -> stage -> spans."""
        self.turns: dict[str, list[Span]] = {}
        """node -> spans in which it waited for another node."""
        for span in spans:
            if span.stage == WAIT:
                self.turns.setdefault(span.node, []).append(span)
        self.nodes = sorted((node for node, stages in self.spans.items() if stages), key=_natural)
        self.gpus = {node: max(s.gpus for group in self.spans[node].values() for s in group) for node in self.nodes}
        self.stages = sorted(
            {stage for node in self.nodes for stage in self.spans[node]},
            key=lambda stage: (_ORDER.get(stage, len(_ORDER)), stage),
        )
        self.nodes_expected = max(
            (n for s in spans if isinstance(n := s.attrs.get("nodes"), int) and n > 0 and n is not True), default=None
        )
        self.ready = self._ready()
        self.complete = bool(self.ready) and not any(self._on_its_way(node) for node in self.nodes)
        queue = [span for span in spans if span.stage == "queue" and span.state is State.DONE]
        self.queue_ns = sum(d.ns for span in queue if (d := span.duration)) if queue else None
        self.begin, self.end = self._bounds(queue)
        self.length = self.end - self.begin
        # Whoever began init (a launcher) often cannot know when the first step inside the training process has ended.
        self._init_ended = {
            node for node in self.ready if all(span.state is State.DONE for span in self.spans[node]["first_step"])
        }
        self.work = {node: self._work(node) for node in self.nodes}
        """node -> stage -> when it was at work, inside the bounds; ``init`` without its children."""

    def state(self, span: Span) -> State:
        """That of the span; an ``init`` that has begun ends with the first step, although its own end is missing."""
        ended = span.stage == "init" and span.begin is not None and span.node in self._init_ended
        return State.DONE if ended else span.state

    def done(self, spans: Iterable[Span]) -> Iterable[Interval]:
        """Where those that are ``DONE`` lie: begin on the axis, length from the duration."""
        for span in spans:
            if span.begin is not None and (duration := span.duration) is not None:
                begin = self.axis.at(span.node, span.begin)
                yield begin, begin + duration.ns

    def begins(self, spans: Iterable[Span]) -> Iterable[int]:
        """Where they begin, whatever their state."""
        return (self.axis.at(span.node, span.begin) for span in spans if span.begin is not None)

    def _ready(self) -> dict[str, int]:
        steps = {node: list(self.done(self.spans[node].get("first_step", ()))) for node in self.nodes}
        return {node: max(end for _, end in found) for node, found in steps.items() if found}

    def _on_its_way(self, node: str) -> bool:
        """Whether its first step is to come, as far as its spans say: not every node emits one."""
        stages = ("first_step",) if node in self.ready else set(self.spans[node]) & _ORDER.keys() - {"init"}
        return any(span.state is State.OPEN for stage in stages for span in self.spans[node].get(stage, ()))

    def _bounds(self, queue: Iterable[Span]) -> Interval:
        spans = [span for node in self.nodes for group in self.spans[node].values() for span in group]
        begins = [*self.begins(spans), *(end for _, end in self.done(queue))]
        ends = [self.axis.at(span.node, stamp) for span in spans for stamp in (span.begin, span.end) if stamp]
        begin = min(begins or ends, default=0)
        end = max(self.ready.values()) if self.complete else max(ends, default=begin)
        return begin, max(begin, end)

    def _work(self, node: str) -> dict[str, Intervals]:
        work: dict[str, Intervals] = {}
        for stage, spans in self.spans[node].items():
            parts = self.done(spans)
            if stage == "init" and node in self._init_ended:
                parts = ((begin, self.ready[node]) for begin in self.begins(spans))
            work[stage] = intervals.clip(intervals.union(parts), self.begin, self.end)
        if "init" in work:
            children = intervals.union(part for stage in INIT_STAGES for part in work.get(stage, ()))
            work["init"] = intervals.subtract(work["init"], children)
        return work


def _by_node(spans: Iterable[Span]) -> dict[str, dict[str, list[Span]]]:
    listed = list(spans)
    by_id = {span.id: span for span in listed}
    nodes: dict[str, dict[str, list[Span]]] = {}
    for span in listed:
        if span.stage not in ("", "queue", WAIT) and (span.stage in _ORDER or not _is_detail(span, by_id)):
            nodes.setdefault(span.node, {}).setdefault(span.stage, []).append(span)
    return nodes


def _is_detail(span: Span, by_id: dict[str, Span]) -> bool:
    """Whether a span with a name of its own lies inside a stage, which then accounts for it."""
    parent, seen = by_id.get(span.parent), {span.id}
    while parent is not None and parent.id not in seen:
        if parent.stage in _ORDER:
            return True
        seen.add(parent.id)
        parent = by_id.get(parent.parent)
    return False


def _natural(node: str) -> list[tuple[int, int, str]]:
    """Sorts n2 before n10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", node) if part]
