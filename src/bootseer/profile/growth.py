"""Growth with size: what start-ups of small and large jobs cost, as a share of the GPU time that the jobs held. Sizes
are classes of two: 1, 2, 3-4, 5-8 and so on, of GPUs, or of nodes where a start names no GPUs. Shares are of the
attempts whose end is known (the run's own end, or sacct): hours before first steps by hours held."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import linear_regression, median, quantiles

import msgspec

from bootseer.errors import NotFoundError
from bootseer.profile.starts import Start

_LATEST_US = 1 << 52
"""A file may say anything: later ones have no date."""
_DAY_US = 86_400_000_000
_SURE = 1.96
"""Standard errors on each side of an estimate: 95 %, of many."""
_LEAST, _STEEPEST = 1e-3, 64.0
"""Seconds of a start, and powers of two by doubling, that are none."""
_FEWEST = 5
"""Starts, or attempts, of which a fit or the interval of a share is told; a fit needs three classes, too."""


class Interval(msgspec.Struct, frozen=True):
    """An estimate, and where it lies with 95 % likelihood; without ``low`` and ``high`` there were too few to say."""

    value: float
    low: float | None = None
    high: float | None = None


class StageGrowth(msgspec.Struct, frozen=True):
    """One stage of the complete starts of a class. Seconds are its part of a start-up; the shares are of GPU time held,
    None where that is not known. ``max_over_median``: median over the starts of two nodes or more."""

    stage: str
    starts: int
    p50: float
    p90: float
    max_over_median: float | None
    own_share: float | None
    wait_share: float | None


class SizeClass(msgspec.Struct, frozen=True):
    """Starts of one class. Hours are GPU-hours, or node-hours (``unit``); seconds are of complete starts."""

    name: str
    unit: str
    least: int
    most: int
    starts: int
    jobs: int
    unfinished: int
    """Starts that came to no first step: their hours are in none of the others."""
    unfinished_hours: float
    p50: float | None
    p90: float | None
    own_seconds: float
    """Mean over the complete starts, as the next two: they add up to the mean start-up."""
    wait_seconds: float
    gap_seconds: float
    starts_per_job: float
    starts_per_day: float
    failures_per_day: float
    """Starts that ended before a first step, and restarts, by day from the first start of all to the last."""
    attempts_held: int
    """Attempts whose end is known."""
    held_hours: float
    share: Interval | None
    """Hours before first steps by hours held, of these attempts."""
    stages: list[StageGrowth]


class GrowthReport(msgspec.Struct, frozen=True):
    """``doubling``: the factor of the start-up time when the size doubles, fitted over all complete starts."""

    starts: int
    days: float
    sizes: list[SizeClass]
    doubling: Interval | None
    chosen: SizeClass | None
    """The largest class whose share is known, else the largest; or the one that was asked for."""
    said: str
    """The sentence about it."""


def size_of(start: Start) -> tuple[str, int]:
    """Unit and class of a start; the class is the power of two that it is at most."""
    count = max(start.gpus or start.nodes, 1)
    return ("GPUs" if start.gpus else "nodes"), 1 << (count - 1).bit_length()


def name_of(most: int) -> str:
    """A class in figures, such as ``33-64``."""
    return str(most) if most <= 2 else f"{most // 2 + 1:,}-{most:,}"


def analyse(starts: Sequence[Start], *, at: int = 0) -> GrowthReport:
    """All classes, the small ones first. ``at``: GPUs (or nodes) whose class the sentence is about; 0: the largest.
    Raises `NotFoundError` when no start has the size ``at``: nothing is told of sizes that nobody has seen."""
    days = max((max(s.began_us for s in starts) - min(s.began_us for s in starts)) / _DAY_US, 1.0) if starts else 1.0
    classes = defaultdict[tuple[str, int], list[Start]](list)
    for start in starts:
        classes[size_of(start)].append(start)
    sizes = [_class(unit, most, classes[unit, most], days) for unit, most in sorted(classes)]
    chosen = _chosen(sizes, at)
    return GrowthReport(len(starts), days, sizes, _doubling(starts), chosen, _said(chosen))


class Lost(msgspec.Struct, frozen=True):
    """What start-ups of one period lost of the GPU time that their jobs held, where the end of the run is known."""

    name: str
    attempts: int
    share: float
    stages: dict[str, float]
    """Their shares, own work and waiting; the rest of ``share`` lies between stages."""


def lost_by(starts: Iterable[Start], form: str) -> list[Lost]:
    """``form``: the names of the periods, as for `time.strftime`, of UTC. Only those in which attempts ended."""
    attempts = defaultdict[tuple[str, str], list[Start]](list)
    for one in starts:
        attempts[one.job, one.attempt].append(one)
    periods = defaultdict[str, list[Start]](list)
    for every in attempts.values():
        began = min(one.began_us for one in every)
        if 0 <= began < _LATEST_US and any(one.run_seconds is not None for one in every):
            periods[time.strftime(form, time.gmtime(began / 1e6))] += every
    found = []
    for name in sorted(periods):
        lost, held = _attempts(periods[name])
        if not sum(held):
            continue
        hours = defaultdict[str, float](float)
        for stage in (s for one in periods[name] if one.startup_seconds is not None for s in one.stages):
            hours[stage.stage] += stage.own_hours + stage.wait_hours
        shares = {stage: spent / sum(held) for stage, spent in sorted(hours.items(), key=lambda item: -item[1])}
        found.append(Lost(name, len(held), sum(lost) / sum(held), shares))
    return found


def _class(unit: str, most: int, starts: Sequence[Start], days: float) -> SizeClass:
    done = [one for one in starts if one.startup_seconds is not None]
    seconds = [one.startup_seconds or 0.0 for one in done]
    cost = sum(one.hours for one in done)
    mean = sum(seconds) / len(done) if done else 0.0
    jobs = {one.job for one in starts}
    lost, held = _attempts(starts)
    hours = sum(held)
    known = {(one.job, one.attempt) for one in starts if one.run_seconds is not None}
    of_known = [one for one in done if (one.job, one.attempt) in known]
    again = sum(one.cycle > 0 or bool(one.startup_seconds is None and one.ended) for one in starts)
    own, wait, gap = (
        (
            mean * sum(parts) / cost if cost else 0.0
            for parts in zip(*((one.own_hours, one.wait_hours, one.gap_hours) for one in done), strict=True)
        )
        if done
        else (0.0, 0.0, 0.0)
    )
    return SizeClass(
        name=name_of(most), unit=unit, least=most // 2 + 1, most=most, starts=len(starts), jobs=len(jobs),
        unfinished=len(starts) - len(done),
        unfinished_hours=sum(one.hours for one in starts if one.startup_seconds is None),
        p50=median(seconds) if done else None, p90=_p90(seconds) if done else None,
        own_seconds=own, wait_seconds=wait, gap_seconds=gap, starts_per_job=len(starts) / len(jobs),
        starts_per_day=len(starts) / days, failures_per_day=again / days, attempts_held=len(held), held_hours=hours,
        share=_ratio(lost, held) if done else None, stages=_stages(done, of_known, hours),
    )  # fmt: skip


def _attempts(starts: Iterable[Start]) -> tuple[list[float], list[float]]:
    """Hours before first steps, and hours held, of each attempt whose end is known. Not of those of which the scheduler
    alone knows: what their start-ups took nobody says."""
    found = defaultdict[tuple[str, str], list[Start]](list)
    for one in starts:
        found[one.job, one.attempt].append(one)
    lost, held = list[float](), list[float]()
    for every in found.values():
        ends = [one.began_us / 1e6 + one.run_seconds for one in every if one.run_seconds is not None]
        stages = {stage.stage for one in every for stage in one.stages}
        if not ends or (stages <= {"alloc"} and all(one.startup_seconds is None for one in every)):
            continue
        hours = sum(one.hours for one in every if one.startup_seconds is not None)
        ran = max(ends) - min(one.began_us for one in every) / 1e6
        lost.append(hours)
        held.append(max(ran * max(one.gpus or one.nodes for one in every) / 3600, hours))
    return lost, held


def _ratio(lost: Sequence[float], held: Sequence[float]) -> Interval | None:
    """The sum of one by the sum of the other, with the standard error of a ratio of sums."""
    if not (total := sum(held)):
        return None
    value, count = sum(lost) / total, len(held)
    if count < _FEWEST:
        return Interval(value)
    spread = sum((one - value * other) ** 2 for one, other in zip(lost, held, strict=True))
    error = _SURE * math.sqrt(spread * count / (count - 1)) / total
    return Interval(value, max(value - error, 0.0), min(value + error, 1.0))


def _stages(done: Sequence[Start], of_known: Sequence[Start], held: float) -> list[StageGrowth]:
    rows = defaultdict[str, list[tuple[Start, float]]](list)
    ratios = defaultdict[str, list[float]](list)
    for one in done:
        for stage in one.stages:
            rows[stage.stage].append((one, stage.seconds))
            if one.nodes > 1 and stage.median and stage.max is not None:
                ratios[stage.stage].append(stage.max / stage.median)
    own, wait = defaultdict[str, float](float), defaultdict[str, float](float)
    for one in of_known:
        for stage in one.stages:
            own[stage.stage] += stage.own_hours
            wait[stage.stage] += stage.wait_hours
    found = [
        StageGrowth(
            stage=name, starts=len(seen), p50=median(s for _, s in seen), p90=_p90([s for _, s in seen]),
            max_over_median=median(ratios[name]) if ratios[name] else None,
            own_share=own[name] / held if held else None, wait_share=wait[name] / held if held else None,
        )
        for name, seen in rows.items()
    ]  # fmt: skip
    return sorted(found, key=lambda stage: (-stage.p50, stage.stage))


def _doubling(starts: Iterable[Start]) -> Interval | None:
    """Least squares of the logarithms of start-up time and size. The larger unit alone: GPUs and nodes do not mix."""
    points = defaultdict[str, list[tuple[float, float]]](list)
    classes = defaultdict[str, set[int]](set)
    for one in starts:
        if one.startup_seconds and one.startup_seconds > _LEAST:
            unit, most = size_of(one)
            points[unit].append((math.log2(max(one.gpus or one.nodes, 1)), math.log2(one.startup_seconds)))
            classes[unit].add(most)
    unit = max(points, key=lambda unit: len(points[unit]), default="")
    if len(classes[unit]) < 3 or (count := len(points[unit])) < _FEWEST:
        return None
    x, y = zip(*points[unit], strict=True)
    slope, base = linear_regression(x, y)
    rest = sum((b - base - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (count - 2)
    middle = sum(x) / count
    error = _SURE * math.sqrt(rest / sum((a - middle) ** 2 for a in x))
    if abs(slope) + error > _STEEPEST:
        return None
    return Interval(2**slope, 2 ** (slope - error), 2 ** (slope + error))


def _chosen(sizes: Sequence[SizeClass], at: int) -> SizeClass | None:
    fit = [one for one in sizes if one.least <= at <= one.most] if at else sizes
    if at and not fit:
        names = ", ".join(f"{one.name} {one.unit}" for one in sizes)
        raise NotFoundError(f"no start-up has about {at} GPUs or nodes", hint=f"there are: {names or 'none'}")
    return max(fit, key=lambda one: (bool(one.share), one.unit == "GPUs", one.most), default=None)


def _said(size: SizeClass | None) -> str:
    if size is None or not size.share:
        never = size and size.unfinished == size.starts
        why = "no start-up came to a first step" if never else "no run's end is in the events (see sacct)"
        return f"how much of the GPU time this is, is not known: {why}"
    held = "GPU time" if size.unit == "GPUs" else "node time"
    text = f"at {size.name} {size.unit} {_percent(size.share)} of the {held} is lost to start-ups"
    lost = size.share.value
    worst = max(size.stages, key=lambda stage: stage.wait_share or 0.0, default=None)
    if worst and worst.wait_share and lost:
        text += f"; {100 * worst.wait_share / lost:.0f} % of that waits for others in {worst.stage}"
    return text


def _percent(share: Interval) -> str:
    if share.low is None or share.high is None:
        return f"{100 * share.value:.2g} % (few runs)"
    return f"{100 * share.value:.3g} % ({100 * share.low:.3g}-{100 * share.high:.3g})"


def _p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
