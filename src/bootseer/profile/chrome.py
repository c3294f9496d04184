"""Chrome trace event JSON, for chrome://tracing and ui.perfetto.dev. A node is a process (pid), a rank a thread (tid 0:
work done once for the node). A ``DONE`` span is one complete event (``X``), an ``OPEN`` one a begin without an end
(``B``), a ``LOST`` or ``SKEWED`` one an instant (``i``). Times are microseconds since the first event."""

from __future__ import annotations

from bootseer.errors import NotFoundError
from bootseer.profile.clock import Axis
from bootseer.profile.events import EventLog, Identity, Span, State

Json = dict[str, object]


def export(log: EventLog, identity: Identity | None = None) -> Json:
    """The trace of one (job, attempt, cycle), or of all of them. Raises `NotFoundError` when there is no such span."""
    logs = log.by_identity()
    part = log if identity is None else logs.get(identity)
    if not logs or part is None:
        raise NotFoundError("no span of that job, attempt and cycle in the events")
    axis = Axis(part.spans)
    if identity is not None or len(logs) == 1:
        axis.align()
    spans = list(part.spans)
    nodes = {node: pid for pid, node in enumerate(sorted({span.node for span in spans}), start=1)}
    whens = [axis.last(row) if span.begin is None else axis.place(row)[0] for row, span in enumerate(spans)]
    placed = [(when, span) for when, span in zip(whens, spans, strict=True) if when is not None]
    zero = min(when for when, _ in placed)
    events: list[Json] = []
    for node, pid in nodes.items():
        events.append(_meta("process_name", pid, 0, {"name": f"node {node}"}))
        for tid in sorted({_tid(span) for span in spans if span.node == node}):
            events.append(_meta("thread_name", pid, tid, {"name": f"rank {tid - 1}" if tid else "node"}))
    # Viewers nest what begins later inside what began earlier; of two that begin together the longer comes first.
    placed.sort(key=lambda item: (item[0], -(d.ns if (d := item[1].duration) else 0)))
    events.extend(_event(span, nodes[span.node], when - zero) for when, span in placed)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {"producer": "bootseer", "begin_ns": str(zero)},
    }


def _event(span: Span, pid: int, since_zero: int) -> Json:
    args: Json = {
        "job": span.job,
        "attempt": span.attempt,
        "cycle": span.cycle,
        "state": span.state.value,
        **span.attrs,
    }
    event: Json = {"name": span.stage or "?", "cat": "startup", "pid": pid, "tid": _tid(span), "ts": since_zero / 1e3}
    if (duration := span.duration) is not None:
        return {**event, "ph": "X", "dur": duration.ns / 1e3, "args": args}
    if span.state is State.OPEN:
        return {**event, "ph": "B", "args": args}
    return {**event, "name": f"{span.stage or '?'} ({span.state.value})", "ph": "i", "s": "t", "args": args}


def _tid(span: Span) -> int:
    return 0 if span.rank is None else span.rank + 1


def _meta(name: str, pid: int, tid: int, args: Json) -> Json:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
