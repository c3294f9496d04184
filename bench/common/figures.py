"""Figures computed from the runs of a report, and those of bench/image (whose runs may be of several invocations)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from bench.image.checkout import BEFORE
from bootseer.demo.report import Report, Run

Say = Callable[[str], None]


class Medians:
    """Medians over the runs of a variant that ended well. `Missing` when there is none."""

    def __init__(self, runs: list[Run]) -> None:
        self._runs = [run for run in runs if not run.failed]

    def of(self, variant: str, field: str = "seconds") -> float:
        """``field``: ``seconds`` or a key of ``details`` or ``bytes``."""
        if not (values := self._values(variant, field)):
            raise Missing(f"variant {variant} has no {field}")
        return statistics.median(values)

    def count(self, *variants: str, field: str = "seconds") -> int:
        """Runs that say ``field``, of the variant with the fewest."""
        return min(len(self._values(variant, field)) for variant in variants)

    def _values(self, variant: str, field: str) -> list[float]:
        of = [{**run.details, **run.bytes, "seconds": run.seconds} for run in self._runs if run.variant == variant]
        values = [one.get(field) for one in of]
        return [float(value) for value in values if value is not None]


SPEED = "mib_per_s"


def ratio(report: Report, name: str, target: str, ours: str, others: Sequence[str], field: str = SPEED) -> None:
    """A figure: the median of ``ours`` divided by the largest of those of ``others`` that have runs."""
    runs = Medians(report.runs)
    others = tuple(other for other in others if runs.count(other, field=field)) or others
    value = runs.of(ours, field) / max(runs.of(other, field) for other in others)
    report.figure(name, value, unit="ratio", target=target, n=runs.count(ours, *others, field=field), of="median")


def make(report: Report, makers: Iterable[Callable[[], None]], say: Say) -> None:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    report.figures.clear()
    for maker in makers:
        try:
            maker()
        except Missing as exc:
            say(f"no figure: {exc}")


class Missing(Exception):
    """A figure cannot be computed: says which runs it lacks."""


def rename(runs: list[Run]) -> None:
    """Reports of when there were two drivers say which of them a start went through: FUSE is the one that stayed."""
    for run in runs:
        run.variant = run.variant.replace("-fuse", "")


def paired(runs: list[Run], ours: str, other: str) -> list[float]:
    """Seconds of ``ours`` divided by those of ``other``, for each round in which both ended well."""
    times = {(run.variant, run.n): run.seconds for run in runs if not run.failed and run.seconds}
    rounds = sorted(n for variant, n in times if variant == ours and (other, n) in times)
    return [times[ours, n] / times[other, n] for n in rounds]


def show(report: Report) -> None:
    """Print the figures."""
    for figure in report.figures:
        met = "met" if figure.met else "NOT MET"
        print(f"{figure.name:28} {figure.value:9.4f} {figure.unit}  n={figure.n}  target {figure.target}  {met}")


def compute(report: Report, say: Say) -> None:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    report.figures.clear()
    rename(report.runs)
    runs = Medians(report.runs)

    def ratio(name: str, target: str, ours: str, other: str, field: str = "seconds") -> None:
        value = runs.of(ours, field) / max(runs.of(other, field), 1e-9)
        n = runs.count(ours, other, field=field)
        report.figure(name, value, unit="ratio", target=target, n=n, of="median")

    def single(name: str, target: str, variant: str, field: str, unit: str = "ratio") -> None:
        n = runs.count(variant, field=field)
        report.figure(name, runs.of(variant, field), unit=unit, target=target, n=n, of="median")

    def slow(name: str, target: str) -> None:
        """Of the reads that a start makes where nothing was read ahead of it."""
        value = runs.of("hot", "slow_faults") / runs.of("record", "reads")
        n = runs.count("hot", "record", field="reads")
        report.figure(name, value, unit="ratio", target=target, n=n, of="median")

    def listed(name: str, target: str) -> None:
        """Read ahead, and touched by no start."""
        n = int(runs.of("page-list", "starts"))
        report.figure(name, runs.of("page-list", "unused"), unit="ratio", target=target, n=n, of="median")

    def complete(name: str, target: str) -> None:
        ours, plain = "read-complete", "read-complete-plain"
        values = [
            runs.of(ours, "sequential_mb_per_s") / runs.of(plain, "sequential_mb_per_s"),
            runs.of(plain, "us_per_4k") / runs.of(ours, "us_per_4k"),
        ]
        report.figure(name, min(values), unit="ratio", target=target, n=runs.count(ours, plain), of="median")

    def before(name: str, target: str, ours: str) -> None:
        if not (ratios := paired(report.runs, ours, f"{ours}{BEFORE}")):
            raise Missing(f"no round has both {ours} and {ours}{BEFORE}")
        say(f"{name}: {' '.join(f'{one:.3f}' for one in ratios)}")
        report.figure(name, statistics.median(ratios), unit="ratio", target=target, n=len(ratios), of="median")

    wanted: list[tuple[str, str, Callable[..., None], tuple[str, ...]]] = [
        ("readiness_vs_local", "<= 1.3", ratio, ("hot", "local")),
        ("readiness_vs_full_pull", "<= 0.0667", ratio, ("hot", "containerd")),
        ("readiness_vs_nydus", "<= 0.4", ratio, ("hot", "nydus")),
        ("readiness_vs_nydus_10ms", "<= 0.4", ratio, ("hot-10ms", "nydus-10ms")),
        ("stall_vs_on_demand", "<= 0.02", ratio, ("hot", "on-demand", "stall_seconds")),
        ("slow_faults", "<= 0.01", slow, ()),
        ("waste", "<= 0.2", single, ("record", "waste")),
        ("readahead_waste", "<= 0.2", listed, ()),
        ("complete_vs_erofs", ">= 0.97", complete, ()),
        ("filled_vs_erofs", ">= 0.6", ratio, ("read-filled", "read-filled-plain", "sequential_mb_per_s")),
        ("filled_random_us", "<= 30", single, ("read-filled", "us_per_4k", "us")),
        ("recording_overhead", "<= 1.02", ratio, ("warm", "warm-norecord")),
        ("conversion_vs_tools", "<= 1", ratio, ("convert", "convert-tools")),
    ]
    for variant in dict.fromkeys(run.variant for run in report.runs):
        ours = variant.removesuffix(BEFORE)
        if ours not in (variant, "record"):  # recordings are no pairs
            wanted.append((f"{ours}_vs_before", "<= 1.03", before, (ours,)))
    for name, target, add, words in wanted:
        try:
            add(name, target, *words)
        except Missing as exc:
            say(f"no figure {name}: {exc}")
