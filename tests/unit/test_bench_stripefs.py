"""The figures and the chart of bench/stripefs, from made-up runs."""

import contextlib
import itertools
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from bootseer.errors import BootseerError
from bootseer.hdfs.placement import Placement
from bootseer.hdfs.records import DataNode
from bootseer.report import Report, Run

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports modules of bench/ by name, and forgets them."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield __import__
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", None)).startswith(f"{BENCH}/")]:
        del sys.modules[name]


def runs(variant, *speeds, **details):
    return [
        Run(variant=variant, n=n + 1, seconds=1000 / speed, details={"mib_per_s": speed, **details})
        for n, speed in enumerate(speeds)
    ]


def report(*groups):
    return Report(name="stripefs", runs=[run for group in groups for run in group])


def figures(bench, document):
    said = []
    bench("_stripes_figures").compute(document, said.append)
    return {figure.name: figure for figure in document.figures}, said


def test_vanilla_is_the_faster_of_the_two_clients(bench):
    found, said = figures(
        bench,
        report(
            runs("capped:striped", 230, 240, 220),
            runs("capped:hdfs-native", 50, 50),
            runs("capped:hadoop-client", 57.5, 1, 100),
            runs("capped:colliding-hdfs-native", 60),
            runs("capped:colliding-striped", 120),
        ),
    )
    assert found["read_vs_vanilla"].value == 4.0
    assert found["read_vs_vanilla"].n == 2
    assert found["read_vs_caps"].value == pytest.approx(230 / 240, abs=1e-4)
    assert found["read_vs_vanilla_colliding"].value == 2.0
    assert not found["read_vs_vanilla_colliding"].met
    assert any("free:striped" in line for line in said)


def test_files_that_do_not_collide_make_no_figure(bench):
    failed = [Run(variant="capped:colliding-striped", n=1, failed="its replicas are on DataNodes [0, 1, 2]")]
    found, said = figures(
        bench, report(runs("capped:hdfs-native", 50), runs("capped:colliding-hdfs-native", 50), failed)
    )
    assert "read_vs_vanilla_colliding" not in found
    assert any("capped:colliding-striped" in line for line in said)


def test_stripes_collide_on_one_datanode_and_lie_on_all_four(bench):
    misplaced = bench("_stripes_collide").misplaced
    assert misplaced("striped", [[0, 1], [2, 0], [0, 3], [1, 0]]) == ""
    assert "not on [0, 1, 2, 3]" in misplaced("striped", [[0, 1], [0, 1], [0, 2], [0, 2]])
    assert "not on [0, 1, 2, 3]" in misplaced("striped", [[0, 1], [0, 2], [0, 3], [0, 4]])  # one was copied meanwhile
    assert "1 of 4 blocks" in misplaced("striped", [[0, 1], [0, 2], [0, 3], [1, 2]])
    assert misplaced("plain", [[0, 1]]) == ""  # one block has two DataNodes, and readers take the first
    assert "1 of 1 blocks" in misplaced("plain", [[1, 2]])


def test_the_second_replicas_take_turns(bench):
    nodes = [DataNode(f"u{index}", f"10.0.0.{index}", 9866, f"/r{index}") for index in range(4)]
    chosen = bench("_stripes_collide").Chosen(nodes[0], itertools.cycle(nodes[1:]))
    assert [chosen.wish(1, None, 2) for _ in range(4)] == [[nodes[0], nodes[i]] for i in (1, 2, 3, 1)]


def test_each_stripe_has_its_own_second_datanode(bench, monkeypatch):
    collide, nodes = bench("_stripes_collide"), [DataNode(f"u{index}", "h", 1) for index in range(4)]
    placed = {}
    monkeypatch.setattr(
        collide.HdfsBackend, "create", lambda self, path, *, placement=None: placed.update({path: placement})
    )
    backend = collide._Backend("hdfs://127.0.0.1:1/collide", nodes)
    for path in (".bsx/a.0", ".bsx/a.1", ".bsx/a.2", ".bsx/a.3"):
        backend.create(path, placement=Placement())
    backend.create(".tmp-a.1")
    assert placed.pop(".tmp-a.1") is None
    found = [placement.wish(1, None, 2) for placement in placed.values() for _ in range(2)]
    assert found == [[nodes[0], nodes[index]] for index in (1, 1, 2, 2, 3, 3, 1, 1)]


def test_a_report_of_colliding_files_says_how_they_lie_or_there_is_none(bench, monkeypatch):
    collision = bench("_stripes_collide").Collision(SimpleNamespace(addresses=["a:1", "b:1", "c:1", "d:1"]))
    lie = {"plain": [[0, 1]], "striped": [[0, 1], [0, 2], [3, 0], [1, 0]]}
    monkeypatch.setattr(collision, "_holders", lie.get)
    assert collision.look("a:1 for 4 of 4 blocks") == {"named_first": "a:1 for 4 of 4 blocks", "replicas_on": 4}
    with pytest.raises(BootseerError, match="names b:1 for 3 of 4 blocks first"):
        collision.look("b:1 for 3 of 4 blocks")
    lie["striped"] = [[0, 1], [0, 2], [0, 1], [0, 2]]
    with pytest.raises(BootseerError, match="on DataNodes \\[0, 1, 2\\]"):
        collision.look("a:1 for 4 of 4 blocks")


def test_a_slow_datanode_in_a_write(bench):
    failed = [Run(variant="capped:write-slow", n=3, failed="no pipeline")]
    found, _ = figures(
        bench, report(runs("capped:write-striped-replicated", 100), runs("capped:write-slow", 80, 50), failed)
    )
    assert found["slow_write_vs_healthy"].value == pytest.approx((1000 / 80 + 1000 / 50) / 2 / 10)
    assert found["slow_write_vs_healthy"].n == 1
    assert found["failed_with_faults"].value == 1


def test_a_run_says_what_its_measure_adds(bench, tmp_path):
    made = report()
    (tmp_path / "content").write_bytes(b"x" * 1000)
    client = bench("_stripes_client")
    runner = bench("_stripes_run").Runner(made, "capped", None, tmp_path / "content")
    answer = client.Answer(seconds=1.0, digest=runner.expected, details={"sent_mib": [1, 0]})
    runner.record("x", lambda: answer, datanode=3)
    assert made.runs[0].details == {"mib_per_s": 0.0, "datanode": 3, "sent_mib": [1, 0]}


def test_a_read_that_failed_under_a_fault_is_counted_not_timed(bench):
    failed = [Run(variant="capped:killed", n=2, failed="no answer")]
    found, _ = figures(
        bench,
        report(runs("capped:striped", 200), runs("capped:frozen", 100), runs("capped:killed", 160), failed),
    )
    assert found["frozen_vs_healthy"].value == 2.0
    assert not found["frozen_vs_healthy"].met
    assert found["killed_vs_healthy"].value == 1.25
    assert found["failed_with_faults"].value == 1
    assert not found["failed_with_faults"].met
    assert "slow_vs_healthy" not in found


def test_the_scan_is_drawn(bench):
    done = [
        *runs("capped:scan-1x256KiB", 60, 61, width=1, unit=1 << 18),
        *runs("capped:scan-4x256KiB", 200, width=4, unit=1 << 18),
        *runs("capped:scan-4x1024KiB", 230, width=4, unit=1 << 20),
        *runs("capped:scan-4x1024KiB-write", 110, width=4, unit=1 << 20),
        Run(variant="capped:scan-1x1024KiB", n=1, failed="no answer", details={"width": 1, "unit": 1 << 20}),
        *runs("capped:striped", 240),
    ]
    drawn = ET.fromstring(bench("_stripes_plot").scan(done, 240.0))
    spots = [element for element in drawn.iter() if element.tag.endswith("circle")]
    assert len(spots) == 4
    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert "unit 256 KiB" in texts
    assert "unit 1 MiB" in texts
    assert ET.fromstring(bench("_stripes_plot").scan([], 240.0)) is not None


def test_a_failed_read_that_does_not_count_ends_nothing(bench, monkeypatch, tmp_path, capsys):
    free, content = bench("_stripes_free"), tmp_path / "content"
    content.write_bytes(b"x" * 1000)
    document, tried = report(), []

    def client(self, task, **more):
        tried.append(task.way)
        if not task.source and tried.count("striped") == 2:
            raise BootseerError("the DataNode went away")
        return bench("_stripes_client").Answer(seconds=1.0, digest=self.expected)

    monkeypatch.setattr(free.Runner, "client", client)
    monkeypatch.setattr(free.Runner, "stock_read", lambda self, path: client(self, self.task("native", "/f", path)))
    cluster = contextlib.nullcontext(SimpleNamespace(url="hdfs://nn:8020"))
    monkeypatch.setattr(free, "HadoopCluster", lambda *args, **settings: cluster)
    free.run(tmp_path, document, content, rounds=2)
    assert "free:striped: failed before the runs that count: the DataNode went away" in capsys.readouterr().err
    assert [run.variant for run in document.runs if not run.failed].count("free:striped") == 2


@pytest.mark.parametrize("parts", [["reads"], ["reads", "writes"]])
def test_a_write_beside_a_slow_datanode_only_where_writes_are_measured(bench, monkeypatch, parts):
    made = bench("_stripes_capped").Capped.__new__(bench("_stripes_capped").Capped)
    called = []
    nothing = SimpleNamespace(write=len, restart_namenode=lambda **settings: None)
    made._site, made._report, made._rounds = contextlib.nullcontext(), report(), 3
    made._site.cluster, made._content, made._places, made._collision = nothing, Path(__file__), [[]], nothing
    monkeypatch.setattr(made, "_writes", lambda *args, **flags: called.append((*args, flags.get("slowed", True))))
    monkeypatch.setattr(made, "_reads", lambda: None)
    made.run(parts)
    assert called == ([(2, 3, True), (1, 3, True)] if "writes" in parts else [(2, 1, False)])
