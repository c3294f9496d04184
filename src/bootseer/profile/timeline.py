"""The spans of one start-up on one axis: what each node did when, from the first GPU held to the last first step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bootseer.profile import intervals
from bootseer.profile.clock import Axis
from bootseer.profile.events import INIT_STAGES, TOP_STAGES, Span, State
from bootseer.profile.intervals import Interval, Intervals

_ORDER = {name: place for place, name in enumerate((*TOP_STAGES, *INIT_STAGES))}


class Timeline:
    """Built once per analysis; read-only afterwards. Times in ns on ``axis``; ``queue`` costs nothing and stays out."""

    def __init__(self, spans: Sequence[Span], axis: Axis) -> None:
        self.axis = axis
        self.spans = _by_node(spans)
        """node -> stage -> spans."""
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
        self.complete = bool(self.ready) and not any(
            span.state is State.OPEN for node in self.nodes for span in self.spans[node].get("first_step", ())
        )
        queue = [span for span in spans if span.stage == "queue" and span.state is State.DONE]
        self.queue_ns = sum(d.ns for span in queue if (d := span.duration)) if queue else None
        self.begin, self.end = self._bounds(queue)
        self.length = self.end - self.begin
        self.closed = self._close_init()
        """node -> stages that count as ended although the end event is missing."""
        self.work = {node: self._work(node) for node in self.nodes}
        """node -> stage -> when it was at work, inside the bounds; ``init`` without its children."""

    def when(self, span: Span) -> Interval | None:
        """Where a ``DONE`` span lies: begin on the axis, length from its duration."""
        if span.begin is None or (duration := span.duration) is None:
            return None
        begin = self.axis.at(span.node, span.begin)
        return (begin, begin + duration.ns)

    def begun(self, span: Span) -> int | None:
        """Where a span begins, whatever its state."""
        return self.axis.at(span.node, span.begin) if span.begin is not None else None

    def _all(self) -> Iterable[Span]:
        return (span for node in self.nodes for group in self.spans[node].values() for span in group)

    def _ready(self) -> dict[str, int]:
        ready: dict[str, int] = {}
        for node in self.nodes:
            ends = [when[1] for span in self.spans[node].get("first_step", ()) if (when := self.when(span))]
            if ends:
                ready[node] = max(ends)
        return ready

    def _bounds(self, queue: Iterable[Span]) -> Interval:
        begins = [begin for span in self._all() if (begin := self.begun(span)) is not None]
        begins += [when[1] for span in queue if (when := self.when(span))]
        ends = [self.axis.at(span.node, stamp) for span in self._all() for stamp in (span.begin, span.end) if stamp]
        begin = min(begins or ends, default=0)
        end = max(self.ready.values()) if self.complete else max(ends, default=begin)
        return begin, max(begin, end)

    def _close_init(self) -> dict[str, frozenset[str]]:
        # Whoever began init (a launcher) often cannot know when the first step inside the training process has ended.
        return {
            node: frozenset(("init",))
            for node in self.nodes
            if node in self.ready
            and all(span.state is State.DONE for span in self.spans[node]["first_step"])
            and any(span.begin for span in self.spans[node].get("init", ()))
        }

    def _work(self, node: str) -> dict[str, Intervals]:
        work: dict[str, Intervals] = {}
        for stage, spans in self.spans[node].items():
            parts = [when for span in spans if (when := self.when(span))]
            if stage == "init" and node in self.closed:
                begins = [begin for span in spans if (begin := self.begun(span)) is not None]
                parts = [(begin, self.ready[node]) for begin in begins]
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
        if span.stage and span.stage != "queue" and (span.stage in _ORDER or not _is_detail(span, by_id)):
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
