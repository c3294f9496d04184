"""What bench/scheduler computes, from made-up runs; and that each part it takes away is there."""

import sys
from pathlib import Path

import pytest

from bootseer.report import Report, Run

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports modules of bench/ by name, and forgets them."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield __import__
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", None)).startswith(f"{BENCH}/")]:
        del sys.modules[name]


def test_the_gain_of_a_part_is_that_of_the_case_that_needs_it_most(bench):
    scheduler = bench("scheduler")
    part, other = (part.name for part in scheduler.PARTS[:2])
    runs = []
    for seed, seconds in enumerate((1.0, 2.0, 4.0)):
        stages = {case.name: seconds for case in scheduler.CASES}
        runs.append(Run(variant="with", n=seed, stages=stages))
        runs.append(Run(variant=f"without:{part}", n=seed, stages=stages | {"slow": 2 * seconds, "two": 0.8 * seconds}))
        runs.append(Run(variant=f"without:{other}", n=seed, stages=stages))
    document = Report(name="scheduler", runs=runs)
    scheduler.compute(document)
    figures = {figure.name: figure for figure in document.figures}
    assert {name: (figure.value, figure.met) for name, figure in figures.items()} == {
        f"gain_{part}": (50.0, True),
        f"gain_{other}": (0.0, False),
    }
    *_, first, second = scheduler.table(runs)
    assert first.endswith("| slow +50 %, two -25 % |")
    assert second.endswith("| none |")


def test_every_part_can_be_taken_away(bench):
    cases = {case.name: case for case in bench("_scheduler_cases").CASES}
    for part in bench("_scheduler_parts").PARTS:
        with part.taken_away():
            assert cases["quick"].seconds(bench("random").Random(1)) > 0
