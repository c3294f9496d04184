"""From spans to a report: pure functions, exact integer arithmetic. Definitions: ``docs/reference/definitions.md``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median

import msgspec

from bootseer.errors import BootseerError, NotFoundError
from bootseer.profile import intervals
from bootseer.profile.clock import Axis
from bootseer.profile.events import EventLog, Identity, Span, State, identity_text
from bootseer.profile.report import Cell, Cost, JobReport, NodeReport, Problems, StageReport, WhatIf
from bootseer.profile.timeline import Timeline
from bootseer.profile.waits import Waits, find_waits

STRAGGLER_RATIO = 1.5
STRAGGLER_SECONDS = 5.0
STRAGGLER_NODES = 4
_WORST_FIRST = (State.OPEN, State.LOST, State.SKEWED, State.DONE)

_HOUR = 3600e9


def analyse(log: EventLog, identity: Identity | None = None, *, nodes: int | None = None) -> JobReport:
    """The report of one start-up: ``identity`` is (job, attempt, cycle), by default the one that began last.

    ``nodes`` is how many nodes the job has, where the events do not say it (attribute ``nodes``). Raises
    `NotFoundError` when the log does not hold the identity.
    """
    known = log.identities()
    if identity is None and known:
        identity = known[-1]
    spans = [span for span in log.spans if span.identity == identity]
    if identity is None or not spans:
        there = "; ".join(identity_text(*one) for one in known[-5:]) or "none"
        what = "a job" if identity is None else identity_text(*identity)
        raise NotFoundError(f"no span of {what} in the events", hint=f"there are: {there}")
    axis = Axis(spans)
    axis.align(spans)
    line = Timeline(spans, axis)
    waits = find_waits(line)
    node_reports, shares, own_ns = [], _shares(line, waits), {}
    totals = Counter[str]()
    held = any(line.gpus.values())
    for node in line.nodes:
        node_report, parts, cells_ns = _node(line, waits, node)
        node_reports.append(node_report)
        own_ns[node] = cells_ns
        weight = line.gpus[node] if held else 1
        for name, ns in parts.items():
            totals[name] += ns * weight
    _check(totals, shares, line)
    elapsed = line.length / 1e9
    report = JobReport(
        job=identity[0],
        attempt=identity[1],
        cycle=identity[2],
        hot=not {"queue", "image"} & {span.stage for span in spans} and identity[2] > 0,
        started_ns=line.begin,
        startup_seconds=elapsed if line.complete else None,
        elapsed_seconds=elapsed,
        queue_seconds=line.queue_ns / 1e9 if line.queue_ns is not None else None,
        gap_seconds=shares[""] / 1e9,
        gpus=sum(line.gpus.values()),
        ranks=len({(span.node, span.rank) for span in spans if span.rank is not None}),
        nodes_expected=(expected := nodes or line.nodes_expected),
        nodes_missing=max((expected or 0) - len(line.nodes), 0),
        cost=Cost(
            unit="GPU-hours" if held else "node-hours",
            total=totals["total"] / _HOUR,
            own=totals["own"] / _HOUR,
            wait=totals["wait"] / _HOUR,
            gap=totals["gap"] / _HOUR,
        ),
        stages=[_stage(line, stage, own_ns, shares[stage]) for stage in line.stages],
        nodes=node_reports,
        what_if=[],
        problems=_problems(log, spans, line),
    )
    return msgspec.structs.replace(report, what_if=_slowest_at_median(report))


def repeat_offenders(reports: Iterable[JobReport]) -> list[tuple[str, int]]:
    """Nodes flagged as stragglers in more than one start-up, with how many; worst first."""
    seen = Counter(node for report in reports for node in {n for stage in report.stages for n in stage.stragglers})
    return sorted(((node, count) for node, count in seen.items() if count > 1), key=lambda item: (-item[1], item[0]))


def find_stragglers(own: Mapping[str, float]) -> list[str]:
    """Nodes whose own work (seconds, by node) is at least 1.5 times the median and 5 s over it; slowest first.

    Nobody is flagged among fewer than 4 nodes.
    """
    if len(own) < STRAGGLER_NODES:
        return []
    middle = median(own.values())
    limit = max(STRAGGLER_RATIO * middle, middle + STRAGGLER_SECONDS)
    return sorted((node for node, seconds in own.items() if seconds >= limit), key=lambda node: (-own[node], node))


def _node(line: Timeline, waits: Waits, node: str) -> tuple[NodeReport, dict[str, int], dict[str, int]]:
    inside = waits.within(node)
    work = intervals.subtract(intervals.union(part for parts in line.work[node].values() for part in parts), inside)
    waiting = intervals.subtract(intervals.union([*inside, *waits.between.get(node, [])]), work)
    waiting = intervals.clip(waiting, line.begin, line.end)
    idle = intervals.subtract([(line.begin, line.end)] if line.length else [], intervals.union([*work, *waiting]))
    parts = {name: intervals.measure(found) for name, found in (("own", work), ("wait", waiting), ("gap", idle))}
    parts["total"] = line.length
    cells, own_ns = {}, {}
    for stage in line.stages:
        spans = line.spans[node].get(stage)
        if not spans:
            continue
        done = [span for span in spans if line.state(span) is State.DONE]
        states = {line.state(span) for span in spans}
        here = line.work[node].get(stage, [])
        own = intervals.measure(intervals.subtract(here, inside))
        if done:
            own_ns[stage] = own
        cells[stage] = Cell(
            own=own / 1e9 if done else None,
            wait=(intervals.measure(here) - own) / 1e9,
            state=next(state.value for state in _WORST_FIRST if state in states),
            uncertain=any(d.uncertain for span in done if (d := span.duration)),
            attrs={name: value for span in spans for name, value in span.attrs.items()},
        )
    ready = line.ready.get(node)
    report = NodeReport(
        node=node,
        gpus=line.gpus[node],
        own=parts["own"] / 1e9,
        wait=parts["wait"] / 1e9,
        gap=parts["gap"] / 1e9,
        ready=(ready - line.begin) / 1e9 if ready is not None else None,
        stages=cells,
    )
    return report, parts, own_ns


def _stage(line: Timeline, stage: str, own_ns: Mapping[str, Mapping[str, int]], share: int) -> StageReport:
    own = {node: cells[stage] / 1e9 for node, cells in own_ns.items() if stage in cells}
    slowest = max(own, key=lambda node: own[node]) if own else None
    middle = median(own.values()) if own else None
    most = own[slowest] if slowest is not None else None
    return StageReport(
        stage=stage,
        seconds=share / 1e9,
        nodes=len(own),
        median=middle,
        max=most,
        slowest=slowest,
        ratio=most / middle if most is not None and middle else None,
        stragglers=find_stragglers(own),
        unfinished=sum(1 for node in line.nodes if line.spans[node].get(stage) and stage not in own_ns[node]),
    )


def _shares(line: Timeline, waits: Waits) -> dict[str, int]:
    """Each instant of start-up goes to the stage of the least advanced node at work, or to ``""``; ns by stage."""
    index = {stage: place for place, stage in enumerate(line.stages)}
    steps: list[tuple[int, int, int]] = []
    for node in line.nodes:
        inside = waits.inside.get(node, [])
        for stage, parts in line.work[node].items():
            for begin, end in intervals.subtract(parts, inside):
                steps.append((begin, 1, index[stage]))
                steps.append((end, -1, index[stage]))
    steps.sort()
    active = [0] * len(line.stages)
    shares = dict.fromkeys([*line.stages, ""], 0)
    at = line.begin
    for when, change, place in steps:
        if when > at:
            current = next((stage for stage, count in zip(line.stages, active, strict=True) if count), "")
            shares[current] += when - at
            at = when
        active[place] += change
    shares[""] += line.end - at
    return shares


def _check(totals: Mapping[str, int], shares: Mapping[str, int], line: Timeline) -> None:
    """The identities, by separately computed sums. A failure is a bug of this module, never of the data."""
    if totals["own"] + totals["wait"] + totals["gap"] != totals["total"]:
        raise BootseerError(f"own work, waiting and gaps do not add up to the lost time: {dict(totals)}")
    if sum(shares.values()) != line.length:
        raise BootseerError(f"the stages' shares do not add up to the start-up time: {dict(shares)}, {line.length}")


def _problems(log: EventLog, spans: Iterable[Span], line: Timeline) -> Problems:
    states = Counter(line.state(span) for span in spans)
    return Problems(
        torn=log.torn,
        foreign=log.foreign,
        newer=log.newer,
        duplicates=log.duplicates,
        lost_events=log.lost,
        cut_attributes=log.cut,
        open_spans=states[State.OPEN],
        lost_spans=states[State.LOST],
        skewed_spans=states[State.SKEWED],
        uncertain_spans=sum(1 for span in spans if (d := span.duration) is not None and d.uncertain),
        clock_spread_seconds=line.axis.spread_ns / 1e9,
        clocks_ahead={node: ns / 1e9 for node, ns in line.axis.ahead_ns.items()},
    )


def _slowest_at_median(report: JobReport) -> list[WhatIf]:
    """The same job with the slowest 1 % of the nodes of each stage (at least one) at its median: an estimate.

    A stage saves what its slowest node's own work shrinks by, but no more than its share of start-up. Nothing is said
    below 4 nodes or before start-up has ended.
    """
    if report.startup_seconds is None or len(report.nodes) < 4:
        return []
    saved = 0.0
    for stage in report.stages:
        own = sorted(c.own for node in report.nodes if (c := node.stages.get(stage.stage)) and c.own is not None)
        if len(own) < 4:
            continue
        kept = own[: -math.ceil(len(own) / 100)]
        saved += min(stage.seconds, own[-1] - max(kept[-1], median(own)))
    return [
        WhatIf(
            name="slowest 1 % of nodes at the median",
            startup_seconds=report.startup_seconds - saved,
            saved_seconds=saved,
            saved_hours=saved * (report.gpus or len(report.nodes)) / 3600,
        )
    ]
