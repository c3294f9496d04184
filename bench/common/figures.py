"""Figures of a report, computed from its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bench.common.report import Report, Run

Say = Callable[[str], None]
SPEED = "mib_per_s"


class Figures:
    """Replaces the figures of ``report``. Of each that its runs do not allow it says which run is missing.

    A ``field`` is ``seconds`` or a key of a run's ``details``, ``bytes`` or ``stages``; runs that failed do not count.
    """

    def __init__(self, report: Report, say: Say) -> None:
        report.figures.clear()
        self.report, self._say = report, say

    def values(self, variant: str, field: str = "seconds") -> list[float]:
        """Of every run of ``variant`` that has the field."""
        runs = [run for run in self.report.runs if run.variant == variant and not run.failed]
        found = [{**run.stages, **run.details, **run.bytes, "seconds": run.seconds}.get(field) for run in runs]
        return [float(value) for value in found if value is not None]

    def add(self, name: str, target: str, values: Sequence[float], unit: str = "ratio", missing: str = "runs") -> None:
        """The median of ``values``; ``missing``: what to say when there are none."""
        if not values:
            self._say(f"no figure {name}: no {missing}")
            return
        value, n = statistics.median(values), len(values)
        self.report.figure(name, value, unit=unit, target=target, n=n, of="median" if n > 1 else "single")

    def median(
        self, name: str, target: str, variant: str, field: str = "seconds", *, unit: str = "ratio", scale: float = 1.0
    ) -> None:
        """The median of one field, ``scale`` times."""
        values = [value * scale for value in self.values(variant, field)]
        self.add(name, target, values, unit, missing=f"{field} of {variant}")

    def ratio(
        self, name: str, target: str, ours: str, *others: str, field: str = "seconds", of: str = "", unit: str = "ratio"
    ) -> None:
        """The median of ``ours`` divided by the largest of those of ``others`` (whose field is ``of``)."""
        mine, theirs = self.values(ours, field), [self.values(other, of or field) for other in others]
        theirs = [values for values in theirs if values]
        if not mine or not theirs:
            self._say(f"no figure {name}: no {field} of {ours if not mine else ' or '.join(others)}")
            return
        value = statistics.median(mine) / max(max(statistics.median(values) for values in theirs), 1e-9)
        n = min(len(values) for values in (mine, *theirs))
        self.report.figure(name, value, unit=unit, target=target, n=n, of="median" if n > 1 else "single")

    def rounds(self, name: str, target: str, ours: str, other: str) -> None:
        """The median of the ratios of single rounds."""
        self.add(name, target, paired(self.report.runs, ours, other), missing=f"round with {ours} and {other}")

    def gain(self, name: str, having: str, without: str, target: str = ">= 5") -> None:
        """The percentage of its time that a run saves by what ``without`` lacks: the median over rounds."""
        found = gains(self.report.runs, having, without)
        self.add(name, target, found, "%", missing=f"round with {having} and {without}")

    def show(self) -> None:
        """Print them."""
        for figure in self.report.figures:
            met = "met" if figure.met else "NOT MET"
            print(f"{figure.name:28} {figure.value:9.4g} {figure.unit}  n={figure.n}  target {figure.target}  {met}")


def paired(runs: Sequence[Run], ours: str, other: str) -> list[float]:
    """Seconds of ``ours`` divided by those of ``other``, for each round in which both ended well."""
    times = {(run.variant, run.n): run.seconds for run in runs if not run.failed and run.seconds}
    rounds = sorted(n for variant, n in times if variant == ours and (other, n) in times)
    return [times[ours, n] / times[other, n] for n in rounds]


def gains(runs: Sequence[Run], having: str, without: str) -> list[float]:
    """The percentages of its time that ``having`` saves, for each round in which both ended well."""
    return [100 * (1 - ratio) for ratio in paired(runs, having, without)]
