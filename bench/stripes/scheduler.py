"""What the parts of the read scheduler are worth: the same simulated reads with and without one of them.

    scripts/bench scheduler [--quick] [--parts A,B,...] [--runs N] [--append] [--out report.json]

The real scheduler decides; DataNodes and time are simulated (`support.readsim`), so that a busy machine
disturbs only the case ``cpu``. A run is one seed: its ``stages`` are the seconds of all cases of `scheduler_cases`.
``gain_PART`` is the percentage of its time that the case which needs the part most saves by it: the median over seeds.
`scheduler_parts` lists the parts. The table also tells what is worse with a part.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.common import figures, invocation
from bench.stripes.scheduler_cases import CASES
from bench.stripes.scheduler_parts import PARTS
from bootseer.demo.report import Report, Run

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


def compute(document: Report) -> None:
    """Replace the figures of ``document``."""
    document.figures.clear()
    for part in PARTS:
        if found := gains(document.runs, part.name):
            count = sum(run.variant == f"without:{part.name}" for run in document.runs)
            best = round(max(found.values()), 1)
            document.figure(f"gain_{part.name}", best, unit="%", target=">= 5", n=count, of="median")


def table(runs: list[Run]) -> Iterator[str]:
    """A line per part, in Markdown."""
    yield "| part | without it | cases that gain or lose 2 % and more by it |"
    yield "|---|---|---|"
    for part in PARTS:
        found = sorted(gains(runs, part.name).items(), key=lambda item: -item[1])
        if found:
            told = ", ".join(f"{name} {gain:+.0f} %" for name, gain in found if abs(gain) >= 2)
            yield f"| {part.name} | {part.without} | {told or 'none'} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--runs", type=int, help="seeds (default 5, quick 2)")
    parser.add_argument("--parts", default=",".join(names), help="comma-separated, of: %(default)s")
    parser.add_argument("--append", action="store_true", help="keep the runs of other parts that stand in the report")
    parser.add_argument("--out", type=Path, help="the report")
    options = parser.parse_args()
    options.runs = options.runs or (2 if options.quick else 5)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(names):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    return options


def _run(options: argparse.Namespace) -> None:
    logging.disable(logging.WARNING)  # of DataNodes that are frozen on purpose
    document = invocation.document("scheduler", options)
    chosen = [part for part in PARTS if part.name in options.parts]
    again = {WITH, *(f"without:{part.name}" for part in chosen)}
    document.runs = [run for run in document.runs if run.variant not in again]
    for seed in range(1, options.runs + 1):
        for part in (None, *chosen):
            name = f"without:{part.name}" if part else WITH
            invocation.say(f"{name}, seed {seed}")
            with part.taken_away() if part else contextlib.nullcontext():
                document.runs.append(run(name, seed))
    compute(document)
    print("\n".join(table(document.runs)))
    figures.show(document)
    if options.out:
        document.write(options.out)


if __name__ == "__main__":
    sys.exit(invocation.main(_run, _options()))
