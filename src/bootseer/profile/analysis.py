"""From spans to a report: pure functions, exact integer arithmetic. Definitions: ``docs/reference/definitions.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from statistics import median

import msgspec

from bootseer.errors import BootseerError, ConfigError, NotFoundError
from bootseer.profile import hostlist, intervals, whatif
from bootseer.profile.clock import Axis
from bootseer.profile.events import EventLog, Identity, Span, State, identity_text
from bootseer.profile.parts import Parts, share_out
from bootseer.profile.report import Cell, Cost, JobReport, NodeReport, Problems, StageReport
from bootseer.profile.timeline import Timeline, Track

STRAGGLER_RATIO = 1.5
STRAGGLER_SECONDS = 5.0
STRAGGLER_NODES = 4
_WORST_FIRST = (State.OPEN, State.LOST, State.SKEWED, State.DONE)

_HOUR = 3600e9


def analyse(
    log: EventLog,
    identity: Identity | None = None,
    *,
    nodes: int | None = None,
    names: Collection[str] = (),
    whole: bool = True,
) -> JobReport:
    """The report of one start-up: ``identity`` is (job, attempt, cycle), by default the one that began last.

    ``nodes`` is how many nodes the job has, and ``names`` which, where the events do not say it (attributes ``nodes``
    and ``nodelist``). Not ``whole``: the log is of some of the nodes alone. Raises `NotFoundError` when the log
    does not hold the identity.
    """
    return look(log, identity, nodes=nodes, names=names, whole=whole)[0]


def look(
    log: EventLog,
    identity: Identity | None = None,
    *,
    nodes: int | None = None,
    names: Collection[str] = (),
    whole: bool = True,
) -> tuple[JobReport, Timeline, dict[Track, Parts]]:
    """`analyse`, and what the report was made of: the spans on one axis, and the parts of each rank."""
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
    line = Timeline(spans, axis, whole=whole)
    parts = share_out(line)
    shares = _shares(line, parts)
    _check(parts, shares, line)
    own_ns = {node: _own(line, parts, node) for node in line.nodes}
    names = names or _listed(spans)
    expected = nodes or line.nodes_expected or len(names) or None
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
        ranks_expected=line.ranks_expected,
        ranks_ready=line.ranks_ready,
        nodes_expected=expected,
        nodes_missing=max((expected or 0) - len(line.nodes), 0),
        missing=_missing(line.nodes, names, expected),
        cost=_cost(line, parts),
        stages=[_stage(line, parts, stage, own_ns, shares[stage]) for stage in line.stages],
        nodes=[_node(line, parts, node, own_ns[node]) for node in line.nodes],
        what_if=[],
        problems=_problems(log, spans, line),
    )
    return msgspec.structs.replace(report, what_if=whatif.estimates(report)), line, parts


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


def _own(line: Timeline, parts: Mapping[Track, Parts], node: str) -> dict[str, tuple[int, int | None]]:
    """stage -> own work of the slowest rank of the node that has done it, in ns, and that rank; None where the stage
    was done once for the node."""
    own: dict[str, tuple[int, int | None]] = {}
    for track in line.tracks[node]:
        for stage, spans in line.spans[track].items():
            if any(line.state(span) is State.DONE for span in spans):
                ns = intervals.measure(parts[track].own.get(stage, []))
                if stage not in own or ns > own[stage][0]:
                    own[stage] = ns, track[1] if any(span.rank is not None for span in spans) else None
    return own


def _node(
    line: Timeline, parts: Mapping[Track, Parts], node: str, own_ns: Mapping[str, tuple[int, int | None]]
) -> NodeReport:
    tracks = line.tracks[node]
    cells = {}
    for stage in line.stages:
        spans = [span for track in tracks for span in line.spans[track].get(stage, ())]
        if not spans:
            continue
        states = {line.state(span) for span in spans}
        own, slowest = own_ns.get(stage, (None, None))
        cells[stage] = Cell(
            own=own / 1e9 if own is not None else None,
            wait=max(intervals.measure(parts[track].wait.get(stage, [])) for track in tracks) / 1e9,
            state=next(state.value for state in _WORST_FIRST if state in states),
            slowest_rank=slowest,
            uncertain=any(d.uncertain for span in spans if (d := span.duration)),
            attrs={name: value for span in spans for name, value in span.attrs.items()},
        )
    share = 1e9 * len(tracks)
    ready = [line.ready[track] for track in tracks if track in line.ready]
    return NodeReport(
        node=node,
        gpus=line.gpus[node],
        own=sum(parts[track].own_ns for track in tracks) / share,
        wait=sum(parts[track].wait_ns for track in tracks) / share,
        gap=sum(parts[track].gap_ns for track in tracks) / share,
        ready=(max(ready) - line.begin) / 1e9 if ready else None,
        stages=cells,
    )


def _stage(
    line: Timeline,
    parts: Mapping[Track, Parts],
    stage: str,
    own_ns: Mapping[str, Mapping[str, tuple[int, int | None]]],
    share: int,
) -> StageReport:
    own = {node: found[stage][0] / 1e9 for node, found in own_ns.items() if stage in found}
    slowest = max(own, key=lambda node: own[node]) if own else None
    middle = median(own.values()) if own else None
    most = own[slowest] if slowest is not None else None
    seen = {node for node in line.nodes for track in line.tracks[node] if line.spans[track].get(stage)}
    return StageReport(
        stage=stage,
        seconds=share / 1e9,
        own_hours=_hours(line, {track: intervals.measure(part.own.get(stage, [])) for track, part in parts.items()}),
        wait_hours=_hours(line, {track: intervals.measure(part.wait.get(stage, [])) for track, part in parts.items()}),
        nodes=len(own),
        median=middle,
        max=most,
        slowest=slowest,
        slowest_rank=own_ns[slowest][stage][1] if slowest is not None else None,
        ratio=most / middle if most is not None and middle else None,
        stragglers=find_stragglers(own),
        unfinished=len(seen) - len(own),
    )


def _cost(line: Timeline, parts: Mapping[Track, Parts]) -> Cost:
    return Cost(
        unit="GPU-hours" if any(line.gpus.values()) else "node-hours",
        total=_hours(line, dict.fromkeys(parts, line.length)),
        own=_hours(line, {track: part.own_ns for track, part in parts.items()}),
        wait=_hours(line, {track: part.wait_ns for track, part in parts.items()}),
        gap=_hours(line, {track: part.gap_ns for track, part in parts.items()}),
    )


def _hours(line: Timeline, ns: Mapping[Track, int]) -> float:
    """GPU-hours of times by track: its ranks hold equal parts of a node's GPUs. Node-hours where no node has GPUs."""
    held = any(line.gpus.values())
    hours = 0.0
    for node, tracks in line.tracks.items():
        hours += sum(ns[track] for track in tracks) * (line.gpus[node] if held else 1) / len(tracks)
    return hours / _HOUR


def _shares(line: Timeline, parts: Mapping[Track, Parts]) -> dict[str, int]:
    """Each instant of start-up goes to the stage of the least advanced rank at work, or to ``""``; ns by stage."""
    index = {stage: place for place, stage in enumerate(line.stages)}
    steps: list[tuple[int, int, int]] = []
    for track, part in parts.items():
        for stage, own in part.own.items():
            turns = intervals.intersect(line.work[track][stage], line.turns[track[0]])  # at work elsewhere
            for begin, end in intervals.union([*own, *turns]):
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


def _check(parts: Mapping[Track, Parts], shares: Mapping[str, int], line: Timeline) -> None:
    """The identities, by separately computed sums. A failure is a bug of this module, never of the data."""
    for track, part in parts.items():
        if part.own_ns + part.wait_ns + part.gap_ns != line.length:
            raise BootseerError(f"own work, waiting and gaps of {track} do not add up to the start-up time: {part}")
    if sum(shares.values()) != line.length:
        raise BootseerError(f"the stages' shares do not add up to the start-up time: {dict(shares)}, {line.length}")


def _listed(spans: Iterable[Span]) -> list[str]:
    """The nodes that the longest attribute ``nodelist`` names; none where it cannot be read, as when it was cut."""
    given = (text for span in spans if isinstance(text := span.attrs.get("nodelist"), str))
    try:
        return hostlist.expand(max(given, key=len, default=""))
    except ConfigError:
        return []


def _missing(nodes: Iterable[str], names: Collection[str], expected: int | None) -> list[str]:
    """Which of ``names`` are not among ``nodes``, by their host names; none unless the two speak of the same nodes."""
    seen = {node.partition(".")[0] for node in nodes}
    if len(names) != expected or not seen <= {name.partition(".")[0] for name in names}:
        return []
    return [name for name in names if name.partition(".")[0] not in seen]


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
