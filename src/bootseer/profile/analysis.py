"""From spans to a report: pure functions, exact integer arithmetic. Definitions: ``docs/reference/definitions.md``."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

import msgspec

from bootseer.errors import BootseerError, ConfigError, NotFoundError
from bootseer.profile import causes, hostlist, intervals, whatif
from bootseer.profile.clock import Axis
from bootseer.profile.events import EventLog, Identity, Spans, State, identity_text
from bootseer.profile.report import Cell, Cost, Ended, JobReport, NodeReport, Problems, StageReport, Still
from bootseer.profile.timeline import ORDER, Timeline, Track, begins
from bootseer.profile.waits import Parts, share_out

STRAGGLER_RATIO = 1.5
STRAGGLER_SECONDS = 5.0
STRAGGLER_NODES = 4
_NAMED = 50
"""Times as many nodes as were seen, or as this, may be missing by name: a line of events must not cost a large list."""
_WORST_FIRST = ("OPEN", "LOST", "SKEWED", "DONE")

_HOUR = 3600e9


class _Sums(NamedTuple):
    """Of one node, by stage, in ns: own work and waiting of all its ranks, the longest waiting of one, and the own work
    of the slowest rank that has done the stage, with that rank; None where the stage was done once for the node."""

    own: dict[str, int]
    wait: dict[str, int]
    longest: dict[str, int]
    slowest: dict[str, tuple[int, int | None]]


def analyse(
    log: EventLog,
    identity: Identity | None = None,
    *,
    nodes: int | None = None,
    names: Collection[str] = (),
    whole: bool = True,
    now: int | None = None,
) -> JobReport:
    """The report of one start-up: ``identity`` is (job, attempt, cycle), by default the one that began last. ``nodes``
    is how many nodes the job has, and ``names`` which, where the events do not say it (attributes ``nodes`` and
    ``nodelist``). Not ``whole``: the log is of some of the nodes alone. ``now``: ns since 1970, until when a start
    without an end goes on. Raises `NotFoundError` when the log does not hold the identity."""
    return look(log, identity, nodes=nodes, names=names, whole=whole, now=now)[0]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: there are none here, and it takes a tenth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
def look(
    log: EventLog,
    identity: Identity | None = None,
    *,
    nodes: int | None = None,
    names: Collection[str] = (),
    whole: bool = True,
    now: int | None = None,
) -> tuple[JobReport, Timeline, dict[Track, Parts]]:
    """`analyse`, and what the report was made of: the spans on one axis, and the parts of each rank."""
    logs = log.by_identity()
    known = list(logs)
    identity = identity or (known[-1] if known else None)
    if identity is None or identity not in logs:
        there = "; ".join(identity_text(*one) for one in known[-5:]) or "none"
        what = "a job" if identity is None else identity_text(*identity)
        raise NotFoundError(f"no span of {what} in the events", hint=f"there are: {there}")
    spans = logs[identity].spans
    del logs
    axis = Axis(spans)
    axis.align()
    line = Timeline(spans, axis, whole=whole, now=now)
    parts = share_out(line)
    shares = _shares(line, parts)
    if sum(shares.values()) != line.length:
        raise BootseerError(f"the stages' shares do not add up to the start-up time: {shares}, {line.length}")
    sums = {node: _sum_up(line, parts, node) for node in line.nodes}
    nodes_found = [_node(line, node, sums[node]) for node in line.nodes]
    names = names or _listed(spans, _NAMED * max(len(line.nodes), _NAMED))
    expected = nodes or line.nodes_expected or len(names) or None
    elapsed = line.length / 1e9
    report = JobReport(
        job=identity[0],
        attempt=identity[1],
        cycle=identity[2],
        hot=not {"queue", "image"} & set(spans.stage) and identity[2] > 0,
        started_ns=line.begin,
        startup_seconds=elapsed if line.complete else None,
        elapsed_seconds=elapsed,
        queue_seconds=line.queue_ns / 1e9 if line.queue_ns is not None else None,
        queue_held_seconds=line.queue_held,
        gap_seconds=shares[""] / 1e9,
        gpus=sum(line.gpus.values()),
        ranks=len({(lane.node, lane.rank) for lane in set(spans.lane) if lane.rank is not None}),
        ranks_expected=line.ranks_expected,
        ranks_ready=line.ranks_ready,
        nodes_expected=expected,
        nodes_missing=max((expected or 0) - len(line.nodes), 0),
        missing=_missing(line.nodes, names, expected),
        cost=_cost(line, sums),
        stages=[_stage(line, sums, nodes_found, stage, shares[stage]) for stage in line.stages],
        nodes=nodes_found,
        what_if=[],
        still=_still(line, now),
        ended=[
            Ended(how, [n for n, said in line.ended.items() if said == how])
            for how in sorted(set(line.ended.values()) or {line.outside} - {""} if not line.complete else ())
        ],
        goes_on=line.goes_on,
        heard_ns=line.heard,
        heard_seconds=None if now is None or line.complete else max(now - line.heard, 0) / 1e9,
        problems=_problems(log, line),
    )
    found = causes.find(report)
    return msgspec.structs.replace(report, what_if=whatif.estimates(report), causes=found), line, parts


def repeat_offenders(reports: Iterable[JobReport]) -> list[tuple[str, int]]:
    """Nodes flagged as stragglers in more than one start-up, with how many; worst first."""
    seen = Counter(node for report in reports for node in {n for stage in report.stages for n in stage.stragglers})
    return sorted(((node, count) for node, count in seen.items() if count > 1), key=lambda item: (-item[1], item[0]))


def find_stragglers(own: Mapping[str, float]) -> list[str]:
    """Nodes whose own work (seconds, by node) is at least 1.5 times the median and 5 s over it; slowest first. Nobody
    is flagged among fewer than 4 nodes."""
    if len(own) < STRAGGLER_NODES:
        return []
    middle = median(own.values())
    limit = max(STRAGGLER_RATIO * middle, middle + STRAGGLER_SECONDS)
    return sorted((node for node, seconds in own.items() if seconds >= limit), key=lambda node: (-own[node], node))


def _sum_up(line: Timeline, parts: Mapping[Track, Parts], node: str) -> _Sums:
    sums = _Sums({}, {}, {}, {})
    for track in line.tracks[node]:
        part = parts[track]
        own = {stage: intervals.measure(at) for stage, at in part.own.items()}
        wait = {stage: intervals.measure(at) for stage, at in part.wait.items()}
        if sum(own.values()) + sum(wait.values()) + intervals.measure(part.gap) != line.length:
            raise BootseerError(f"own work, waiting and gaps of {track} do not add up to the start-up time: {part}")
        for stage, ns in own.items():
            sums.own[stage] = sums.own.get(stage, 0) + ns
        for stage, ns in wait.items():
            sums.wait[stage] = sums.wait.get(stage, 0) + ns
            sums.longest[stage] = max(sums.longest.get(stage, 0), ns)
        for stage, spans in line.spans[track].items():
            ns = own.get(stage, 0)
            if (stage not in sums.slowest or ns > sums.slowest[stage][0]) and any(
                line.states[one.row] is State.DONE for one in spans
            ):
                by_rank = any(line.rows.lane[one.row].rank is not None for one in spans)
                sums.slowest[stage] = ns, track[1] if by_rank else None
    return sums


def _node(line: Timeline, node: str, sums: _Sums) -> NodeReport:
    tracks = line.tracks[node]
    cells = {}
    for stage in line.stages:
        spans = [one for track in tracks for one in line.spans[track].get(stage, ())]
        if not spans:
            continue
        states = {line.states[one.row].value for one in spans}
        own, slowest = sums.slowest.get(stage, (None, None))
        since = begins(one for one in spans if line.states[one.row] is State.OPEN)
        cells[stage] = Cell(
            own=own / 1e9 if own is not None else None,
            wait=sums.longest.get(stage, 0) / 1e9,
            state=next(state for state in _WORST_FIRST if state in states),
            slowest_rank=slowest,
            uncertain=any(line.rows.uncertain[one.row] for one in spans),
            open_seconds=(line.end - min(since)) / 1e9 if since else None,
            attrs={name: value for one in spans for name, value in line.rows.attrs[one.row].items()},
        )
    share = 1e9 * len(tracks)
    own_ns, wait_ns = sum(sums.own.values()), sum(sums.wait.values())
    ready = [line.ready[track] for track in tracks if track in line.ready]
    return NodeReport(
        node=node,
        gpus=line.gpus[node],
        own=own_ns / share,
        wait=wait_ns / share,
        gap=(line.length * len(tracks) - own_ns - wait_ns) / share,
        ready=(max(ready) - line.begin) / 1e9 if ready else None,
        stages=cells,
    )


def _stage(
    line: Timeline, sums: Mapping[str, _Sums], nodes: Iterable[NodeReport], stage: str, share: int
) -> StageReport:
    own = {node: found.slowest[stage][0] / 1e9 for node, found in sums.items() if stage in found.slowest}
    slowest = max(own, key=lambda node: own[node]) if own else None
    middle = median(own.values()) if own else None
    most = own[slowest] if slowest is not None else None
    return StageReport(
        stage=stage,
        seconds=share / 1e9,
        own_hours=_hours(line, {node: found.own.get(stage, 0) for node, found in sums.items()}),
        wait_hours=_hours(line, {node: found.wait.get(stage, 0) for node, found in sums.items()}),
        nodes=len(own),
        median=middle,
        max=most,
        slowest=slowest,
        slowest_rank=sums[slowest].slowest[stage][1] if slowest is not None else None,
        ratio=most / middle if most is not None and middle else None,
        stragglers=find_stragglers(own),
        unfinished=sum(stage in node.stages for node in nodes) - len(own),
    )


def _cost(line: Timeline, sums: Mapping[str, _Sums]) -> Cost:
    whole = {node: line.length * len(tracks) for node, tracks in line.tracks.items()}
    own = {node: sum(found.own.values()) for node, found in sums.items()}
    wait = {node: sum(found.wait.values()) for node, found in sums.items()}
    return Cost(
        unit="GPU-hours" if any(line.gpus.values()) else "node-hours",
        total=_hours(line, whole),
        own=_hours(line, own),
        wait=_hours(line, wait),
        gap=_hours(line, {node: ns - own[node] - wait[node] for node, ns in whole.items()}),
    )


def _hours(line: Timeline, ns: Mapping[str, int]) -> float:
    """GPU-hours of times by node, summed over its ranks, which share its GPUs alike. Node-hours where no node has
    GPUs."""
    held = any(line.gpus.values())
    hours = 0.0
    for node, tracks in line.tracks.items():
        hours += ns[node] * (line.gpus[node] if held else 1) / len(tracks)
    return hours / _HOUR


def _shares(line: Timeline, parts: Mapping[Track, Parts]) -> dict[str, int]:
    """Each instant of start-up goes to the stage of the least advanced rank at work, or to ``""``; ns by stage."""
    shares: dict[str, int] = {}
    taken: intervals.Intervals = []
    for stage in line.stages:
        active: intervals.Intervals = []
        for node, tracks in line.tracks.items():
            mine = [at for track in tracks for at in parts[track].own.get(stage, ())]
            if turns := line.turns[node]:  # at work elsewhere
                mine += (at for track in tracks for at in intervals.intersect(line.work[track].get(stage, []), turns))
            active += intervals.union(mine)
        at = intervals.union(active)
        shares[stage] = intervals.measure(intervals.subtract(at, taken))
        taken = intervals.union([*taken, *at])
    shares[""] = intervals.measure(intervals.subtract([(line.begin, line.end)], taken))
    return shares


def _listed(spans: Spans, most: int) -> list[str]:
    """The nodes that the longest attribute ``nodelist`` names; none where it was cut, or they are more than
    ``most``."""
    given = (text for attrs in spans.attrs if attrs and isinstance(text := attrs.get("nodelist"), str))
    try:
        return hostlist.expand(max(given, key=len, default=""), most)
    except ConfigError:
        return []


def _missing(nodes: Iterable[str], names: Collection[str], expected: int | None) -> list[str]:
    """Which of ``names`` are not among ``nodes``, by their host names; none unless the two speak of the same nodes."""
    seen = {node.partition(".")[0] for node in nodes}
    if len(names) != expected or not seen <= {name.partition(".")[0] for name in names}:
        return []
    return [name for name in names if name.partition(".")[0] not in seen]


def _still(line: Timeline, now: int | None) -> list[Still]:
    """Where the nodes are that have not ended: each where that of its ranks is which has been longest in one stage, or,
    where none of them is in one, after the last that ended. Some may still be in the queue."""
    found: dict[tuple[float, str], dict[str, int]] = {}
    until = max(line.end, now or 0) if line.goes_on else line.end
    queue = [Still("queue", [], max(until - min(line.queued), 0) / 1e9)] if line.queued else []
    for node in () if line.complete else line.nodes:
        latest: list[tuple[int, float, str]] = []
        for track in line.tracks[node]:
            if track in line.ready or node in line.ended:
                continue
            spans = [(one, stage) for stage, found in line.spans[track].items() for one in found]
            in_ = [(b, stage) for one, stage in spans if line.states[one.row] is State.OPEN for b in begins([one])]
            past = [(one.end, stage) for one, stage in spans if one.end is not None]
            if in_:
                begin, stage = max(in_)
                waits = [since for since in line.waiting[node] if since >= begin]
                done = [ORDER[other] for _, other in past if other in ORDER]
                place = ORDER.get(stage, max(done, default=-1) + 0.75)  # one of the user's own follows what has ended
                if waits:
                    begin, place, stage = min(waits), place + 0.25, f"{stage}, waiting for another node"
                latest.append((begin, place, stage))
            elif past:
                end, stage = max(past)
                latest.append((end, ORDER.get(stage, len(ORDER)) + 0.5, f"after {stage}"))
        if latest:
            begin, place, stage = min(latest)
            found.setdefault((place, stage), {})[node] = begin
    return queue + [Still(one[1], [*found[one]], (line.end - min(found[one].values())) / 1e9) for one in sorted(found)]


def _problems(log: EventLog, line: Timeline) -> Problems:
    return Problems(
        torn=log.torn,
        foreign=log.foreign,
        newer=log.newer,
        duplicates=log.duplicates,
        lost_events=log.lost,
        cut_attributes=log.cut,
        open_spans=line.states.count(State.OPEN),
        lost_spans=line.states.count(State.LOST),
        skewed_spans=line.states.count(State.SKEWED),
        uncertain_spans=sum(line.rows.uncertain),
        clock_spread_seconds=line.axis.spread_ns / 1e9,
        clocks_ahead={node: ns / 1e9 for node, ns in line.axis.ahead_ns.items()},
    )
