"""One start-up of which every figure was worked out by hand, and what becomes of it when its events suffer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import NotFoundError
from bootseer.profile import events
from bootseer.profile.analysis import analyse
from bootseer.profile.report import JobReport, Problems

GOLDEN = Path(__file__).parents[1] / "golden/events"
LINES = (GOLDEN / "start.jsonl").read_bytes().splitlines(keepends=True)
EXPECTED = json.loads((GOLDEN / "start.expected.json").read_text())


def near(value: float, by: float = 1e-6) -> Any:
    return pytest.approx(value, abs=by)


def changed(change: Callable[[dict[str, Any]], object]) -> JobReport:
    """The report of the golden events without those of which ``change`` returns False; it may alter them."""
    parsed = map(json.loads, LINES)
    return analyse(events.parse([json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in parsed
                                 if change(event) is not False]))  # fmt: skip


def adds_up(report: JobReport) -> None:
    cost, stages = report.cost, report.stages
    assert sum(stage.own_hours for stage in stages) == near(cost.own, 1e-9)
    assert sum(stage.wait_hours for stage in stages) == near(cost.wait, 1e-9)
    assert cost.own + cost.wait + cost.gap == near(cost.total, 1e-9)
    assert cost.total == near(
        sum(n.gpus or not report.gpus for n in report.nodes) * report.elapsed_seconds / 3600, 1e-9
    )
    assert sum(stage.seconds for stage in stages) + report.gap_seconds == near(report.elapsed_seconds)
    figures = [f for node in report.nodes for f in (node.own, node.wait, node.gap)]
    assert min([0.0, *figures, *(h for stage in stages for h in (stage.own_hours, stage.wait_hours))]) >= 0


def test_every_figure() -> None:
    report = analyse(events.parse(LINES))
    adds_up(report)
    for name in ("gpus", "ranks", "ranks_expected", "ranks_ready", "nodes_expected"):
        assert getattr(report, name) == EXPECTED[name], name
    assert (report.startup_seconds, report.queue_seconds) == (near(EXPECTED["seconds"]), near(EXPECTED["queue"]))
    assert (report.gap_seconds, report.missing, report.nodes_missing) == (near(EXPECTED["gap"]), [], 0)
    assert report.problems == Problems()
    for name, seconds in EXPECTED["cost"].items():
        assert 3600 * getattr(report.cost, name) == near(seconds), name
    assert [stage.stage for stage in report.stages] == list(EXPECTED["stages"])
    for stage in report.stages:
        want = EXPECTED["stages"][stage.stage]
        found = (stage.seconds, 3600 * stage.own_hours, 3600 * stage.wait_hours, stage.median, stage.max)
        assert found == tuple(near(want[name]) for name in ("seconds", "own", "wait", "median", "max")), stage.stage
        assert [stage.slowest, stage.slowest_rank] == want["slowest"]
        assert stage.ratio == near(want["max"] / want["median"])
    assert [node.node for node in report.nodes] == list(EXPECTED["nodes"])
    for node in report.nodes:
        want = EXPECTED["nodes"][node.node]
        assert (node.own, node.wait, node.gap, node.ready) == tuple(
            near(want[name]) for name in ("own", "wait", "gap", "ready")
        )
        assert {name: cell.wait for name, cell in node.stages.items() if name in want["waits"]} == {
            name: near(seconds) for name, seconds in want["waits"].items()
        }


@given(data=st.data())
def test_lines_removed_repeated_reordered_and_torn(data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(range(len(LINES))), unique=True, min_size=1))
    lines = [LINES[number] for number in kept]
    again = data.draw(st.permutations(lines + data.draw(st.lists(st.sampled_from(lines), max_size=9))))
    torn = data.draw(st.integers(0, 150))
    log = events.parse([*again, again[0][:torn]])
    try:
        report = analyse(log)
    except NotFoundError:
        assert not log.spans
        return
    adds_up(report)
    steps = sum(b'"stage":"first_step"' in line for line in lines)
    assert report.ranks_ready <= steps
    if report.startup_seconds is not None and report.ranks_expected:
        assert report.ranks_ready == 4
    if len(kept) == len(LINES):
        whole = analyse(events.parse(LINES))
        assert report.cost == whole.cost
        assert report.stages == whole.stages


def test_no_order_and_no_repetition_changes_a_figure() -> None:
    whole, backward = analyse(events.parse(LINES)), analyse(events.parse([*LINES[::-1], *LINES]))
    assert (backward.stages, backward.cost, backward.startup_seconds) == (
        whole.stages,
        whole.cost,
        whole.startup_seconds,
    )
    assert backward.problems == Problems(duplicates=len(LINES))


@pytest.mark.parametrize("ahead", [0.2, -0.2, 3600, -3600])
def test_clocks_that_are_off(ahead: float) -> None:
    def move(event: dict[str, Any]) -> None:
        if event["node"] == "n2":
            event["wall"] += round(ahead * 1e9)

    report = changed(move)
    adds_up(report)
    far = abs(ahead) > 1
    off = 0.001 if far else 0.21  # an offset that nothing proves stays; no figure is wrong by more than it
    assert report.startup_seconds == near(90, off)
    assert bool(report.problems.clocks_ahead) is far
    for stage in report.stages:
        want = EXPECTED["stages"][stage.stage]
        assert (3600 * stage.own_hours, 3600 * stage.wait_hours) == (
            near(want["own"], 8 * off),
            near(want["wait"], 8 * off),
        )
        assert (stage.max, stage.slowest) == (near(want["max"], off), want["slowest"][0]) or want["max"] == want[
            "median"
        ]
