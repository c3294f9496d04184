"""Properties of the analysis: whatever the spans, the parts add up and nothing is negative."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, DataError
from bootseer.profile import analysis, events, intervals, starts
from bootseer.profile.analysis import analyse
from bootseer.profile.clock import Axis
from bootseer.profile.timeline import Timeline
from support.startups import StartUp

SECONDS = st.floats(-50, 200, allow_nan=False).map(lambda x: round(x, 3))
SPAN = st.tuples(
    st.sampled_from(["n0", "n1", "n2"]),
    st.sampled_from([*events.TOP_STAGES, *events.INIT_STAGES, "own"]),
    st.one_of(st.none(), SECONDS),
    st.one_of(st.none(), SECONDS),
    st.one_of(st.none(), st.integers(0, 3)),
    st.floats(-5, 5),
)


@given(spans=st.lists(SPAN, max_size=30), gpus=st.integers(0, 8))
def test_the_identity_holds_for_any_spans(spans, gpus):
    s = StartUp(gpus=gpus)
    parents = [""]
    for node, stage, begin, end, rank, step in spans:
        span_id = s.span(node, stage, begin, end, rank=rank, parent=parents[len(parents) // 2])
        parents.append(span_id)
        s.event("end", span_id, node, (begin or 0) + 1, wall_step=step)  # a duplicate, or the only end
    if not spans:
        return
    report = analyse(s.log())  # raises when an identity does not hold
    for node in report.nodes:
        assert min(node.own, node.wait, node.gap) >= 0
        assert node.own + node.wait + node.gap == pytest.approx(report.elapsed_seconds, abs=1e-6)
        assert all(cell.own is None or cell.own >= 0 for cell in node.stages.values())
        assert all(cell.wait >= 0 for cell in node.stages.values())
    assert all(stage.seconds >= 0 for stage in report.stages)
    shares = sum(stage.seconds for stage in report.stages)
    assert shares + report.gap_seconds == pytest.approx(report.elapsed_seconds, abs=1e-6)
    assert report.complete == (report.startup_seconds is not None)
    for change in report.what_if:
        assert change.saved_seconds >= 0
        assert change.startup_seconds >= -1e-6


def test_a_wrong_sum_is_an_error_and_not_a_report(monkeypatch):
    s = StartUp()
    s.span("n0", "image", 0, 1)
    s.span("n0", "first_step", 1, 2)
    monkeypatch.setattr(analysis, "_shares", lambda line, waits: dict.fromkeys([*line.stages, ""], 0))
    with pytest.raises(BootseerError, match="do not add up"):
        analyse(s.log())


PARTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(a=PARTS, b=PARTS)
def test_sets_of_time_agree_with_sets_of_points(a, b):
    def points(parts):
        return {t for x, y in parts for t in range(x, y)}

    left, right = intervals.union(a), intervals.union(b)
    assert points(left) == points(a)
    assert intervals.measure(left) == len(points(a))
    assert all(x[1] < y[0] for x, y in pairwise(left))
    assert points(intervals.subtract(left, right)) == points(a) - points(b)
    assert points(intervals.clip(left, 10, 40)) == points(a) & set(range(10, 40))


def test_a_wall_clock_that_is_set_during_start_up_moves_nothing():
    def report(step):
        s = StartUp()
        for node in ("n0", "n1"):
            moved = step if node == "n1" else 0.0
            for stage, begin, end, wall in (("image", 0, 10, 0.0), ("env", 10, 20, 0.0), ("first_step", 20, 30, moved)):
                span = s.span(node, stage, None, None)
                s.event("begin", span, node, begin, stage=stage)
                s.event("end", span, node, end, wall_step=wall)
        return analyse(s.log())

    still, moved = report(0.0), report(-3000.0)
    assert moved.startup_seconds == still.startup_seconds
    assert moved.nodes[1].own == still.nodes[1].own
    assert moved.problems.clock_spread_seconds == pytest.approx(3000)
    assert still.problems.clock_spread_seconds == 0


def test_nodes_whose_wall_clock_was_set_before_a_begin_stay_in_place():
    s = StartUp()
    for node, wall in (("n0", 0.0), ("n1", -40.0)):
        for stage, begin, end in (("image", 0, 10), ("env", 10, 20), ("init", 20, 25)):
            s.span(node, stage, begin, end)
        step = s.span(node, "first_step", None, None)
        s.event("begin", step, node, 25, stage="first_step", wall_step=wall)
        s.event("end", step, node, 30, wall_step=wall)
    report = analyse(s.log())
    assert report.startup_seconds == pytest.approx(30)
    assert [n.gap for n in report.nodes] == [0, 0]


def test_work_while_others_are_waited_for_is_work():
    s = StartUp()
    for node, image in (("n0", 10), ("n1", 30)):
        s.span(node, "image", 0, image)
        s.span(node, "env", 30, 40)
        s.span(node, "first_step", 40, 50)
    s.span("n0", "warm_up", 15, 20)
    n0 = analyse(s.log()).nodes[0]
    assert (n0.own, n0.wait, n0.gap) == (pytest.approx(35), pytest.approx(15), 0)


def test_what_if_saves_no_more_than_the_stages_share():
    s = StartUp()
    for i in range(5):
        s.span(f"n{i}", "image", 0, 50 if i == 0 else 10)
        s.span(f"n{i}", "env", 50 if i == 0 else 10, 110 if i == 1 else 60)  # no barrier: env runs beside n0's image
        s.span(f"n{i}", "first_step", 110, 111)
    report = analyse(s.log())
    assert report.stage("env").seconds == pytest.approx(60)
    assert report.stage("env").max == pytest.approx(100)
    change, replaced = report.what_if
    assert change.saved_seconds == pytest.approx(40 + min(60, 100 - 50))
    assert (replaced.name, replaced.saved_seconds) == ("a usual node for n1", pytest.approx(min(60, 100 - 50)))
    s.span("n5", "image", 0, 95)
    capped = analyse(s.log())
    assert capped.stage("env").seconds == pytest.approx(15)
    change, replaced = capped.what_if
    assert change.saved_seconds == pytest.approx(95 - 50 + 15)
    assert (replaced.name, replaced.saved_seconds) == ("a usual node for n5", pytest.approx(95 - 50))


def test_nodes_are_in_natural_order():
    s = StartUp()
    for node in ("n10", "n2", "a", "n1"):
        s.span(node, "env", 0, 1)
    assert [n.node for n in analyse(s.log()).nodes] == ["a", "n1", "n2", "n10"]


def test_while_one_node_still_runs_a_stage_the_others_wait():
    s = StartUp()
    s.span("n0", "image", 0, 10)
    s.span("n1", "image", 0, None)
    s.span("n2", "image", 0, 30)
    report = analyse(s.log())
    assert not report.complete
    assert report.nodes[0].wait == pytest.approx(20)
    assert report.nodes[1].stages["image"].state == "OPEN"
    assert report.stage("image").unfinished == 1


def test_10000_nodes_are_read_and_analysed_in_time(tmp_path):
    """The target is 30 s for 200,000 spans; a tenth of them must take less than a tenth of that, of a processor: how
    busy the machine is does not count."""
    import time

    s = StartUp()
    for i in range(1000):
        t = 0.0
        for place, stage in enumerate(("alloc", "image", "env", *events.INIT_STAGES) * 2):
            s.span(f"n{i}", stage, t, t + 1 + place % 3, rank=i)
            t += 3
    path = s.write(tmp_path / "e.jsonl")
    began = time.process_time()
    report = analyse(events.read(path))
    assert time.process_time() - began < 3
    assert len(report.nodes) == 1000


class Counted(list):
    """Counts how often all of it is gone through."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


@pytest.mark.parametrize("many", ["nodes", "starts"])
def test_the_spans_are_gone_through_as_often_for_many_as_for_few(many):
    def passes(count):
        made = [StartUp(f"j{number}") for number in range(count if many == "starts" else 1)]
        for number in range(count):
            one = made[number % len(made)]
            for stage in ("env", "wait", "first_step"):
                one.span(f"n{number}", stage, 0, 10 + number)
            one.span("n", "first_step", 0, 1)
        log = events.parse(line for one in made for line in one.lines())
        log.spans.lane = Counted(log.spans.lane)
        if many == "starts":
            assert len(list(starts.of(log))) == count
        else:
            Timeline(log.spans, Axis(log.spans))
        return log.spans.lane.passes

    assert passes(40) == passes(3)


def stages(count):
    return [{"stage": f"s{number}", "node": f"n{number}"} for number in range(count)]


def ranks(count):
    return [{"stage": "env", "rank": number} for number in range(count)] + [{"stage": "image"} for _ in range(count)]


def waits(count):
    return [{"stage": "env", "rank": number} for number in range(count)] + [{"stage": "wait"} for _ in range(count)]


@pytest.mark.parametrize("made", [stages, ranks, waits])
def test_what_a_few_lines_multiply_is_refused_at_once(made):
    s = StartUp()
    for number, about in enumerate(made(4000)):
        s.span(about.pop("node", "n0"), about.pop("stage"), number, number + 1, **about)
    log = s.log()
    began = time.monotonic()
    with pytest.raises(DataError, match="it is no start-up: its events have"):
        analyse(log)
    assert time.monotonic() - began < 20


def test_many_slow_nodes_cost_no_more_than_a_hundred():
    s = StartUp()
    for number in range(4_000):
        s.span(f"n{number}", "env", 0, 10 if number % 5 else 100)
        s.span(f"n{number}", "first_step", 200, 210)
    log = s.log()
    began = time.monotonic()
    report = analyse(log)
    assert len(report.stage("env").stragglers) == 800
    assert time.monotonic() - began < 10


def test_a_line_that_names_a_hundred_thousand_nodes_names_none_that_is_missing():
    s = StartUp()
    s.span("n1", "env", 0, 10, nodes=99_999, nodelist="n[1-99999]")
    report = analyse(s.log())
    assert (report.nodes_expected, report.nodes_missing, report.missing) == (99_999, 99_998, [])
    for number in range(2, 9):
        s.span(f"n{number}", "env", 0, 10)
    s.events[0]["attrs"] |= {"nodes": 2000, "nodelist": "n[1-2000]"}
    assert len(analyse(s.log()).missing) == 1992


def test_a_number_of_nodes_that_nobody_has_is_none():
    s = StartUp()
    s.span("n1", "env", 0, 10, nodes=1 << 40, ranks=1 << 40)
    report = analyse(s.log())
    assert (report.nodes_expected, report.ranks_expected) == (None, None)
