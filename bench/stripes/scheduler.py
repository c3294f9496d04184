"""What the parts of the read scheduler are worth: the same simulated reads with and without one of them.

    scripts/bench scheduler [--quick] [--parts A,B,...] [--runs N] [--append] [--out report.json]

The real scheduler decides; DataNodes and time are simulated (`support.readsim`), so that a busy machine
disturbs only the case ``cpu``. A run is one seed: its ``stages`` are the seconds of all cases of `scheduler_cases`.
``gain_PART`` is the percentage of its time that the case which needs the part most saves by it: the median over seeds.
`scheduler_parts` lists the parts. The table also tells what is worse with a part.
"""

from __future__ import annotations

import contextlib
import logging
import random
import statistics
import sys
from collections.abc import Iterator

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, chosen, say
from bench.common.report import Report, Run
from bench.stripes.scheduler_cases import CASES
from bench.stripes.scheduler_parts import PARTS

WITH = "with"


def run(variant: str, seed: int) -> Run:
    """All cases with one seed."""
    stages = {case.name: case.seconds(random.Random(f"{case.name} {seed}")) for case in CASES}
    return Run(variant=variant, n=seed, seconds=sum(stages.values()), stages=stages)


def gains(runs: list[Run], part: str) -> dict[str, float]:
    """By case, the median of the percentages of its time that it saves by ``part``."""
    with_ = {run.n: run.stages for run in runs if run.variant == WITH}
    without = {run.n: run.stages for run in runs if run.variant == f"without:{part}"}
    both = sorted(with_.keys() & without.keys())
    return {
        case.name: statistics.median(100 * (1 - with_[n][case.name] / without[n][case.name]) for n in both)
        for case in CASES
        if both and all(case.name in stages[n] for stages in (with_, without) for n in both)
    }


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``."""
    made = Figures(report, say)
    for part in PARTS:
        if found := gains(report.runs, part.name):
            n, best = len(made.values(f"without:{part.name}")), round(max(found.values()), 1)
            report.figure(f"gain_{part.name}", best, unit="%", target=">= 5", n=n, of="median")
    return made


def table(runs: list[Run]) -> Iterator[str]:
    """A line per part, in Markdown."""
    yield "| part | without it | cases that gain or lose 2 % and more by it |"
    yield "|---|---|---|"
    for part in PARTS:
        found = sorted(gains(runs, part.name).items(), key=lambda item: -item[1])
        if found:
            told = ", ".join(f"{name} {gain:+.0f} %" for name, gain in found if abs(gain) >= 2)
            yield f"| {part.name} | {part.without} | {told or 'none'} |"


def _run(options: Options, report: Report) -> None:
    logging.disable(logging.WARNING)  # of DataNodes that are frozen on purpose
    names = chosen(options.parts, [part.name for part in PARTS])
    again = {WITH, *(f"without:{name}" for name in names)}
    report.runs = [run for run in report.runs if run.variant not in again]
    for seed in range(1, options.runs + 1):
        for part in (None, *(part for part in PARTS if part.name in names)):
            name = f"without:{part.name}" if part else WITH
            say(f"{name}, seed {seed}")
            with part.taken_away() if part else contextlib.nullcontext():
                report.runs.append(run(name, seed))
    print("\n".join(table(report.runs)))


if __name__ == "__main__":
    parser = invocation.parser("scheduler", __doc__, quick="two seeds", runs=(5, 2), append=True)
    parser.add_argument("--parts", default="", help=f"of: {','.join(part.name for part in PARTS)}")
    sys.exit(invocation.carry_out(parser, _run, compute))
