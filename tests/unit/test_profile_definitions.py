"""One test for each definition in docs/reference/definitions.md, named after it."""

import random
import re
from pathlib import Path

import pytest

from bootseer.errors import ConfigError, NotFoundError
from bootseer.profile import events, hostlist
from bootseer.profile.analysis import analyse, find_stragglers, repeat_offenders
from support.startups import StartUp

PAGE = Path(__file__).parents[2] / "docs/reference/definitions.md"


def near(value, abs=1e-6):
    return pytest.approx(value, abs=abs)


def start(nodes=2, job="job", **kwargs):
    """Barriers after image (10 s) and env (20 s), a first step of 5 s; ends at 35 s."""
    s = StartUp(job, **kwargs)
    for i in range(nodes):
        s.span(f"n{i}", "image", 0, 10)
        s.span(f"n{i}", "env", 10, 30)
        s.span(f"n{i}", "first_step", 30, 35, rank=i)
    return s


def every(log):
    return [analyse(log, identity) for identity in log.identities()]


def test_every_definition_has_a_test():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.M)
    assert len(headings) > 15
    for heading in headings:
        name = "test_" + re.sub(r"\W+", "_", heading.lower())
        assert name in globals(), heading


def test_stages():
    assert (*events.TOP_STAGES, *events.INIT_STAGES) == (
        "queue", "alloc", "image", "env", "init", "import", "dist_init", "model_init", "optimizer_init",
        "data_loader_init", "checkpoint_load", "compile", "first_step",
    )  # fmt: skip
    s = start(1)
    env = s.span("n0", "env", 10, 30)
    deep = s.span("n0", "pip", 11, 20, parent=env)
    s.span("n0", "wheel", 12, 13, parent=deep)
    s.span("n0", "warm_up", 30, 31)
    assert [stage.stage for stage in analyse(s.log()).stages] == ["image", "env", "first_step", "warm_up"]


def test_queue_costs_no_gpu_time():
    s = start()
    s.span("scheduler", "queue", -600, -2)
    report = analyse(s.log())
    assert report.queue_seconds == near(598)
    assert report.startup_seconds == near(37)
    assert [n.node for n in report.nodes] == ["n0", "n1"]
    assert report.cost.total == near(2 * 8 * 37 / 3600)
    assert report.nodes[0].gap == near(2)


def test_start_up_end():
    s = start()
    s.span("n1", "first_step", 30, 44, rank=2)
    s.span("n1", "training", 44, 1000, rank=2)
    assert analyse(s.log()).startup_seconds == near(44)
    s.span("n0", "first_step", 30, None, rank=3)
    report = analyse(s.log())
    assert report.startup_seconds is None
    assert not report.complete
    assert report.elapsed_seconds >= 44

    still = start(3)
    still.span("n3", "image", 0, 10)
    still.span("n3", "env", 10, None)
    assert analyse(still.log()).startup_seconds is None
    still.span("n4", "init", 30, None)  # nobody says that it emits its first step
    still.events = [event for event in still.events if event["node"] != "n3"]
    assert analyse(still.log()).startup_seconds == near(35)


def test_expected_ranks():
    s = StartUp()
    for rank in range(3):
        s.span("n0", "first_step", 0, 10, rank=rank, ranks=4)
    report = analyse(s.log())
    assert (report.ranks_expected, report.ranks_ready, report.startup_seconds) == (4, 3, None)
    assert analyse(s.log(), whole=False).startup_seconds == near(10)  # of one node, to be shown there
    s.span("n1", "first_step", 0, 12, rank=3)
    assert analyse(s.log()).startup_seconds == near(12)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [((("n0", 0), ("n0", 1)), 3), ((("n0", 0), ("n1", 2)), None), ((("n0", 0),), None)],
    ids=["two of three", "one a node", "one"],
)
def test_ranks_that_emit_by_hand(ranks, expected):
    s = StartUp()
    for node, rank in ranks:
        s.span(node, "first_step", 0, 10, rank=rank, world=3)
    report = analyse(s.log())
    assert (report.ranks_expected, report.startup_seconds) == (expected, None if expected else near(10))


@pytest.mark.parametrize("failed", [{"error": "RuntimeError"}, {"exit_code": 1}, {"signal": "SIGABRT"}])
@pytest.mark.parametrize("who", ["all", "one", "other node", "before", "no ranks"])
@pytest.mark.parametrize("cycle", [0, 1])
def test_a_first_step_that_failed_is_none(failed, who, cycle):
    s = StartUp(cycle=cycle)
    for rank in range(3):
        bad = who == "all" or rank == 1
        number = None if who == "no ranks" else rank
        node = "n1" if who in ("other node", "no ranks") and rank == 1 else "n0"
        s.span(node, "import", 0, 5, rank=number)
        if who == "before" and bad:
            s.span(node, "dist_init", 5, 7, rank=number, **failed)
        else:
            s.span(node, "first_step", 10, 12, rank=number, **(failed if bad else {"exit_code": 0}))
    report = analyse(s.log())
    assert report.startup_seconds is None
    assert not report.goes_on
    ((name, value),) = failed.items()
    where = "dist_init" if who == "before" else "first_step"
    assert {one.how for one in report.ended} == {
        f"exit code 1 in {where}" if name == "exit_code" else f"{value} in {where}"
    }
    if who != "no ranks":
        s.span("n1" if who == "other node" else "n0", "first_step", 20, 22, rank=1)  # it was tried again
        if who == "all":
            for rank in (0, 2):
                s.span("n0", "first_step", 20, 22, rank=rank)
        assert analyse(s.log()).startup_seconds == near(22)


def test_ranks_one_by_one():
    """Seven GPUs wait for the eighth; what the node did first, all of them did."""
    s = StartUp(gpus=8)
    s.span("n0", "env", 0, 10)
    for rank in range(8):
        arrived = 70 if rank == 5 else 20
        s.span("n0", "import", 10, arrived, rank=rank)
        s.span("n0", "dist_init", arrived, 71, rank=rank)
        s.span("n0", "first_step", 71, 80, rank=rank)
        s.span("n0", "compile", 72, 75, rank=rank)
    report = analyse(s.log())
    assert (report.cost.own * 3600, report.cost.wait * 3600) == (near(8 * 80 - 7 * 50), near(7 * 50))
    assert (report.stage("import").slowest_rank, report.stage("dist_init").wait_hours) == (5, near(7 * 50 / 3600))
    cells = report.nodes[0].stages
    assert (cells["import"].own, cells["import"].slowest_rank, cells["dist_init"].wait) == (near(60), 5, near(50))
    assert (cells["compile"].own, cells["first_step"].own) == (near(3), near(6))


def test_hours_of_a_stage():
    report = analyse(start(4, gpus=2).log())
    assert {stage.stage: stage.own_hours for stage in report.stages} == {
        "image": near(8 * 10 / 3600), "env": near(8 * 20 / 3600), "first_step": near(8 * 5 / 3600)
    }  # fmt: skip
    late = start(3, gpus=2)
    late.span("n3", "image", 0, 10)
    late.span("n3", "env", 10, 14)
    late.span("n3", "first_step", 30, 35, rank=3)
    env = analyse(late.log()).stage("env")
    assert (env.own_hours, env.wait_hours) == (near(2 * 64 / 3600), near(2 * 16 / 3600))


@pytest.mark.parametrize("ahead", [30, -30])
def test_clocks_that_differ(ahead):
    def report(stage, wrong=None, late=0):
        s = StartUp()
        s.ahead = {wrong: ahead}
        for i in range(3):
            s.span(f"n{i}", "image", 0, 10 + i + late * (i == 2))
            s.span(f"n{i}", stage, 10 + i + late * (i == 2), 14 + late * (stage == "dist_init" or i == 2), rank=i)
            if stage != "first_step":
                s.span(f"n{i}", "first_step", 14 + late, 15 + late, rank=i)
        return analyse(s.log())

    for stage in ("dist_init", "first_step"):
        right, found = report(stage), report(stage, "n1")
        assert found.startup_seconds == near(right.startup_seconds, abs=0.001)
        assert [node.wait for node in found.nodes] == [near(node.wait, abs=0.001) for node in right.nodes]
        assert (right.problems.clocks_ahead, found.problems.clocks_ahead) == ({}, {"n1": near(ahead)})

    def ends(*ahead, first=0):
        s = StartUp()
        s.ahead = dict(zip(("n3", "n2"), ahead, strict=False))
        for i in range(4):
            s.span(f"n{i}", "image", 0, 18)
            s.span(f"n{i}", "dist_init", 18, 30 + first * (i == 3), rank=i)
            s.span(f"n{i}", "first_step", 30 + first * (i == 3), 40, rank=i)
        return analyse(s.log())

    for wrong in (2, -2):  # which proves nothing at one rendezvous alone
        assert ends(wrong).startup_seconds == near(40)
        assert ends(wrong).problems.clocks_ahead == {"n3": near(wrong)}
    assert ends(first=2).problems.clocks_ahead == {}  # it is slow in the first, and waited for in the second
    assert ends(2, 2).problems.clocks_ahead == {}  # as many of either
    # A node that is late, and for which nobody waits, has no wrong clock.
    assert report("first_step", late=30).problems.clocks_ahead == {}
    assert report("first_step", late=30).startup_seconds == near(44)


def test_identity():
    first, second = start(zero=0), start(cycle=1, zero=1000)
    other = start(1, job="other", zero=5000)
    log = events.parse(first.lines() + second.lines() + other.lines())
    assert log.identities() == [("job", "0", 0), ("job", "0", 1), ("other", "0", 0)]
    assert analyse(log).job == "other"
    assert all(report.startup_seconds == near(35) for report in every(log))
    with pytest.raises(NotFoundError, match="attempt 7"):
        analyse(log, ("job", "7", 0))


def test_hot_restart():
    s = StartUp(cycle=1)
    s.span("n0", "env", 0, 1)
    s.span("n0", "first_step", 1, 2)
    assert analyse(s.log()).hot
    assert not analyse(start(cycle=1).log()).hot
    assert not analyse(start().log()).hot


@pytest.mark.parametrize("end", [None, 33, 35, 5000])
def test_init_ends_with_the_first_step(end):
    s = StartUp()
    s.span("n0", "env", 0, 10)
    init = s.span("n0", "init", 10, end)
    s.span("n0", "import", 12, 20, rank=0, parent=init)
    s.span("n0", "first_step", 25, 35, rank=0, parent=init)
    report = analyse(s.log())
    assert report.startup_seconds == near(35)
    assert report.stage("init").seconds == near(2 + 5)
    assert report.cost.gap == 0
    assert report.problems.open_spans == report.problems.lost_spans == 0


def test_own_work():
    s = start(1)
    init = s.span("n0", "init", 30, 35)
    s.span("n0", "import", 31, 32, parent=init, rank=0)
    s.span("n0", "import", 31.5, 33, parent=init, rank=1)
    report = analyse(s.log())
    assert report.nodes[0].own == near(35)
    cell = report.nodes[0].stages["import"]
    assert (cell.own, cell.slowest_rank) == (near(1.5), 1)


def test_waiting_at_a_barrier():
    s = StartUp()
    for node, image, first in (("n0", 10, 45), ("n1", 30, 50), ("n2", 20, 48)):
        s.span(node, "image", 0, image)
        s.span(node, "env", 31, 40)
        s.span(node, "first_step", 40, first)
    waits = {node.node: node.wait for node in analyse(s.log()).nodes}
    assert waits == {"n0": near(20 + 5), "n1": 0, "n2": near(10 + 2)}
    free = StartUp()  # n0 goes on at once: there is no barrier to wait at
    for node, image in (("n0", 10), ("n1", 30)):
        free.span(node, "image", 0, image)
        free.span(node, "env", image + 2, 40)
        free.span(node, "first_step", 40, 50)
    nodes = analyse(free.log()).nodes
    assert [(n.wait, n.gap) for n in nodes] == [(0, near(2)), (0, near(2))]


def test_waiting_in_a_rendezvous():
    s = StartUp()
    for node, begin in (("n0", 5), ("n1", 25)):
        s.span(node, "import", 0, begin)
        s.span(node, "dist_init", begin, 27)
        s.span(node, "first_step", 27, 30)
    n0, n1 = analyse(s.log()).nodes
    assert (n0.wait, n0.stages["dist_init"].own, n0.stages["dist_init"].wait) == (near(20), near(2), near(20))
    assert (n1.wait, n1.stages["dist_init"].own) == (0, near(2))


def test_waiting_for_another_node_s_result():
    s = StartUp()
    for node in ("n0", "n1"):
        env = s.span(node, "env", 0, 20)
        s.span(node, "first_step", 20, 30)
    s.span("n1", "wait", 2, 18, parent=env)
    n0, n1 = analyse(s.log()).nodes
    assert (n0.wait, n0.own) == (0, near(30))
    assert (n1.wait, n1.own, n1.stages["env"].own, n1.stages["env"].wait) == (near(16), near(14), near(4), near(16))
    alone = StartUp()
    alone.events = [event for event in s.events if event["node"] == "n1"]
    report = analyse(alone.log())
    assert [(stage.stage, stage.seconds) for stage in report.stages] == [("env", near(20)), ("first_step", near(10))]
    assert (report.gap_seconds, report.nodes[0].gap, report.nodes[0].wait) == (0, 0, near(16))


def test_gap():
    s = StartUp()
    for node in ("n0", "n1"):
        s.span(node, "image", 1 if node == "n1" else 0, 10)
        s.span(node, "env", 12, 20)
        s.span(node, "first_step", 23, 30)
    assert [n.gap for n in analyse(s.log()).nodes] == [near(5), near(6)]


def test_lost_gpu_hours():
    report = analyse(start(4, gpus=2).log())
    cost = report.cost
    assert cost.unit == "GPU-hours"
    assert cost.total == near(4 * 2 * 35 / 3600)
    assert cost.own + cost.wait + cost.gap == near(cost.total)
    assert analyse(start(4, gpus=0).log()).cost.unit == "node-hours"
    assert analyse(start(4, gpus=0).log()).cost.total == near(4 * 35 / 3600)


def test_stage_share():
    s = StartUp()
    s.span("n0", "image", 0, 10)
    s.span("n1", "image", 0, 30)
    s.span("n0", "env", 31, 40)
    s.span("n1", "env", 31, 36)
    for node in ("n0", "n1"):
        s.span(node, "first_step", 42, 45)
    report = analyse(s.log())
    assert {x.stage: x.seconds for x in report.stages} == {"image": near(30), "env": near(9), "first_step": near(3)}
    assert report.gap_seconds == near(3)


def test_max_over_median():
    s = StartUp()
    for i, seconds in enumerate((10, 11, 12, 24)):
        s.span(f"n{i}", "env", 0, seconds)
    stage = analyse(s.log()).stage("env")
    assert (stage.median, stage.max, stage.slowest, stage.ratio) == (near(11.5), near(24), "n3", near(24 / 11.5))


def test_straggler():
    base = {"a": 10.0, "b": 10.0, "c": 10.0}
    assert find_stragglers(base | {"d": 15.0}) == ["d"]
    assert find_stragglers(base | {"d": 14.99}) == []
    assert find_stragglers({"a": 4.0, "b": 4.0, "c": 4.0, "d": 8.9}) == []
    assert find_stragglers({"a": 4.0, "b": 4.0, "c": 4.0, "d": 9.0}) == ["d"]
    assert find_stragglers({"a": 1.0, "b": 1.0, "c": 100.0}) == []


@pytest.mark.parametrize("spread", [0.1, 0.2, 0.3])
def test_straggler_rule_has_at_most_1_percent_false_flags_on_uniform_noise(spread):
    rng, flagged, total = random.Random(3), 0, 0
    for _ in range(400):
        for count in (4, 8, 128):
            own = {str(i): 60 * rng.uniform(1 - spread, 1 + spread) for i in range(count)}
            flagged += len(find_stragglers(own))
            total += count
    assert flagged / total <= 0.01


def test_waiting_nodes_are_never_blamed():
    s = StartUp()
    for i in range(8):
        slow = i == 7
        s.span(f"n{i}", "import", 0, 60 if slow else 5)
        s.span(f"n{i}", "dist_init", 60 if slow else 5, 62)
        s.span(f"n{i}", "first_step", 62, 64)
    report = analyse(s.log())
    assert report.stage("import").stragglers == ["n7"]
    assert report.stage("dist_init").stragglers == []
    assert sum(node.wait for node in report.nodes if node.node != "n7") == near(7 * 55)


def test_repeat_offender():
    def one(cycle, slow):
        s = StartUp(cycle=cycle, zero=cycle * 1000)
        for i in range(6):
            s.span(f"n{i}", "env", 0, 60 if i in slow else 10)
            s.span(f"n{i}", "first_step", 60, 61)
        return s.lines()

    log = events.parse(one(0, {1}) + one(1, {1, 2}) + one(2, {1}))
    assert repeat_offenders(every(log)) == [("n1", 3)]


def test_nodes_without_data():
    s = start(3)
    assert analyse(s.log()).nodes_missing == 0
    assert analyse(s.log(), nodes=5).nodes_missing == 2
    s.span("n0", "alloc", 0, 0, nodes=128)
    report = analyse(s.log())
    assert (report.nodes_expected, report.nodes_missing, report.missing) == (128, 125, [])
    assert report.cost.total == near(3 * 8 * 35 / 3600)
    assert analyse(s.log(), nodes=5, names=["n0", "n1", "n2", "n3", "m4"]).missing == ["n3", "m4"]
    assert analyse(s.log(), nodes=5, names=["a0", "a1", "a2", "a3", "a4"]).missing == []  # other names for them
    listed = start(2)
    listed.span("n0.cluster", "alloc", 0, 0, nodelist="n[0-3]")
    assert analyse(listed.log()).missing == ["n2", "n3"]
    listed.span("n1", "alloc", 0, 0, nodelist="n[0-3],n[4-")  # cut
    assert analyse(listed.log()).missing == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[01-04,7],m3", ["n01", "n02", "n03", "n04", "n7", "m3"]),
        ("r[1-2]n[08-10]-ib", ["r1n08-ib", "r1n09-ib", "r1n10-ib", "r2n08-ib", "r2n09-ib", "r2n10-ib"]),
        ("n[1-2],n2,gpu-a.site", ["n1", "n2", "gpu-a.site"]),
    ],
)
def test_a_list_of_nodes(text, names):
    assert hostlist.expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n[", "n]", "n[]", "n[a]", "n[2-1]", "a,,b", "a,", ",", "a b", "n[1--2]", "n[0-999999999]",
             "n[0-99999][0-99999]", "n[0-99999,100000-199998]"],
)  # fmt: skip
def test_no_list_of_nodes(text):
    with pytest.raises(ConfigError, match="list of nodes"):
        hostlist.expand(text)


def test_missing_end():
    s = start(4)
    s.span("n1", "compile", 30, None)
    report = analyse(s.log())
    assert report.nodes[1].stages["compile"].own is None
    assert report.nodes[1].stages["compile"].state == "OPEN"
    assert report.problems.open_spans == 1
    lost = StartUp()
    lost.span("n0", "image", 0, None)
    lost.span("n0", "env", 10, 20)
    lost.span("n0", "import", None, 25)
    assert [span.state.value for span in lost.log().spans] == ["LOST", "DONE", "LOST"]
    report = analyse(lost.log())
    assert report.nodes[0].own == near(10)
    assert report.problems.lost_spans == 2


def test_duration():
    s = StartUp()
    s.event("begin", "a", "n0", 0, stage="env")
    s.event("end", "a", "n0", 10, wall_step=-3600)
    s.event("begin", "b", "n0", 0, stage="image", boot="")
    s.event("end", "b", "n0", 10, boot="")
    s.event("begin", "c", "n0", 10, stage="alloc", boot="")
    s.event("end", "c", "n0", 9, boot="")
    a, b, c = s.log().spans
    assert (a.duration.ns, a.duration.uncertain) == (10_000_000_000, False)
    assert (b.duration.ns, b.duration.uncertain) == (10_000_000_000, True)
    assert (c.duration, c.state) == (None, events.State.SKEWED)


def test_what_if_the_slowest_were_median():
    s = StartUp(gpus=8)
    for i in range(10):
        s.span(f"n{i}", "env", 0, 100 if i == 3 else 20)
        s.span(f"n{i}", "first_step", 100, 110)
    change, _ = analyse(s.log()).what_if
    assert (change.startup_seconds, change.saved_seconds) == (near(30), near(80))
    assert change.saved_hours == near(80 * 80 / 3600)
    assert analyse(start(3).log()).what_if == []


def test_what_if_a_straggler_were_replaced():
    s = StartUp(gpus=8)
    for i in range(10):
        s.span(f"n{i}", "image", 0, {3: 50, 4: 45}.get(i, 20))
        s.span(f"n{i}", "env", 50, {3: 110, 5: 80}.get(i, 70))
        s.span(f"n{i}", "first_step", 110, 120)
    change = analyse(s.log()).what_if[1]
    assert (change.name, change.saved_seconds) == ("a usual node for n3", near(5 + 30))  # n4 and n5 are next
    assert change.saved_hours == near(35 * 80 / 3600)
    even = StartUp()
    for i in range(10):
        even.span(f"n{i}", "env", 0, 20 + i / 10)
        even.span(f"n{i}", "first_step", 30, 40)
    assert [change.name for change in analyse(even.log()).what_if] == ["slowest 1 % of nodes at the median"]


def test_what_if_every_node_restored_its_environment():
    s = StartUp(gpus=8)
    for node, begin, end, how in (("n0", 0, 90, "ran-and-published"), ("n1", 0, 96, "restored-mount")):
        s.span(node, "env", begin, end, how=how)
        s.span(node, "first_step", 100, 110)
    s.span("n1", "wait", 0, 90)
    (change,) = analyse(s.log()).what_if
    assert change.saved_seconds == near(84)  # n1 took 6 s
    assert change.saved_hours == near(84 * 16 / 3600)
    same = StartUp()
    for node in ("n0", "n1"):
        same.span(node, "env", 0, 90, how="ran")
        same.span(node, "first_step", 100, 110)
    assert analyse(same.log()).what_if == []


def test_what_if_the_hot_blocks_of_the_image_were_prefetched():
    def start(waited=12.0, demand=300_000_000, hot=100_000_000, rate=100_000_000, others=400_000_000):
        s = StartUp(gpus=8)
        moved = {"bytes_demand": demand, "bytes_hot": hot, "waited_seconds": waited, "link_rate": rate}
        s.span("n0", "image", 0, 10, **moved)
        s.span("n1", "image", 0, 10, bytes_demand=0, bytes_hot=others, waited_seconds=0.5, link_rate=rate)
        for node, ready in (("n0", 40), ("n1", 35)):
            s.span(node, "env", 10, ready)
            s.span(node, "first_step", 40, 50)
        return s

    (change,) = analyse(start().log()).what_if
    assert change.name == "the image's hot blocks are prefetched"
    # n0's own work is 30 + 10 s. Its 400 MB take 4 s, so 8 s less are waited for; n1 has 25 + 10 s, and is next.
    assert (change.startup_seconds, change.saved_seconds) == (near(45), near(5))
    assert change.saved_hours == near(5 * 16 / 3600)
    (less,) = analyse(start(waited=7.0).log()).what_if
    assert less.saved_seconds == near(3)
    for more in (start(waited=4.0), start(waited=0.0), start(rate=1)):  # the stream takes as long, or longer
        assert [change.saved_seconds for change in analyse(more.log()).what_if] == [0]
    for none in (start(demand=0), start(rate=0), start(rate="fast")):
        assert analyse(none.log()).what_if == []

    alone = StartUp(gpus=8)
    alone.span("n0", "image", 0, 10, bytes_demand=100, bytes_hot=0, waited_seconds=1000, link_rate=100)
    alone.span("n0", "env", 10, 40)
    alone.span("n0", "first_step", 40, 50)
    assert analyse(alone.log()).what_if[0].saved_seconds == near(40)  # all but the mount
    alone.span("n1", "image", 0, 30)  # no barrier: n0 goes on beside it
    alone.span("n1", "first_step", 40, 50)
    assert analyse(alone.log()).what_if[0].saved_seconds == near(20)  # the share of what comes after n1's image
