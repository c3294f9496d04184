"""The model of starts: bytes are conserved, more nodes are never faster, one seed gives one outcome, and a start that
was measured is foretold."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("simpy", reason="needs the extra sim")

from bench.page import model as pages
from bench.page import reports
from bootseer.errors import NotFoundError
from bootseer.profile import analysis
from bootseer.profile.sim import measured, sweep
from bootseer.profile.sim.model import Site, Stage, Way, simulate
from bootseer.profile.sim.recorded import recorded
from support import forked
from support.startups import StartUp

JOBS = measured.jobs()
WAYS = measured.ways(JOBS["torch"])
MB = 1e6


@pytest.mark.parametrize("name", WAYS)
def test_every_byte_leaves_a_server_once_and_comes_over_the_link_of_a_node(name: str) -> None:
    way = WAYS[name]
    made = simulate(way, Site(datanodes=7), 5)
    assert made.moved["nodes"] == pytest.approx(5 * sum(stage.size for stage in way.stages))
    assert sum(made.moved.values()) == pytest.approx(2 * made.moved["nodes"])
    assert all(0 <= share <= 1 for share in made.busy.values())
    assert all(ready >= sum(stage.seconds for stage in way.stages) for ready in made.ready)


SECONDS, BYTES = st.sampled_from([0.0, 0.2, 2.0, 25.0]), st.sampled_from([0, 1_000_000, 40_000_000, 150_000_000])


@st.composite
def a_start(draw: st.DrawFn, *, waited: bool) -> measured.Measured:
    """Of one node at 1000 Mbit/s; with ``waited`` its stages wait for their bytes."""
    size = {name: draw(BYTES) for name in pages.STAGES}
    stages = {name: draw(SECONDS) + (count / 125e6 if waited else 0.0) for name, count in size.items()}
    seconds = max(sum(stages.values()), sum(size.values()) / 125e6) + draw(SECONDS)
    return measured.Measured(nodes=1, runs=3, rate_mbit=1000, seconds=seconds, stages=stages, size=size)


def a_job(local: float, ordinary: measured.Measured, again: measured.Measured, pace: float) -> measured.Job:
    alone = measured.Measured(nodes=1, runs=3, rate_mbit=1000, seconds=local + 0.3, stages={"init": local})
    starts = {"local": [alone], "ordinary": [ordinary], "again": [again]}
    return measured.Job(about="", reports=[], datanodes=4, cores=2, turn=5.0, pace=pace, starts=starts)


def measures(seconds: float, stages: tuple[float, ...], size: tuple[int, ...]) -> measured.Measured:
    return measured.Measured(
        nodes=1, runs=3, rate_mbit=1000, seconds=seconds, stages=dict(zip(pages.STAGES, stages, strict=True)),
        size=dict(zip(pages.STAGES, size, strict=True)),
    )  # fmt: skip


FULL = a_job(
    7.37, measures(117.9, (82.9, 24.8, 11.0), (3134982950, 117590008, 503507499)),
    measures(12.47, (0.21, 0.29, 11.25), (199279607, 67730750, 503507499)), 9.73e-9,
)  # fmt: skip
"""What a full demo measured."""


@given(
    st.builds(
        a_job, st.sampled_from([0.3, 8.0]), a_start(waited=True), a_start(waited=False), st.sampled_from([0.0, 1e-8])
    ),
    st.sampled_from([1, 4, 20]),
)
@example(FULL, 4)  # while pip installed, the checkpoint came in the background, on one node at full speed
@settings(max_examples=20)
def test_more_nodes_are_never_faster_whatever_was_measured(job: measured.Job, datanodes: int) -> None:
    site = Site(datanodes=datanodes, node_mbit=1000, registry_mbit=1000, index_mbit=1000, datanode_mbit=1000)
    for way in measured.ways(job).values():
        last = [max(simulate(way, site, nodes).ready) for nodes in (1, 2, 4, 12)]
        # a node compares DataNodes that are drawn
        assert all(more >= 0.99 * fewer for fewer, more in itertools.pairwise(last)), (way, last)


@pytest.mark.parametrize("name", WAYS)
def test_a_seed_gives_one_outcome(name: str) -> None:
    spread = measured.spread_of(JOBS["light"])
    once, again, other = (simulate(WAYS[name], Site(seed=seed), 9, spread=spread) for seed in (1, 1, 2))
    assert once == again != other


def test_no_link_carries_more_than_its_rate() -> None:
    way = Way(name="w", stages=(Stage(name="init", size=100 * MB, source="registry"),))
    for nodes, least in ((1, 0.8), (10, 8.0)):  # 1000 Mbit/s: 125 MB/s
        ready = simulate(way, Site(node_mbit=1000, registry_mbit=1000), nodes).ready
        assert 0.999 * least <= max(ready) <= 1.02 * least
    racks = simulate(way, Site(node_mbit=1000, registry_mbit=1000, rack=5, rack_mbit=1000), 10)
    assert racks.moved["registry"] == pytest.approx(200 * MB)  # once for each rack
    assert 3.999 <= max(racks.ready) <= 4.2


@pytest.mark.parametrize(("nodes", "stripes"), [(100, 4), (9_000, 4), (10_000, 4), (10_000, 7)])
def test_stripes_are_read_alike_however_coarse_the_pieces_are(nodes: int, stripes: int) -> None:
    """At 10,000 nodes a checkpoint has six pieces: two of four stripes had two of them, and a start took a third more
    than its bytes take on the links of all replicas."""
    way = Way(name="w", stages=(Stage(name="init", size=500 * MB, source="stripes"),))
    made = simulate(way, Site(stripes=stripes, node_mbit=100_000, datanode_mbit=1000, datanodes=20_000), nodes)
    assert max(made.ready) == pytest.approx(nodes * 500 / 125 / (3 * stripes), rel=0.06)


def test_cores_that_all_share_do_all_the_work() -> None:
    way = Way(name="w", before=1.0, stages=(Stage(name="init", seconds=2.0),))
    assert max(simulate(way, Site(shared_cores=2), 8).ready) == pytest.approx(12.0, rel=0.02)
    assert max(simulate(way, Site(shared_cores=2, upkeep=0.1), 8).ready) == pytest.approx(12.0 / 0.6, rel=0.02)
    assert max(simulate(way, Site(), 8).ready) == pytest.approx(3.0)


def test_of_a_stage_that_waits_only_the_work_shares_cores_and_one_that_ran_on_both_takes_both() -> None:
    last = Stage(name="init")
    waits = Way(name="w", stages=(Stage(name="env", seconds=2.0, cpu=0.5), last))
    both = Way(name="w", stages=(Stage(name="image", seconds=1.0, cpu=2.0), last))
    for way, nodes, upkeep, seconds in (
        (waits, 1, 0.1, 2.0), (waits, 8, 0.0, 1.5 + 2.0), (waits, 8, 0.1, 1.5 + 2.0 / 0.6),
        (both, 1, 0.1, 1.0 / 0.95), (both, 8, 0.0, 8.0), (both, 8, 0.1, 8.0 / 0.6),
    ):  # fmt: skip
        made = simulate(way, Site(shared_cores=2, upkeep=upkeep), nodes)
        assert max(made.ready) == pytest.approx(seconds, rel=0.03), (way, nodes, upkeep)
    assert max(simulate(waits, Site(), 8).ready) == pytest.approx(2.0)


def test_whole_starts_that_the_links_decide_are_within_a_tenth() -> None:
    off = {
        (name, one.nodes, one.store): model / seconds - 1
        for name in ("light", "sizes")
        for one, part, seconds, model in pages.compared(JOBS[name])
        if part == "start" and one.rate_mbit == 50
    }
    assert set(off) == {
        *(("light", nodes, store) for nodes, store in ((1, "hdfs"), (8, "hdfs"), (8, "registry"), (8, "mirror"))),
        *(("sizes", nodes, "hdfs") for nodes in (1, 2, 4, 8, 16)),
    }
    assert all(abs(one) <= pages.WITHIN for one in off.values()), off


def test_sizes_are_compared_with_a_start_on_one_node_of_their_own() -> None:
    found = reports.load()
    one, *more = pages.jobs(found)["sizes"].starts["again"]
    assert [size.nodes for size in (one, *more)] == [1, 2, 4, 8, 16, 8]
    alone = [run for run in found["cluster-size"].runs if run.variant == "size-1:again"]
    assert one.seconds == statistics.median(run.seconds or 0.0 for run in alone)
    assert sum(one.size.values()) == statistics.median(run.details["node_bytes"] for run in alone)


def test_a_sweep_says_what_more_replicas_and_caches_buy() -> None:
    ways = measured.ways(FULL)
    found = sweep.sweep(ways.values(), Site(datanodes=100), [1, 400], about="")
    rows = {(row.way, row.nodes): row for row in found.rows}
    assert rows["local", 400].job_overhead == 0
    last = {name: rows[name, 400].seconds for name in ways}
    assert last["local"] < last["bootseer"] < min(last[name] for name in WAYS if name.startswith("without"))
    assert max(last, key=lambda name: last[name]) == "ordinary"
    assert found.hot_replicas[1] == 3 < found.hot_replicas[400]
    assert found.rack_from == 400
    assert sweep.picture(found).startswith("<svg xmlns=")


def start(nodes: int = 4, seconds: float = 40.0) -> StartUp:
    """Each node has 100 MB of its image and 1 GB of its checkpoint over a link of 125 MB/s; the last one is slower."""
    made = StartUp("llama")
    for number in range(nodes):
        name, late = f"n{number}", 1.5 if number == nodes - 1 else 1.0
        link = {"bytes_hot": 90_000_000, "bytes_demand": 10_000_000, "link_rate": 125_000_000}
        made.span(name, "image", 0.0, 2.0, **link)
        made.span(name, "env", 2.0, 5.0)
        made.span(name, "checkpoint_load", 5.0, 5.0 + (seconds - 10.0) * late, fetched=1_000_000_000)
        made.span(name, "first_step", 5.0 + (seconds - 10.0) * late, (seconds - 5.0) * late)
    return made


def test_a_start_that_was_recorded_takes_what_it_took_and_longer_on_more_nodes() -> None:
    report = analysis.analyse(start().log())
    found = recorded(report, {"datanode_mbit": 1000, "datanodes": 40})
    assert (found.nodes, found.site.node_mbit) == (4, 1000.0)
    assert [stage.size for stage in found.way.stages] == [100 * MB, 0, 1000 * MB]
    assert found.spread[-1] > 1.3
    site = Site(node_mbit=1000, datanode_mbit=1000, datanodes=40)
    own = sorted(sum(cell.own or 0 for cell in node.stages.values()) for node in report.nodes)
    assert max(simulate(found.way, site, 4).ready) == pytest.approx(own[1], rel=0.05)
    assert max(simulate(found.way, site, 400).ready) > 2 * own[1]
    with pytest.raises(NotFoundError, match="no first step"):
        recorded(msgspec.structs.replace(report, startup_seconds=None), {})


def test_nodes_of_which_the_scheduler_alone_knows_have_no_bytes_to_tell() -> None:
    made = start(2)
    for number in range(8):
        made.span(f"n{number}", "alloc", -10.0, 0.0)
    found = recorded(analysis.analyse(made.log()), {})
    assert found.nodes == 8
    assert [stage.size for stage in found.way.stages] == [100 * MB, 0, 1000 * MB]


def test_the_wait_for_nodes_is_no_work_where_the_scheduler_names_few_of_them() -> None:
    """sacct named one node of four: the 10 s were work of the other three."""
    found = []
    for named in (1, 4):
        made = start()
        for number in range(named):
            made.span(f"n{number}", "alloc", -10.0, 0.0)
        found.append(recorded(analysis.analyse(made.log()), {}))
    assert found[0] == found[1]


def test_time_outside_of_any_stage_is_part_of_a_start_that_was_recorded() -> None:
    """A job that notes its first stage and its last one only was told that it starts in no time."""
    made = StartUp("llama")
    for node in ("n1", "n2"):
        made.span(node, "env", 0.0, 3.0)
        made.span(node, "first_step", 13.0, 18.0)
    found = recorded(analysis.analyse(made.log()), {})
    assert max(simulate(found.way, Site(), 64).ready) == pytest.approx(18.0)


def test_a_start_that_took_no_time_has_come_to_its_first_step() -> None:
    made = StartUp("llama")
    made.span("n1", "first_step", 0.0, 0.0)
    with pytest.raises(NotFoundError, match="took no time"):
        recorded(analysis.analyse(made.log()), {})


@pytest.mark.parametrize(
    ("nodes", "fetched", "load", "alone"),
    [
        (4, 3e9, 30.0, (50, 50)),  # no server was the limit: what lies beyond the bytes is work
        (500, 12e9, 30.0, (24, 50)),  # DataNodes must have given more than is assumed; import and step are work
        (500, 90e9, 30.0, (47, 50)),  # the link of a node took all of it
        (500, 300e9, 30.0, (47, 50)),  # even longer: the link is a better one, and some came beside the import
        (500, 12e9, 0.1, (20, 21)),  # all of it was there before it was loaded
        (500, 12e9, 0.0, (20, 21)),
        (1, 3e9, 30.0, (50, 50)),
        (1, 144e9, 30.0, (49, 50)),  # with those of the image more than the link is said to carry
        (1, 0.0, 30.0, (50, 50)),
        (500, 0.0, 30.0, (50, 50)),
    ],
)
def test_a_recording_of_any_size_takes_its_time_there_and_its_work_on_one_node(
    nodes: int, fetched: float, load: float, alone: tuple[float, float]
) -> None:
    """A start of 50 s on 10,000 nodes was 111 s there, and 5 s on one node."""
    made, hot = StartUp("llama"), 90e9 if fetched == 144e9 else 1e8
    for number in range(nodes):
        name = f"n{number}"
        made.span(name, "image", 0.0, 2.0, bytes_hot=hot, link_rate=3e9)
        made.span(name, "env", 2.0, 5.0)
        made.span(name, "import", 5.0, 15.0)
        made.span(name, "checkpoint_load", 15.0, 15.0 + load, fetched=fetched)
        made.span(name, "first_step", 15.0 + load, 20.0 + load)
    found = recorded(analysis.analyse(made.log()), {})
    there, one = (simulate(found.way, found.site, count).ready for count in (nodes, 1))
    assert statistics.median(there) == pytest.approx(20 + load, rel=0.06)
    assert 0.98 * alone[0] <= one[0] <= 1.02 * alone[1], (found.way, found.site)


def command(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return forked.cli("profile", "growth", *argv)


def test_the_command(tmp_path: Path) -> None:
    svg, path = tmp_path / "growth.svg", tmp_path / "events.jsonl"
    done = command("--sim", "1,8", "--site", "datanodes=4", "--svg", svg, "--json")
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["site"]["datanodes"] == 4
    assert {row["nodes"] for row in found["rows"]} == {1, 8}
    assert found["assumed"]
    first = found["rows"][0]  # the same figures, by their names
    said = f"{first['seconds']:.1f} seconds, {first['median']:.1f} until the median node is ready, "
    assert f"<title>1 local: {said}" in svg.read_text()
    start().write(path)
    told = command(path, "--sim", "4,64").stdout
    assert "llama" in told
    assert "as recorded" in told
    assert "node_mbit=1000" in told


@pytest.mark.parametrize("terminal", [False, True])
def test_no_figure_is_cut(terminal: bool) -> None:
    words = shlex.join([sys.executable, "-m", "bootseer.cli.main", "profile", "growth", "--sim", "4"])
    argv = ["script", "-qec", words, "/dev/null"] if terminal else shlex.split(words)
    environ = {**os.environ, "COLUMNS": "60", "TERM": "dumb"}
    shown = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "…" not in shown
    assert "max/median" in shown


@pytest.mark.parametrize(
    "argv",
    [["--sim", "0"], ["--sim", "8,x"], ["--sim", "8", "--site", "datanode=4"], ["--sim", "8", "--site", "datanodes=0"],
     ["--sim", "8", "--site", "datanodes=100000000"],
     ["--sim", "8", "--site", "seed=a"], ["--svg", "x.svg"], ["--sim", "8", "--at", "8"]],
)  # fmt: skip
def test_a_mistake_is_told_in_a_line(argv: list[str]) -> None:
    done = command(*argv)
    assert done.returncode in (2, 78)
    assert "Traceback" not in done.stderr


def shown() -> list[str]:
    """The table of 10,000 nodes in the page."""
    text = (Path(pages.__file__).parents[2] / pages.PAGE).read_text()
    return re.findall("^10,000  .*|^ nodes  way .*", text, re.MULTILINE)


@pytest.mark.parametrize("way", ["local", "bootseer"])
def test_the_table_of_the_page_is_what_the_model_says(way: str) -> None:
    """Two lines of it: all take half a minute, see below."""
    (line,) = [line for line in shown() if line.startswith(f"10,000  {way}  ")]
    made = simulate(WAYS[way], Site(), 10_000, spread=measured.spread_of(JOBS["torch"]))
    assert line.split()[2:6:2] == [f"{one:,.1f}" for one in (max(made.ready), statistics.median(made.ready))]


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.parametrize("own", [False, True])
def test_ten_thousand_nodes_in_a_minute_and_a_gigabyte(own: bool, tmp_path: Path) -> None:
    if own:
        start(10_000).write(tmp_path / "events.jsonl")
    began = time.monotonic()
    done = command(*[tmp_path / "events.jsonl"] * own, "--sim", "10000")
    assert not done.returncode, done.stderr
    assert time.monotonic() - began < 60
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1 << 20  # KiB, of the largest process until now
    if own:
        return
    table = shown()
    assert len(table) == 9
    assert set(table) <= {line.rstrip() for line in done.stdout.splitlines()}
