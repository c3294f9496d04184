"""Reports of many start-ups for the terminal: tables in words and figures, the same without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bootseer.profile.card import add, new_table
from bootseer.profile.fleet import FleetReport, Group
from bootseer.profile.growth import GrowthReport, SizeClass
from bootseer.units import count_text, one_line

_BAR = 12


def render(report: FleetReport, *, limit: int = 20) -> RenderableType:
    """All tables; the last ``limit`` periods (0: all)."""
    total = report.total
    counts = count_text(total.starts, "start-up", "start-ups"), count_text(report.jobs, "job", "jobs")
    head = f"{' of '.join(counts)}: {_hours(total.hours)} GPU-hours before the first step"
    parts: list[RenderableType] = [Text(head)]
    parts.append(Text(f"p50 {_seconds(total.p50)}, p90 {_seconds(total.p90)}, p99 {_seconds(total.p99)}"))
    if report.starts_per_job:
        spread = report.starts_per_job
        parts.append(Text(f"starts per job: p50 {spread['p50']}, p90 {spread['p90']}, most {spread['max']}"))
    if total.unfinished:
        hours = _hours(total.unfinished_hours)
        parts.append(Text(f"{total.unfinished} without an end of the first step: {hours} hours, in no other sum"))
    if report.without_gpus:
        parts.append(Text(f"{report.without_gpus} name no GPUs: their hours are node-hours"))
    parts += [Text(""), _groups(report.period, report.periods[-limit:])]
    parts += [Text(""), _stages(report)]
    if report.teams:
        parts += [Text(""), _groups("team", report.teams)]
    jobs = _table("job", "starts", "hot", "hours")
    for job in report.top_jobs:
        add(jobs, job.job or "(no name)", (str(job.starts), str(job.hot), _hours(job.hours)))
    parts += [Text(""), jobs]
    if report.offenders:
        nodes = _table("straggler in", "starts", "stages", right=1)
        for node in report.offenders:
            add(nodes, node.node, (str(node.starts), ", ".join(node.stages)))
        parts += [Text(""), nodes]
    return Lines(*parts)


def growth(report: GrowthReport, *, limit: int = 20) -> RenderableType:
    """The sentence, a line for each class of sizes, and its ``limit`` longest stages (0: all)."""
    sizes = _table(
        "size", "starts", "jobs", "no first step", "a job", "a day", "failures a day", "p50", "p90", "held", "lost", ""
    )
    most = max((one.p50 or 0.0 for one in report.sizes), default=0.0)
    for one in report.sizes:
        counts = (str(one.starts), str(one.jobs), str(one.unfinished))
        rates = (f"{rate:.1f}" for rate in (one.starts_per_job, one.starts_per_day, one.failures_per_day))
        bar = "█" * round(_BAR * (one.p50 or 0.0) / most) if most else ""
        times, held = map(_seconds, (one.p50, one.p90)), _hours(one.held_hours) if one.attempts_held else "-"
        add(sizes, f"{one.name} {one.unit}", (*counts, *rates, *times, held, _lost(one), bar))
    stages = _table("size", "stage", "starts", "p50", "p90", "max/median", "own work", "waiting")
    for one in report.sizes:
        for stage in one.stages[: limit or None]:
            ratio = f"{stage.max_over_median:.2f}" if stage.max_over_median is not None else "-"
            times, shares = map(_seconds, (stage.p50, stage.p90)), map(_share, (stage.own_share, stage.wait_share))
            add(stages, f"{one.name} {one.unit}", (one_line(stage.stage), str(stage.starts), *times, ratio, *shares))
    parts: list[RenderableType] = [Text(report.said)]
    if (found := report.doubling) is not None:
        parts.append(Text(f"twice the size, {found.value:.2f} times the start-up ({found.low:.2f}-{found.high:.2f})"))
    return Lines(*parts, Text(""), sizes, Text(""), stages)


def _lost(size: SizeClass) -> str:
    return "-" if size.share is None else f"{_share(size.share.value)} of {size.attempts_held}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _groups(title: str, groups: Sequence[Group]) -> Table:
    table = _table(title, "starts", "hours", "own", "wait", "gap", "p50", "p90", "p99", "")
    most = max((group.hours for group in groups), default=0.0)
    for group in groups:
        hours = (group.hours, group.own_hours, group.wait_hours, group.gap_hours)
        times = (group.p50, group.p90, group.p99)
        bar = "█" * round(_BAR * group.hours / most) if most else ""
        add(table, group.name or "-", (str(group.starts), *map(_hours, hours), *map(_seconds, times), bar))
    return table


def _stages(report: FleetReport) -> Table:
    table = _table("stage", "starts", "own hours", "wait hours", "p50", "p90", "p99", "max/median", "with a straggler")
    for stage in report.stages:
        ratio = f"{stage.max_over_median:.2f}" if stage.max_over_median is not None else "-"
        hours = map(_hours, (stage.own_hours, stage.wait_hours))
        times = map(_seconds, (stage.p50, stage.p90, stage.p99))
        add(table, stage.stage, (str(stage.starts), *hours, *times, ratio, str(stage.straggler_starts)))
    return table


def _table(first: str, *others: str, right: int | None = None) -> Table:
    """``right``: only so many columns behind the first are figures."""
    table = new_table()
    table.add_column(first, no_wrap=True)
    for place, name in enumerate(others):
        figures = name and (right is None or place < right)
        table.add_column(name, justify="right" if figures else "left", no_wrap=bool(figures))
    return table


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
