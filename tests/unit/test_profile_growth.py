"""Growth with size: shares of the time held, classes of sizes, the fit, and what is said without enough data."""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path

import msgspec
import pytest

from bootseer.errors import NotFoundError
from bootseer.profile import chart, growth, regression, starts
from bootseer.profile.starts import StageRow, Start
from support import forked
from support.startups import StartUp

FIRST = 1_767_225_601 * 10**6
DAY = 86_400


def start(
    job: str = "a", attempt: str = "0", cycle: int = 0, *, gpus: int = 8, nodes: int = 1, seconds: float | None = 100.0,
    wait: float = 0.25, day: float = 0.0, run: float | None = None, ended: str = "",
) -> Start:  # fmt: skip
    """A start all of whose time is one stage ``env``, a part ``wait`` of it waiting."""
    took = 100.0 if seconds is None else seconds
    hours = (gpus or nodes) * took / 3600
    own, waited = hours * (1 - wait), hours * wait
    env = StageRow("env", took, own, waited, took / 2, took, "n1", [])
    return Start(
        job, attempt, cycle, False, "", FIRST + round(day * DAY * 1e6), None, seconds, took, gpus, nodes, 0, hours,
        own, waited, 0.0, FIRST, ended, run, [env],
    )  # fmt: skip


def test_figures_computed_by_hand() -> None:
    rows = [
        start("a", gpus=64, nodes=8, run=10_000),
        start("a", "1", gpus=64, nodes=8, run=10_000, day=2, seconds=300),
        start("b", gpus=64, nodes=8, day=4),  # no end is known: it is in no share
        start("c", gpus=1, seconds=10, run=1000),
    ]
    report = growth.analyse(rows)
    small, large = report.sizes
    assert (small.name, large.name, large.unit, large.least, large.most) == ("1", "33-64", "GPUs", 33, 64)
    assert (large.starts, large.jobs, large.attempts_held, report.days) == (3, 2, 2, 4.0)
    assert large.share is not None
    assert large.share == growth.Interval(pytest.approx(400 / 20_000))  # two attempts: no interval
    assert large.held_hours == pytest.approx(64 * 20_000 / 3600)
    assert (large.p50, large.starts_per_day, large.starts_per_job) == (100.0, 0.75, 1.5)
    (env,) = large.stages
    assert (env.own_share, env.wait_share) == (pytest.approx(0.015), pytest.approx(0.005))
    assert env.max_over_median == 2.0
    assert large.own_seconds + large.wait_seconds + large.gap_seconds == pytest.approx(500 / 3)
    assert report.said.startswith("at 33-64 GPUs 2 % (few runs) of the GPU time is lost to start-ups; 25 % of that")
    assert growth.analyse(rows, at=1).said.startswith("at 1 GPUs 1 % ")


def test_a_truth_with_noise_is_found_within_its_interval() -> None:
    """Start-ups that take 1.5 times as long when the size doubles, and 2 % of what is held; 200 samples of 60."""
    rand = random.Random(7)
    missed_doubling = missed_share = 0
    for _ in range(200):
        rows = []
        for number in range(60):
            gpus = 8 << rand.randrange(5)
            took = 20 * 1.5 ** math.log2(gpus) * rand.lognormvariate(0, 0.3)
            run = took / 0.02 * rand.uniform(0.8, 1.2)
            rows.append(start(f"j{number}", gpus=gpus, nodes=gpus // 8, seconds=took, run=run))
        report = growth.analyse(rows)
        found = report.doubling
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        missed_doubling += not found.low <= 1.5 <= found.high
        share = report.sizes[-1].share
        assert share is not None
        missed_share += share.low is None or share.high is None or not share.low <= 0.02 <= share.high
    assert missed_doubling < 30  # 5 % of them, had they been infinitely many starts
    assert missed_share < 50  # of about 12 attempts each


def test_restarts_of_one_attempt_share_what_it_held() -> None:
    rows = [start(run=1000), start(cycle=1, seconds=50), start(cycle=2, seconds=None, ended="exit code 1")]
    (size,) = growth.analyse(rows).sizes
    assert size.share is not None
    assert size.share.value == pytest.approx(0.15)
    assert (size.unfinished, size.attempts_held, size.failures_per_day) == (1, 1, 2.0)
    assert size.unfinished_hours == pytest.approx(8 * 100 / 3600)


def test_without_enough_nothing_is_made_up() -> None:
    none = growth.analyse([])
    assert (none.sizes, none.doubling) == ([], None)
    one = growth.analyse([start()])
    assert one.doubling is None
    assert one.sizes[0].share is None
    assert "is not known" in one.said
    never = growth.analyse([start(seconds=None)])
    assert (never.sizes[0].p50, never.sizes[0].own_seconds, never.sizes[0].unfinished) == (None, 0.0, 1)
    with pytest.raises(NotFoundError, match="no start-up has about 1024 GPUs"):
        growth.analyse([start()], at=1024)  # no extrapolation
    mixed = growth.analyse([start(gpus=0, nodes=4), start("b", gpus=4)])
    assert [(one.name, one.unit) for one in mixed.sizes] == [("3-4", "GPUs"), ("3-4", "nodes")]
    same = growth.analyse([start(f"j{n}", gpus=8) for n in range(20)])
    assert same.doubling is None  # one size has no slope


def test_runs_of_which_the_scheduler_alone_knows_are_in_no_share() -> None:
    """What their start-ups took is not known: the accounts of all jobs beside the events of a few thinned it."""
    seen = start("a", gpus=64, run=10_000)
    alloc = StageRow("alloc", 1, 0.1, 0, 1, 1, "n1", [])
    known = [
        msgspec.structs.replace(start(job, gpus=64, run=90_000, seconds=None), stages=found)
        for job, found in (("b", [alloc]), ("c", []))
    ]
    (size,) = growth.analyse([seen, *known]).sizes
    assert (size.starts, size.attempts_held, size.share) == (3, 1, growth.Interval(pytest.approx(0.01)))
    (week,) = growth.lost_by([seen, *known], "%G-W%V")
    assert (week.attempts, week.share) == (1, pytest.approx(0.01))


@pytest.mark.parametrize("ended", ["", "failed"])
def test_a_size_that_came_to_no_first_step_has_no_share(ended: str) -> None:
    """It was said to have lost 0 % of its time."""
    lost = [start(f"x{n}", gpus=64, run=10_000, seconds=None, ended=ended, day=n) for n in range(6)]
    alone = growth.analyse(lost)
    assert alone.sizes[0].share is None
    assert alone.said == "how much of the GPU time this is, is not known: no start-up came to a first step"
    assert growth.analyse([start("a", gpus=8, run=10_000), *lost]).said.startswith("at 5-8 GPUs 1 % ")


def test_a_run_that_held_less_than_its_start_lost_all() -> None:
    (size,) = growth.analyse([start(run=1.0)]).sizes
    assert size.share == growth.Interval(1.0)


def test_the_end_of_a_run_comes_from_the_events(tmp_path: Path) -> None:
    made = StartUp("a", gpus=8)
    made.span("n1", "env", 0, 40)
    made.span("n1", "init", 40, 60, run_seconds=960.0)
    made.span("n1", "first_step", 60, 100)
    made.write(tmp_path / "a.jsonl")
    (row,) = starts.rows([tmp_path])
    assert row.run_seconds == pytest.approx(1000)
    kept = tmp_path / "kept.parquet"
    kept.write_bytes(starts.compact([tmp_path])[0])
    assert starts.rows([kept]) == [row]
    report = growth.analyse([row])
    assert report.sizes[0].share == growth.Interval(pytest.approx(0.1))
    argv, environ = ("profile", "growth", tmp_path), {**os.environ, "COLUMNS": "140"}
    text = forked.cli(*argv, env=environ).stdout
    assert "at 5-8 GPUs 10 % (few runs) of the GPU time is lost to start-ups" in text
    told = forked.cli(*argv, "--json", env=environ)
    assert json.loads(told.stdout) == msgspec.to_builtins(report)


def test_check_compares_like_sizes() -> None:
    small = [start(attempt=str(n), gpus=8, seconds=10, day=n) for n in range(3)]
    large = [start(attempt=f"l{n}", gpus=1024, nodes=128, seconds=100, day=n) for n in range(3)]
    verdict = regression.check(start(attempt="new", gpus=1024, nodes=128, seconds=105, day=9), small + large)
    assert not verdict.slower
    assert verdict.rows[0].starts == 3
    with pytest.raises(NotFoundError, match="on 513-1,024 GPUs"):
        regression.check(start(attempt="new", gpus=1024, nodes=128), small)


def test_many_starts_take_no_time() -> None:
    rows = [start(f"j{n}", gpus=1 << n % 11, run=5000.0 + n) for n in range(400)]
    began = time.process_time()
    growth.analyse(rows)
    assert time.process_time() - began < 5  # about 5 ms; a square of it would be seen


@pytest.mark.parametrize("odd", [-1.0, 5e-324, 1e-9])
def test_absurd_rows_end_no_report(odd: float) -> None:
    rows = [start(f"j{n}", gpus=1 << n % 5, seconds=odd if n % 2 else 1e15) for n in range(40)]
    assert growth.analyse(rows).starts == 40


def test_the_sentence_is_of_gpus_where_some_are_named() -> None:
    rows = [start(gpus=0, nodes=64, run=9999), start("b", gpus=4, run=1000, attempt="1")]
    assert growth.analyse(rows).said.startswith("at 3-4 GPUs 10 %")


def test_the_share_lost_by_week_and_stage() -> None:
    rows = [
        start("a", gpus=64, run=10_000),
        start("a", cycle=1, gpus=64, seconds=300, day=0.01),  # of the same attempt, whose end is known
        start("b", gpus=64, run=1000, day=7),
        start("c", gpus=64, run=1000, day=7, seconds=None),  # no first step: what it held counts, nothing is lost
        start("d", gpus=64, day=14),  # no end is known
        start("e", gpus=64, run=1000, day=1e9),
    ]
    first, second = growth.lost_by(rows, "%G-W%V")
    assert (first.name, first.attempts, first.share) == ("2026-W01", 1, pytest.approx(400 / 10_000))
    assert (second.name, second.attempts, second.share) == ("2026-W02", 2, pytest.approx(100 / 2000))
    assert first.stages == {"env": pytest.approx(0.04)}
    drawn = chart.stages([(one.name, one.stages | {"<own>": 0.01}) for one in (first, second)])
    assert drawn.count("<rect") == 4
    assert "<own>" not in drawn
    assert chart.stages([]) == ""
