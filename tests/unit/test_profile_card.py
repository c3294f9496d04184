"""Cards and exports: right without colour, safe against names, whole in 80 columns."""

import io
import json
import re

import pytest
from rich.console import Console

from bootseer.errors import NotFoundError
from bootseer.profile import card, chrome, events, page
from bootseer.profile.analysis import analyse
from support.startups import StartUp


def text(renderable, width=80):
    out = io.StringIO()
    Console(width=width, color_system=None, force_terminal=False, file=out).print(renderable)
    return out.getvalue()


def start(nodes=6, slow="n3", scale=1.0, job="llm", gpus=8):
    s = StartUp(job, gpus=gpus)
    s.span("scheduler", "queue", -30, 0)
    for i in range(nodes):
        env = 120 if f"n{i}" == slow else 60
        s.span(f"n{i}", "image", 0, 30 * scale, nodes=nodes + 2)
        s.span(f"n{i}", "env", 31, 31 + env * scale, how="restored-mount")
        init = s.span(f"n{i}", "init", 155, None)
        s.span(f"n{i}", "import", 156, 160, rank=i, parent=init)
        s.span(f"n{i}", "checkpoint_load", 160, 180, rank=i, parent=init)
        s.span(f"n{i}", "first_step", 180, 183, rank=i, parent=init)
    return s


def test_the_card_says_what_matters():
    shown = text(card.render(analyse(start().log())))
    for part in (
        "start-up of job llm, attempt 0, cycle 0",
        "ready after  183.0 s",
        "queued       30.0 s",
        "6 nodes, 48 GPUs, 6 ranks",
        "GPU-hours = ",
        "straggler: n3 in env, 120.0 s against a median of 60.0 s",
        "120.0!",
        "2 of 8 nodes have no data",
        "what if: slowest 1 % of nodes at the median: 123.0 s",
        "between stages",
    ):
        assert part in shown, shown


def test_the_card_of_many_nodes_says_whether_their_caches_were_used():
    s = start()
    for i in range(6):
        s.span(f"n{i}", "caches", 31, 31.2, how="restored 53, used 41, compiled 0 anew" if i else "cold, compiled 53")
    assert "caches on 5 of 6 nodes: restored 53, used 41, compiled 0 anew" in text(card.render(analyse(s.log())))
    assert "caches on" not in text(card.render(analyse(start().log())))


def test_the_card_says_where_only_stated_inputs_count():
    s = start()
    assert "stated inputs" not in text(card.render(analyse(s.log())))
    why = "missed because x; only its stated inputs count: that needs root; it is published in the background"
    s.span("n9", "env", 31, 31.2, how="ran-and-publishing", reason=why)
    shown = text(card.render(analyse(s.log())))
    assert "environment: only its stated inputs count: that needs root" in shown
    assert "background" not in shown


def test_the_card_of_a_start_that_goes_on_names_the_nodes_with_the_fewest_hot_blocks():
    s = StartUp("llm", gpus=8)
    for i, ready in enumerate((100, 90, 12, 100)):
        s.span(f"n{i}", "image", 0, 2, hot_ready=ready, hot_total=100)
        s.span(f"n{i}", "import", 2, None)
    assert "hot blocks of the image: 12 % on n2, 90 % on n1; median 95 %" in text(card.render(analyse(s.log())))
    assert "hot blocks" not in text(card.render(analyse(start().log())))


def test_the_card_says_when_a_straggler_waited_for_its_image():
    def shown(waited):
        s = StartUp("llm", gpus=8)
        for i in range(6):
            slow = i == 3
            attrs = {"waited_seconds": waited if slow else 1.0, "link_rate": 6e5 if slow else 6e6}
            s.span(f"n{i}", "image", 0, 2, **attrs)
            s.span(f"n{i}", "import", 2, 62 if slow else 12)
            s.span(f"n{i}", "first_step", 62, 63)
        return text(card.render(analyse(s.log())), width=200)

    cause = "its readers waited 40.0 s for blocks of the image, which came at 600.0 kB/s at best; other nodes: 6.0 MB/s"
    assert f"straggler: n3 in import, 60.0 s against a median of 10.0 s\n  {cause}" in re.sub(" +\n", "\n", shown(40.0))
    for waited in (20.0, "40", -1):  # less than half of the 50 s, or nonsense
        assert "its readers waited" not in shown(waited)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lookup_seconds", "registry and store told it after 40.0 s what its image is"),
        ("io_pressure_seconds", "processes on it waited 40.0 s for I/O"),
        ("cpu_pressure_seconds", "processes on it waited 40.0 s for a processor"),
        ("memory_pressure_seconds", "processes on it waited 40.0 s for memory"),
    ],
)
def test_the_card_says_what_a_straggler_waited_for(name, said):
    def shown(mine, others):
        s = StartUp("llm", gpus=8)
        for i in range(6):
            slow = i == 3
            s.span(f"n{i}", "image", 0, 60 if slow else 10, **{name: mine if slow else others})
            s.span(f"n{i}", "first_step", 60, 63)
        return re.sub(" +\n", "\n", text(card.render(analyse(s.log())), width=200))

    straggler = "straggler: n3 in image, 60.0 s against a median of 10.0 s\n"
    assert f"{straggler}  {said}; median 1.00 s\n" in shown(40.0, 1.0)
    for mine, others in ((20.0, 0.0), (40.0, 39.0), ("40", 0.0), (-1, -99)):  # no half of the 50 s, as all, or nonsense
        assert said[:20] not in shown(mine, others)


def test_the_card_says_when_a_straggler_took_another_way():
    def shown(how, reason="", usual=5):
        s = StartUp("llm", gpus=8)
        for i in range(6):
            attrs = {"how": "restored-mount" if i < usual else f"ran {i}", "reason": "-"}
            if i == 5:
                attrs = {"how": how, "reason": reason}
            s.span(f"n{i}", "env", 0, 60 if i == 5 else 2, **{key: value for key, value in attrs.items() if value})
            s.span(f"n{i}", "first_step", 60, 63)
        return re.sub(" +\n", "\n", text(card.render(analyse(s.log())), width=200))

    straggler = "straggler: n5 in env, 60.0 s against a median of 2.00 s\n"
    cause = "  it took another way than most nodes (restored-mount): restored-unpack"
    assert f"{straggler}{cause}, no space is left\n" in shown("restored-unpack", "no space is left")
    assert f"{straggler}{cause}\n" in shown("restored-unpack")
    for how, usual in (("restored-mount", 5), ("", 5), ("restored-unpack", 2)):  # the same, nothing, no usual one
        assert "another way" not in shown(how, usual=usual)


@pytest.mark.parametrize("node", ["n", "ip-10-20-30-400.eu-central-1.compute.internal-"])
def test_cards_fit_80_columns(node):
    s = start()
    for event in s.events:
        event["node"] = event["node"].replace("n", node, 1)
    shown = text(card.render(analyse(s.log())))
    lines = shown.splitlines()
    assert max(len(line.rstrip()) for line in lines if not line.startswith(("straggler", "  ready"))) <= 80
    for number in ("median", "max/median", "120.0", "183.0", "checkpoint"):
        assert number in shown
    assert "…" not in shown


def test_one_node_shows_how_instead_of_a_comparison():
    one = start(1, slow="")
    assert "waited" not in text(card.render(analyse(one.log())))
    one.span("n0", "wait", 40, 52.5)
    shown = text(card.render(analyse(one.log())))
    assert "restored-mount, waited 12.5 s" in shown
    assert "median" not in shown
    assert "node x stage" not in shown


def test_many_nodes_show_the_slowest_and_say_so():
    shown = text(card.render(analyse(start(60).log()), max_nodes=5))
    assert "the 5 slowest of 60 nodes" in shown
    assert shown.count("90.0") < 60
    assert "n3 " in shown


def test_states_and_doubts_are_words():
    s = start(4)
    s.span("n0", "compile", 180, None)
    s.span("n1", "compile", None, 181)
    s.event("begin", "ee" * 8, "n2", 0, stage="alloc", boot="")
    s.event("end", "ee" * 8, "n2", 5, boot="")
    s.events[3]["lost"] = 2
    shown = text(card.render(analyse(s.log())))
    for part in ("OPEN", "LOST", "~5.0", "1 span has no end yet", "2 events could not be written"):
        assert part in shown, shown


def test_before_the_first_step_has_ended_nothing_is_promised():
    s = StartUp()
    s.span("n0", "image", 0, 30)
    s.span("n0", "env", 30, None)
    shown = text(card.render(analyse(s.log())))
    assert "no end yet" in shown
    assert "ready after" not in shown


def test_names_are_no_markup():
    s = start(job="[bold]job[/nope]\x1b[31m\n")
    for event in s.events:
        event["node"] = event["node"].replace("n", "[red]", 1)
    s.span("[red]0", "[link=x]stage[/]", 160, 170)
    shown = text(card.render(analyse(s.log())), width=200)
    assert r"[bold]job[/nope]\x1b[31m\n" in shown
    assert "[red]3" in shown
    assert "[link=x]stage[/]" in shown


def test_side_by_side_compares_with_the_first():
    reports = [(name, analyse(start(1, "", scale).log())) for name, scale in (("ordinary", 1.0), ("first", 0.5))]
    shown = text(card.render_side_by_side([*reports, ("again", reports[1][1])], {"bytes": ["9 MB", "5 MB", "1 MB"]}))
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert rows["image"].split() == ["image", "30.0", "s", "15.0", "s", "-50", "%", "15.0", "s", "-50", "%"]
    assert rows["bytes"].split() == ["bytes", "9", "MB", "5", "MB", "1", "MB"]
    assert "start-up" in rows
    assert "lost GPU-hours" in rows
    with pytest.raises(ValueError, match="row 'x' has 1 cells for 2 reports"):
        card.render_side_by_side(reports, {"x": ["1"]})


def test_side_by_side_of_different_stages_and_an_unfinished_start():
    s = StartUp()
    s.span("n0", "env", 0, 10)
    shown = text(card.render_side_by_side([("a", analyse(start(1, "").log())), ("b", analyse(s.log()))]))
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert rows["image"].split() == ["image", "30.0", "s", "-"]
    assert rows["start-up"].split()[-1] == "-"


def test_the_chrome_trace_is_valid_and_whole():
    s = start(3)
    s.span("n0", "compile", 170, None, rank=0)
    s.span("n1", "compile", None, 170, rank=1)
    log = s.log()
    document = json.loads(json.dumps(chrome.export(log)))
    assert document["displayTimeUnit"] == "ms"
    found = document["traceEvents"]
    assert len([e for e in found if e["ph"] != "M"]) == len(log.spans)
    for event in found:
        assert event["ph"] in ("X", "B", "i", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        assert ("dur" in event) == (event["ph"] == "X")
    (image,) = [e for e in found if e["name"] == "image" and e["pid"] == 2]
    assert image["dur"] == pytest.approx(30e6)
    assert image["ts"] == pytest.approx(30e6)
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names[image["pid"]] == "node n1"
    step = next(e for e in found if e["name"] == "first_step" and e["pid"] == image["pid"])
    assert step["tid"] == 2
    assert [e["name"] for e in found if e["ph"] == "B"] == ["init"] * 3 + ["compile"]
    assert [e["name"] for e in found if e["ph"] == "i"] == ["? (LOST)"]


def test_the_chrome_trace_of_a_start_up_that_is_not_there():
    with pytest.raises(NotFoundError):
        chrome.export(start().log(), ("other", 0, 0))


def test_ranks_and_nodes_by_name():
    s = start(4)
    for rank in range(4, 8):
        s.span("n3", "compile", 155, 165 if rank == 6 else 156, rank=rank, ranks=9, nodelist="n[0-5]")
    shown = text(card.render(analyse(s.log())))
    assert "first step   ended on 4 of 9 ranks" in shown
    assert "2 of 6 nodes have no data (n4, n5); their cost" in shown
    assert "own work in seconds of the slowest rank" in shown
    for node in range(3):
        s.span(f"n{node}", "compile", 155, 156, rank=node)
    assert "straggler: n3 (rank 6) in compile, 10.0 s against a median of 1.00 s" in text(card.render(analyse(s.log())))


def test_the_card_and_the_report_say_what_the_checkpoint_moved():
    s = StartUp("llm", gpus=8)
    for i in range(2):
        s.span(f"n{i}", "checkpoint_load", 0, 2, needed=3_000_000_000, fetched=500_000_000, waited=1.0 + i)
        s.span(f"n{i}", "first_step", 2, 3)
    report = analyse(s.log())
    line = "checkpoint: 6.0 GB read, 1.0 GB came from the store; readers of a node waited 2.00 s at most"
    assert [(cause.stage, cause.node, cause.text) for cause in report.causes] == [("", "", line)]
    assert line in text(card.render(report), width=200)
    assert line in card.remarks(report)


def hanging(**attrs):
    s = StartUp()
    for number in range(4):
        s.span(f"n{number}", "image", 0, 10)
        s.span(f"n{number}", "import", 10, 40 if number else None, rank=number, **attrs)
        if number:
            s.span(f"n{number}", "dist_init", 40, None, rank=number)
    return s


def test_what_is_open_is_long_until_now():
    assert analyse(start(4).log()).still == []
    log, others = hanging(ranks=4).log(), hanging()
    others.span("n1", "probe", 599, 600)
    assert "nothing heard after 20" in " ".join(text(card.render(analyse(others.log()))).split())
    begin = log.spans.begin.wall[0]
    report = analyse(log, now=begin + 900 * 10**9)
    assert [(one.stage, one.seconds) for one in report.still] == [("import", 890), ("dist_init", 860)]
    assert (report.goes_on, report.heard_seconds, report.elapsed_seconds) == (True, 860, 900)
    assert (report.nodes[0].own, report.nodes[1].own, report.nodes[1].wait) == (900, 40, 860)  # they wait for n0
    assert report.nodes[0].stages["import"].open_seconds == 890
    said = " ".join(text(card.render(report)).split())
    assert "still in import: 1 node since 890 s (n0); dist_init: 3 nodes since 860 s (n1, n2, n3)" in said
    assert "nothing heard for 14 min" in said
    assert "OPEN 890" in said
    later = analyse(log, now=begin + 30 * 86_400 * 10**9)  # nobody knows when it was given up
    assert (later.goes_on, later.elapsed_seconds) == (False, 40)
    assert "stopped in import" in " ".join(text(card.render(later)).split())


def test_a_start_that_crashed_looks_like_one():
    s = StartUp()
    for node in ("n1", "n2"):
        s.span(node, "env", 0, 5)
        s.span(node, "init", 5, 9, exit_code=3)
    log = s.log()
    report = analyse(log, now=log.spans.begin.wall[0] + 60 * 10**9)
    assert (report.goes_on, report.still) == (False, [])
    assert report.elapsed_seconds == 9
    assert "has ended before the first step: 2 nodes (n1, n2): exit code 3 in init" in " ".join(
        text(card.render(report)).split()
    )
    told = hanging()
    told.span("n0", "alloc", -1, 0, state="NODE_FAIL", run_seconds=120)
    log = told.log()
    report = analyse(log, now=log.spans.begin.wall[0] + 600 * 10**9)
    assert not report.goes_on
    assert "has ended before the first step: 4 nodes (n0, n1, n2, ...): Slurm says NODE_FAIL" in " ".join(
        text(card.render(report)).split()
    )


ALL = "n0 n1 n2 n3"
HANGS = {
    "in the queue": ("slurm: queue 0-", "still in queue since 600 s; nothing heard for 10 min"),
    "cancelled in the queue": (
        "slurm: queue 0-90 state=CANCELLED", "has ended before the first step: Slurm says CANCELLED",
    ),
    "one pod in the queue": (
        "kubernetes: queue 0- pods=2; n0: image 5-30, dist_init 40-",
        "still in queue since 600 s; dist_init: 1 node since 560 s (n0); nothing heard for 9 min",
    ),
    "allocated, as its nodes say": (
        "slurm: queue 0-; n0: image 5-30, dist_init 40-", "still in dist_init: 1 node since 560 s (n0); nothing heard",
    ),
    "alloc": (
        "n0: alloc 0-; n1 n2 n3: alloc 0-5, image 5-20, dist_init 20-",
        "still in alloc: 1 node since 600 s (n0); dist_init: 3 nodes since 580 s (n1, n2, n3)",
    ),
    "image": (
        "n0 n1: image 0-; n2 n3: image 0-30, env 30-40, dist_init 45-",
        "still in image: 2 nodes since 600 s (n0, n1); dist_init: 2 nodes since 555 s (n2, n3)",
    ),
    "env, for which others wait": (
        f"{ALL}: image 0-20, env 30-; n1 n2 n3: wait 31- <env",
        "still in env: 1 node since 570 s (n0); env, waiting for another node: 3 nodes since 569 s (n1, n2, n3)",
    ),
    "a stage of the user's own": (
        "n0 n1: image 0-20, download 30-; n2: image 0-20, download 30-40, dist_init 50-",
        "still in download: 2 nodes since 570 s (n0, n1); dist_init: 1 node since 550 s (n2)",
    ),
    "after one whose end was lost": (
        "n0: image 0-20, download 25-, env 30-40, import 50-", "still in import: 1 node since 550 s (n0)",
    ),
    "what a stage is made of": (f"{ALL}: image 0-20, env 20-, pip 21- <env", "still in env: 4 nodes since 580 s"),
    "between stages": (f"{ALL}: image 0-20, env 20-30", "still in after env: 4 nodes since 570 s (n0, n1, n2, ...)"),
    "one of two after its first step": (
        "n0: image 0-20, first_step 30-40; n1: import 20-", "still in import: 1 node since 580 s (n1)",
    ),
    "a crash for which others wait": (
        "n0: image 0-20, init 20-30 exit_code=137; n1 n2: image 0-20, init 20-, dist_init 25- <init",
        "still in dist_init: 2 nodes since 575 s (n1, n2); ended before the first step: 1 node (n0): exit code 137 in",
    ),
    "nodes that never spoke": (
        "n0 n1: image 0-20 nodes=4 nodelist=n[0-3], dist_init 20-",
        "still in dist_init: 2 nodes since 580 s (n0, n1); nothing ever from 2 nodes (n2, n3); nothing heard for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
def test_the_first_line_of_a_start_without_an_end(case):
    written, said = HANGS[case]
    s = StartUp()
    for part in written.split("; "):
        nodes, _, spans = part.partition(": ")
        for node in nodes.split():
            for span in spans.split(", "):
                stage, times, *more = span.split()
                begin, _, end = times.partition("-")
                attrs = {name: int(value) if value.isdecimal() else value for name, _, value in
                         (one.partition("=") for one in more if "=" in one)}  # fmt: skip
                above = next((one[1:] for one in more if one[0] == "<"), "")
                parent = next((e["span"] for e in s.events if (e["node"], e.get("stage")) == (node, above)), "")
                s.span(node, stage, float(begin), float(end) if end else None, parent=parent, **attrs)
    s.span("n9", "probe", 0, 0)
    now = s.events.pop()["wall"] + 600 * 10**9
    s.events.pop()
    for lines in (s.lines(), s.lines()[::-1]):  # as they come late
        report = analyse(events.parse(lines), now=now)
        assert f"cycle 0 {said}" in " ".join(text(card.render(report), width=300).split())
        assert said in " ".join(page.html(events.parse(lines), now=now).split())
