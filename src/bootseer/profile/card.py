"""Start-up cards for the terminal. Everything is said in words and signs, so it reads the same without colour. Text
from events goes through `_text` and never through rich's markup, which a job name could otherwise inject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bootseer.profile.causes import seconds_text
from bootseer.profile.events import AttrValue, identity_text
from bootseer.profile.report import Cell, JobReport, NodeReport, StageReport
from bootseer.units import count_text, one_line

MAX_NODES = 20
_BAR = 12
_SMALL = 0.01
_STATED = "only its stated inputs count: "


def render(report: JobReport, *, max_nodes: int = MAX_NODES) -> RenderableType:
    """The card of one start-up; from two nodes on with a node x stage table (the ``max_nodes`` slowest)."""
    parts: list[RenderableType] = [_text(line) for line in _head(report)]
    parts.append(_stages(report))
    parts.extend(_text(line) for line in remarks(report))
    if len(report.nodes) > 1:
        parts.extend(_nodes(report, max_nodes))
        parts.extend(_text(line) for line in _legend(report))
    return Group(*parts)


def render_side_by_side(
    reports: Sequence[tuple[str, JobReport]], extra_rows: Mapping[str, Sequence[str]] | None = None
) -> RenderableType:
    """Several start-ups beside each other, each but the first with its change against the first. ``extra_rows``: label
    -> one text per report, printed as they are. Raises `ValueError` for a row of another length."""
    table = new_table()
    table.add_column("stage", no_wrap=True)
    for title, _ in reports:
        table.add_column(_text(title), justify="right", no_wrap=True)
    seconds = [{stage.stage: stage.seconds for stage in report.stages} for _, report in reports]
    names = list(dict.fromkeys(stage.stage for _, report in reports for stage in report.stages))
    names.sort(key=lambda name: max(_place(name, report) for _, report in reports))
    for name in names:
        add(table, name, _compared([found.get(name) for found in seconds]))
    add(table, "between stages", _compared([report.gap_seconds for _, report in reports]))
    table.add_section()
    add(table, "start-up", _compared([report.startup_seconds for _, report in reports]), style="bold")
    for unit in dict.fromkeys(report.cost.unit for _, report in reports):
        costs = [report.cost.total if report.cost.unit == unit else None for _, report in reports]
        add(table, f"lost {unit}", [hours_text(cost) if cost is not None else "-" for cost in costs])
    if extra_rows:
        table.add_section()
        for label, cells in extra_rows.items():
            if len(cells) != len(reports):
                raise ValueError(f"row {label!r} has {len(cells)} cells for {len(reports)} reports")
            add(table, label, list(cells))
    notes = [f"{title}: {line}" for title, report in reports for line in _doubts(report)]
    return Group(table, *(_text(note) for note in notes))


def _text(text: str) -> Text:
    return Text(one_line(text))


def new_table(*, gap: int = 1) -> Table:
    """A table without columns."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0))


def _place(name: str, report: JobReport) -> int:
    return next((place for place, stage in enumerate(report.stages) if stage.stage == name), -1)


def add(table: Table, label: str, cells: Iterable[str], *, style: str = "") -> None:
    """A row; what is in it is input: neither markup nor control characters."""
    table.add_row(_text(label), *(_text(cell) for cell in cells), style=style)


def _compared(values: Sequence[float | None]) -> list[str]:
    cells = []
    for place, value in enumerate(values):
        text, base = seconds_text(value) + (" s" if value is not None else ""), values[0]
        if place == 0 or len(values) == 1:
            cells.append(text)
        elif value is None or base is None or base < 0.05:
            cells.append(f"{text}        ")
        else:
            cells.append(f"{text} {f'{100 * (value - base) / base:+.0f} %':>7}")
    return cells


def _head(report: JobReport) -> list[str]:
    start = "hot restart" if report.hot else "start-up"
    lines = [f"{start} of {identity_text(report.job, report.attempt, report.cycle)}"]
    if report.startup_seconds is None:
        lines.append(unfinished(report))
        until = "s so far" if report.goes_on and report.heard_seconds is not None else "s up to the last event"
        lines.append(f"  no end yet   {seconds_text(report.elapsed_seconds)} {until}; nobody knows the rest")
    else:
        last = max((node for node in report.nodes if node.ready is not None), key=lambda n: n.ready or 0.0)
        on = f" (last on node {last.node})" if len(report.nodes) > 1 else ""
        ended, there = sum(node.ready is not None for node in report.nodes), len(report.nodes) + report.nodes_missing
        where = "everywhere" if ended == there else f"on {ended} of {there} nodes"
        lines.append(f"  ready after  {seconds_text(report.startup_seconds)} s: the first step has ended {where}{on}")
    if report.queue_seconds is not None:
        held = f"; {report.queue_held_seconds} s of it held" if report.queue_held_seconds else ""
        lines.append(f"  queued       {seconds_text(report.queue_seconds)} s before that, at no GPU cost{held}")
    size = _count(len(report.nodes), "node")
    size += f", {_count(report.gpus, 'GPU')}" if report.gpus else ""
    size += f", {_count(report.ranks, 'rank')}" if report.ranks else ""
    lines.append(f"  size         {size}")
    if report.ranks_expected and report.startup_seconds is None:
        lines.append(f"  first step   ended on {report.ranks_ready:,} of {report.ranks_expected:,} ranks")
    cost = report.cost
    own, wait, gap = map(hours_text, (cost.own, cost.wait, cost.gap))
    lines.append(f"  lost         {hours_text(cost.total)} {cost.unit} = {own} own work + {wait} waiting + {gap} gaps")
    return lines


def unfinished(report: JobReport) -> str:
    """Which nodes hold up a start without an end, or how it ended."""
    ended = [f"{_some(one.nodes)}: {one.how}" if one.nodes else one.how for one in report.ended[:3]]
    after = "since" if report.goes_on else "after"
    since = [f" {after} {one.seconds:,.0f} s" for one in report.still[:3]]
    still = [
        f"{one.stage}: {_some(one.nodes, ago)}" if one.nodes else one.stage + ago
        for one, ago in zip(report.still, since, strict=False)
    ]
    said = [*still, *(f"{'ended ' * bool(still)}before the first step: {one}" for one in ended)]
    if report.nodes_missing:
        which = f" ({', '.join(map(one_line, report.missing[:3]))}{', ...' * (len(report.missing) > 3)})"
        said.append(f"nothing ever from {_count(report.nodes_missing, 'node')}{which if report.missing else ''}")
    if still or not ended:
        heard = f"{datetime.fromtimestamp(report.heard_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
        ago = ago_text(report.heard_seconds) if report.heard_seconds is not None else ""
        said.append(f"nothing heard for {ago}" if ago and report.goes_on else f"nothing heard after {heard}")
    what = ("still in" if report.goes_on else "stopped in") if still else "has ended" if ended else "no step"
    return f"  {what:<12} {'; '.join(said)}"


def _some(nodes: Sequence[str], more: str = "") -> str:
    named = ", ".join(map(one_line, nodes[:3])) + (", ..." if len(nodes) > 3 else "")
    return f"{_count(len(nodes), 'node')}{more} ({named})"


def ago_text(seconds: float) -> str:
    """So long, in the unit that reads best: 90 s, 14 min, 7 h, 3 days."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _stages(report: JobReport) -> Table:
    many = len(report.nodes) > 1
    table = new_table(gap=0)
    table.add_column("stage", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("median", "max", "max/median", "slowest") if many else ("how",):
        table.add_column(name, justify="left" if name in ("slowest", "how") else "right", no_wrap=True)
    rows: list[tuple[str, float, StageReport | None]] = [(s.stage, s.seconds, s) for s in report.stages]
    rows.append(("between stages", report.gap_seconds, None))
    whole = report.elapsed_seconds or 1.0
    for name, seconds, stage in rows:
        more: list[str] = []
        if many and stage is not None:
            ratio = f"{stage.ratio:.2f}" if stage.ratio is not None else "-"
            flag = " !" if stage.slowest in stage.stragglers else ""
            more = [seconds_text(stage.median), seconds_text(stage.max), ratio, f"{_tail(stage.slowest or '-')}{flag}"]
        elif stage is not None:
            more = [_how(report.nodes[0].stages.get(name))]
        bar = "#" * round(_BAR * seconds / whole)
        add(table, name, [seconds_text(seconds), f"{100 * seconds / whole:.0f} %", bar, *more])
    return table


def _how(cell: Cell | None) -> str:
    """What the techniques said of themselves: the attributes ``how`` or ``outcome``; and how long it waited."""
    if cell is None:
        return ""
    if cell.own is None:
        return f"OPEN {seconds_text(cell.open_seconds)} s" if cell.open_seconds is not None else cell.state
    said: AttrValue = cell.attrs.get("how", cell.attrs.get("outcome", ""))
    return ", ".join(filter(None, (str(said), f"waited {seconds_text(cell.wait)} s" if cell.wait >= 0.05 else "")))


def remarks(report: JobReport) -> list[str]:
    """What there is to say beside the figures: causes, stragglers, what would have helped, doubts."""
    lines = [cause.text for cause in report.causes if not cause.stage]
    for stage in report.stages:
        for node in stage.stragglers[:3]:
            cell = next(n for n in report.nodes if n.node == node).stages[stage.stage]
            rank = f" (rank {cell.slowest_rank})" if cell.slowest_rank is not None else ""
            text = f"{seconds_text(cell.own)} s against a median of {seconds_text(stage.median)} s"
            lines.append(f"straggler: {node}{rank} in {stage.stage}, {text}")
            mine = (stage.stage, node)
            lines.extend(f"  {cause.text}" for cause in report.causes if (cause.stage, cause.node) == mine)
        if len(stage.stragglers) > 3:
            lines.append(f"  and {len(stage.stragglers) - 3} more in {stage.stage}")
    for change in report.what_if:
        if change.saved_seconds >= 0.05:
            lines.append(
                f"what if: {change.name}: {seconds_text(change.startup_seconds)} s"
                f" (-{seconds_text(change.saved_seconds)} s, -{hours_text(change.saved_hours)} {report.cost.unit})"
            )
    return lines + _caches(report) + _unobserved(report) + _doubts(report)


def _caches(report: JobReport) -> list[str]:
    """What came of the compile caches, as most of several nodes say it."""
    cells = [node.stages["caches"] for node in report.nodes if "caches" in node.stages]
    said = Counter(str(cell.attrs["how"]) for cell in cells if cell.attrs.get("how"))
    count = len(report.nodes)
    return [f"caches on {times} of {count} nodes: {how}" for how, times in said.most_common(int(count > 1))]


def _unobserved(report: JobReport) -> list[str]:
    """Why not all that the set-up command reads decides whether its snapshot fits, as most nodes say it."""
    reasons = [str(node.stages["env"].attrs.get("reason", "")) for node in report.nodes if "env" in node.stages]
    said = Counter(reason.partition(_STATED)[2].partition(";")[0] for reason in reasons if _STATED in reason)
    return [f"environment: {_STATED}{why}" for why, _ in said.most_common(1)]


def _doubts(report: JobReport) -> list[str]:
    lines = []
    if report.nodes_missing:
        names = ", ".join(report.missing[:5]) + (", ..." if len(report.missing) > 5 else "")
        which = f" ({names})" if names else ""
        lines.append(
            f"{report.nodes_missing} of {report.nodes_expected} nodes have no data{which}; their cost is not counted"
        )
    found = report.problems
    for count, one, many in (
        (found.open_spans, "span has no end yet (OPEN)", "spans have no end yet (OPEN)"),
        (found.lost_spans, "span lost its begin or end (LOST)", "spans lost their begin or end (LOST)"),
        (found.skewed_spans, "span ends before it begins (SKEWED)", "spans end before they begin (SKEWED)"),
        (found.uncertain_spans, "duration is from the wall clock", "durations are from the wall clock"),
        (found.torn, "torn last line was dropped", "torn last lines were dropped"),
        (found.foreign, "line is no event", "lines are no events"),
        (found.newer, "event is of a newer format", "events are of a newer format"),
        (found.duplicates, "event came twice", "events came twice"),
        (
            found.lost_events,
            "event could not be written by its process",
            "events could not be written by their processes",
        ),
        (found.cut_attributes, "attribute did not fit", "attributes did not fit"),
    ):
        if count:
            lines.append(count_text(count, one, many))
    if found.clock_spread_seconds >= 0.5:
        lines.append(
            f"a node's wall clock moved by {found.clock_spread_seconds:.1f} s; order across nodes is uncertain"
        )
    if found.clocks_ahead:
        node, seconds = max(found.clocks_ahead.items(), key=lambda item: abs(item[1]))
        what = f"the clock of {node} was {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} the others"
        more = f", those of {len(found.clocks_ahead) - 1} more by less" if len(found.clocks_ahead) > 1 else ""
        lines.append(f"{what}{more}; set right by a rendezvous")
    return lines


def _nodes(report: JobReport, max_nodes: int) -> list[RenderableType]:
    shown = _picked(report, max_nodes)
    title = "node x stage, own work in seconds"
    if report.ranks > len(report.nodes):
        title += " of the slowest rank"
    if len(shown) < len(report.nodes):
        title += f" (the {len(shown)} slowest of {len(report.nodes)} nodes)"
    table = new_table(gap=0)
    table.add_column("node", overflow="fold", min_width=6)
    stages = _columns(report)
    for stage in stages:
        table.add_column(Text(one_line(stage.stage).replace("_", "\n")), justify="right", no_wrap=True)
    for name in ("wait", "gap", "ready"):
        table.add_column(name, justify="right", no_wrap=True)
    for node in shown:
        cells = [_cell(node, stage) for stage in stages]
        add(table, node.node, [*cells, _tenths(node.wait), _tenths(node.gap), _tenths(node.ready)])
    table.add_section()
    add(table, "median", [*(_tenths(stage.median) for stage in stages), "", "", ""])
    add(table, "max", [*(_tenths(stage.max) for stage in stages), "", "", ""])
    return [_text(title), table]


def _columns(report: JobReport) -> list[StageReport]:
    """Stages worth a column: at least 1 % of start-up on some node, or not finished somewhere."""
    least = _SMALL * report.elapsed_seconds
    return [stage for stage in report.stages if stage.unfinished or (stage.max is not None and stage.max >= least)]


def _picked(report: JobReport, max_nodes: int) -> list[NodeReport]:
    if len(report.nodes) <= max_nodes:
        return report.nodes
    flagged = {node for stage in report.stages for node in stage.stragglers}

    held_up = stuck(report)

    def slowness(node: NodeReport) -> tuple[int, bool, bool, float]:
        return (-held_up.get(node.node, len(held_up)), node.node in flagged, node.ready is None, node.own)

    return sorted(report.nodes, key=slowness, reverse=True)[:max_nodes]


def stuck(report: JobReport) -> dict[str, int]:
    """Nodes without a first step, by their place among those that are still somewhere: the least advanced first."""
    places = [*(one.nodes for one in report.still), *(one.nodes for one in report.ended)]
    return {node: place for place, nodes in enumerate(places) for node in nodes}


def _cell(node: NodeReport, stage: StageReport) -> str:
    cell = node.stages.get(stage.stage)
    if cell is None:
        return "-"
    if cell.open_seconds is not None and cell.state == "OPEN":
        return f"OPEN {cell.open_seconds:,.0f}"
    if cell.own is None:
        return cell.state
    return ("~" if cell.uncertain else "") + _tenths(cell.own) + ("!" if node.node in stage.stragglers else "")


def _legend(report: JobReport) -> list[str]:
    left_out = [stage.stage for stage in report.stages if stage not in _columns(report)]
    lines = [f"below 1 % of start-up on every node: {', '.join(left_out)}"] if left_out else []
    if any(stage.stragglers for stage in report.stages):
        lines.append("! straggler: own work at least 1.5 times the median and 5 s over it")
    if report.problems.uncertain_spans:
        lines.append("~ from the wall clock")
    return lines


def _tail(node: str) -> str:
    """A long node name's end, which is where the names of a cluster differ."""
    return node if len(node) <= 9 else f"..{node[-7:]}"


def _tenths(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.1f}"


def hours_text(hours: float) -> str:
    """GPU-hours with the figures that count."""
    return f"{hours:.4f}" if hours < 0.1 else f"{hours:.2f}" if hours < 100 else f"{hours:,.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
