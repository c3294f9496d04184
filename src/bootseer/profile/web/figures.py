"""The numbers that a page shows in large type, and the table of stages by sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bootseer.profile import fleet, growth
from bootseer.profile.index import goes_on
from bootseer.profile.starts import Start

Figure = tuple[str, str, str]
"""A number, its unit, and what it is of."""


def of_starts(rows: Sequence[Start]) -> Iterable[Figure]:
    """What start-ups cost together, and how many go on."""
    done = [row for row in rows if row.startup_seconds is not None]
    lost, going = sum(row.hours for row in done), sum(map(goes_on, rows))
    if going:
        yield f"{going:,}", "", f"{'goes' if going == 1 else 'go'} on now"
    unit = "GPU-hours" if all(row.gpus for row in rows) else "GPU- or node-hours"
    yield f"{lost:,.1f}", unit, "lost before first steps"
    if lost:
        yield f"{100 * sum(row.wait_hours for row in done) / lost:.0f}", "%", "of that waits for others"
    yield f"{len(done):,}", f"of {len(rows):,}", "start-ups came to their first step"


def of_fleet(report: fleet.FleetReport, lost: Sequence[growth.Lost]) -> Iterable[Figure]:
    """What the last period lost, and all of them."""
    total, often = report.total, report.starts_per_job
    if lost:
        before = f", {100 * lost[-2].share:.1f} % in {lost[-2].name}" if len(lost) > 1 else ""
        yield f"{100 * lost[-1].share:.1f}", "%", f"of the GPU time lost in {lost[-1].name}{before}"
    unit = "GPU- or node-hours" if report.without_gpus else "GPU-hours"
    yield f"{total.hours:,.1f}", unit, "lost before first steps"
    if total.hours:
        yield f"{100 * total.wait_hours / total.hours:.0f}", "%", "of that waits for others"
    yield f"{total.starts - total.unfinished:,}", f"of {total.starts:,}", "start-ups came to their first step"
    if often:
        yield (
            f"{report.jobs:,}",
            "jobs",
            f"median starts of each: {often['p50']:.0f}, most: {often['max']:.0f}",
        )


def of_growth(report: growth.GrowthReport) -> Iterable[Figure]:
    """What large jobs lose."""
    size, doubling = report.chosen, report.doubling
    at = f"at {size.name} {size.unit}" if size else ""
    if size and size.share:
        low, high = size.share.low, size.share.high
        sure = "few runs" if low is None or high is None else f"95 %: {100 * low:.2g} to {100 * high:.2g}"
        yield f"{100 * size.share.value:.3g}", "%", f"of the {size.unit[:-1]} time lost to start-ups {at} ({sure})"
        worst = max(size.stages, key=lambda stage: stage.wait_share or 0.0, default=None)
        if worst and worst.wait_share and size.share.value:
            yield f"{100 * worst.wait_share / size.share.value:.0f}", "%", f"of that waits for others in {worst.stage}"
    if size and size.p50 is not None:
        yield f"{size.p50:,.0f}", "s", f"median start-up {at}"
    if doubling:
        sure = f" (95 %: {doubling.low:.2f} to {doubling.high:.2f})" if doubling.low and doubling.high else ""
        yield f"{doubling.value:.2f}", "times", f"the start-up for twice the size{sure}"
    yield f"{report.starts:,}", "start-ups", f"in {report.days:.0f} day{'s' * (report.days >= 1.5)}"


OF_STAGES: dict[str, Callable[[growth.StageGrowth], float | None]] = {
    "median, s": lambda stage: stage.p50,
    "p90, s": lambda stage: stage.p90,
    "max/median": lambda stage: stage.max_over_median,
    "own work, of the time held": lambda stage: stage.own_share,
    "waiting, of the time held": lambda stage: stage.wait_share,
}
"""What is told of each stage at each size."""
_MOST = 20


def main(sizes: Sequence[growth.SizeClass]) -> tuple[str, list[growth.SizeClass]]:
    """The unit of most starts, GPUs or nodes, and its classes: the two are of different starts."""
    starts = Counter[str]()
    for one in sizes:
        starts[one.unit] += one.starts
    unit = max(starts, key=lambda one: starts[one], default="GPUs")
    return unit, [one for one in sizes if one.unit == unit]


def matrix(
    sizes: Sequence[growth.SizeClass], of: Callable[[growth.StageGrowth], float | None]
) -> list[tuple[str, list[float | None]]]:
    """Stages by sizes: those that take longest somewhere."""
    cells = [{stage.stage: of(stage) for stage in size.stages} for size in sizes]
    longest: dict[str, float] = {}
    for stage in (stage for size in sizes for stage in size.stages):
        longest[stage.stage] = max(stage.p50, longest.get(stage.stage, 0.0))
    names = sorted(longest, key=lambda name: (-longest[name], name))[:_MOST]
    return [(name, [found.get(name) for found in cells]) for name in names]
