"""What benchmarks take away from the product is there: a part that was renamed is to be noticed here."""

import argparse
import importlib.util
import io
import itertools
import random
import re
import tarfile

import msgspec
import pytest

from bench import every
from bench.__main__ import BENCHMARKS, ROOT, listing
from bench.checkpoint import checkpoint, once
from bench.checkpoint import figures as checkpoint_figures
from bench.cluster import figures as cluster_figures
from bench.cluster import scenario
from bench.common.report import Report, Run
from bench.image import ablate, ablated, rebuilt
from bench.page import detail, overview, reports
from bench.page.__main__ import pages
from bench.stripes import runner, scheduler_cases, scheduler_parts, stripefs
from bootseer.config import Config
from bootseer.errors import ConfigError, DataError, NotFoundError, UnsupportedError
from support.images import Member, tar_of


def test_every_part_of_ablate(monkeypatch):
    for part in ablated.PARTS:
        assert part.patch or part.settings
        assert all(hasattr(Config(), name.removeprefix("BOOTSEER_").lower()) for name in part.settings)
        if part.patch:
            monkeypatch.setattr(f"{part.patch.module}.{part.patch.name}", part.patch.value)


def test_an_ablation_has_no_peers(tmp_path):
    """Red before: it ended at once, as it has no such option."""
    made = ablate.Ablation(argparse.Namespace(runs=1), tmp_path, None, None, Report(name="ablate"), [])
    assert not made.peers


def test_every_part_of_the_scheduler():
    cases = {case.name: case for case in scheduler_cases.CASES}
    for part in scheduler_parts.PARTS:
        with part.taken_away():
            assert cases["quick"].seconds(random.Random(1)) > 0


def test_every_part_of_shared_reads():
    from bootseer.torch import shared_read

    assert shared_read.READS > 1
    assert checkpoint.GiB // 4 // once.RANKS > shared_read.BUCKET  # also of the quick form
    report = Report(name="checkpoint")
    seconds = {once.ONCE: 9.0, once.ONE_READ: 10.0, once.ONE_BUCKET: 12.0}
    report.runs += [Run(variant=name, n=1, seconds=took) for name, took in seconds.items()]
    said = []
    checkpoint_figures.compute(report, said.append)
    assert {one.name: one.value for one in report.figures} == {"gain_two_reads": 10.0, "gain_many_buckets": 25.0}


def test_figures_of_checkpoint():
    report = Report(name="checkpoint")
    speeds = {"local:mount": 5000.0, "local:pyfuse3": 2000.0, "capped:torch-load": 200.0,
              "capped:torch-hdfs-native": 50.0, "capped:torch-mount-hdfs-native": 40.0}  # fmt: skip
    seconds = {"capped:torch-mount": 9.0, "capped:torch-mount-second": 0.5, "capped:save-frozen": 9.0,
               "capped:save-replicated": 6.0}  # fmt: skip
    for n in (1, 2, 3):
        report.runs += [
            Run(variant=name, n=n, seconds=1.0, details={"mib_per_s": n * speed}) for name, speed in speeds.items()
        ]
        report.runs += [Run(variant=name, n=n, seconds=n * took) for name, took in seconds.items()]
    report.runs.append(Run(variant="capped:save-mount", n=1, failed="could not run: no --rw"))
    said = []
    checkpoint_figures.compute(report, said.append)
    found = {figure.name: (figure.value, figure.met) for figure in report.figures}
    assert found == {
        "mount_sequential_gbs": (10.4858, True),
        "mount_vs_pyfuse3": (2.5, True),
        "torch_resume_vs_vanilla": (4.0, True),  # the faster of the two that are vanilla
        "second_resume_vs_first": (18.0, True),
        "frozen_save_vs_healthy": (1.5, True),
    }
    assert any("capped:save-mount" in line for line in said)


def test_a_variant_that_cannot_run_is_listed_once(tmp_path):
    (tmp_path / "content").write_bytes(b"content")
    report = Report(name="checkpoint")
    local = runner.LocalRunner(report, "local", tmp_path / "content")

    def missing():
        raise UnsupportedError("could not run: no such option")

    assert [local.record("mount", missing) for _ in range(3)] == [None] * 3
    assert report.runs == [Run(variant="local:mount", n=1, failed="could not run: no such option")]


def test_scenarios_of_cluster(tmp_path):
    names = scenario.names()
    assert names[0] == "cold"
    runs = {run.variant for name, one in reports.load().items() if name.startswith("cluster") for run in one.runs}
    assert set(names) <= {re.sub(r"(-\d+)?:.*", "", variant) for variant in runs}, "none is on record"
    assert {name: scenario.load(name).name for name in names} == {name: name for name in names}
    own = tmp_path / "mine.toml"
    own.write_text('about = "mine"\nslow_node = 0.5\n')
    assert (scenario.load(str(own)).name, scenario.load(str(own)).slow_node) == ("mine", 0.5)
    for text in ("slow_node = 0.5", 'about = "x"\nslow_node = 2.0', 'about = "x"\nspeed = 1', "about ="):
        own.write_text(text)
        with pytest.raises(ConfigError, match=r"mine\.toml"):
            scenario.load(str(own))
    with pytest.raises(NotFoundError, match="no scenario warm"):
        scenario.load("warm")


def test_figures_of_cluster():
    report = Report(name="cluster")

    def add(variant, seconds, n=1, *, nodes=(), links=0.0, requests=0, ran=0, registry=0):
        details = {"nodes": list(nodes) or [seconds] * 4, "links_seconds": links, "index_requests": requests,
                   "setup_runs": ran, "hot_bytes": 100}  # fmt: skip
        report.runs.append(Run(variant=variant, n=n, seconds=seconds, bytes={"registry": registry}, details=details))

    for n, more in ((1, 0.0), (2, 1.0), (3, 50.0)):  # medians: one bad round does not count
        add("cold:local", 10.0, n)
        add("cold:ordinary", 109.0 + more, n, requests=40)
        add("cold:again", 19.0 + more, n, links=16.0, registry=250)
        add("cold:first", 60.0, n, requests=20, ran=2)
    report.runs.append(Run(variant="cold:strongest", n=1, failed="nydusd did not mount"))
    add("cold:first-uv", 45.0)
    add("slow-node:again", 90.0, nodes=(90.0, 10.0, 10.0, 14.0))
    add("hot:local", 4.0)
    add("hot:again", 4.5)
    add("alone:again", 10.0)
    add("mirror:again", 40.0, registry=50)
    said = []
    cluster_figures.compute(report, said.append)
    assert {figure.name: (figure.value, figure.met) for figure in report.figures} == {
        "overhead_vs_ordinary": (0.1, True),
        "last_vs_bound": (1.25, True),
        "registry_egress_hot_sets": (2.5, False),
        "setup_runs": (2, False),
        "index_requests_vs_one_node": (2.0, False),
        "p99_over_p50": (1.4, False),
        "hot_cycle_vs_cold": (0.05, True),
        "last_vs_alone": (2.0, True),
        "mirror_vs_hdfs": (2.0, True),
        "mirror_egress_hot_sets": (0.5, True),
    }
    assert "no figure overhead_vs_strongest" in said
    add("cold:strongest", 30.0, 2)
    cluster_figures.compute(report, said.append)
    figures = {figure.name: (figure.value, figure.met) for figure in report.figures}
    assert (figures["nodes_first_vs_strongest"], figures["nodes_first_uv_vs_strongest"]) == ((2.0, False), (1.5, False))


def test_a_first_start_with_the_command_of_the_other_tools_is_told_beside_that_with_pip():
    found = reports.load()
    demo = found["demo"] = msgspec.structs.replace(found["demo"], runs=[])
    for variant, seconds in {"strongest": 36.0, "first": 54.0}.items():
        demo.runs.append(Run(variant=variant, n=1, seconds=seconds))
    wide = found["cluster"]
    found["cluster"] = msgspec.structs.replace(wide, runs=[run for run in wide.runs if "uv" not in run.variant])
    assert not [line for line in overview.table(found, "") if "uv" in line]
    demo.runs.append(Run(variant="first-uv", n=1, seconds=30.0))
    assert "With that uv: a job with torch on one node 30 s." in "".join(overview.table(found, ""))
    row = "- a job with torch on one node: first step: first start 54 s (30 s with uv as they have it)"
    assert f"{row}; best other tools 36 s." in overview.losses(found)


def test_each_report_says_when_and_of_which_commit_it_was_made():
    for name, report in reports.load().items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", report.date), name
        assert report.commit, name
        assert f"{report.date}, commit `{report.commit}`" in "".join(detail.section(name, report))


def test_a_page_names_the_nodes_of_a_cluster():
    report = Report(name="cluster", argv=["--nodes", "16", "--rate", "50", "--out", "x.json"])
    assert detail.command(report) == "scripts/bench cluster --nodes 16 --rate 50 --out report.json"
    assert detail.command(Report(name="cluster-quick")) == "scripts/bench cluster --quick --out report.json"


def test_the_pages_of_figures_are_fresh():
    stale = [path for path, text in pages().items() if (ROOT / path).read_text() != text]
    assert stale == [], "run: python -m bench.page"
    assert {path.stem for path in (ROOT / "docs/benchmarks").glob("*.md")} == {one.slug for one in reports.SCENARIOS}


def test_each_missed_target_has_a_reason_and_each_reason_a_missed_target():
    found = reports.load()
    assert reports.misses(found)
    found["demo"].figures[0].met = not found["demo"].figures[0].met
    with pytest.raises(DataError, match=f"one-node.{found['demo'].figures[0].name}$"):
        reports.misses(found)


def test_a_figure_that_two_reports_have_is_told_once():
    names = [figure.name for one in reports.SCENARIOS for _, figure in reports.figures(one, reports.load())]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_the_first_screen_says_what_was_not_measured_and_where_others_are_quicker():
    row = overview.Row("read", "images", "x", (("a",), (), ("b", "c"), ("gone",), ("d",)), "cp")
    took = {"a": (200, 206, 210), "b": (30,), "c": (8.67,), "d": (0.153,)}
    runs = [Run(variant=name, n=1, seconds=seconds) for name, each in took.items() for seconds in each]
    assert overview.cells(row, {"x": Report(name="x", runs=runs)}) == [206, None, 8.67, None, 0.153]
    assert [overview.two_digits(one) for one in (206.8, 8.67, 0.153, 99.6, 1, 0, 1234)] == [
        "210", "8.7", "0.15", "100", "1.0", "0", "1200",
    ]  # fmt: skip


def test_all_reports_are_made_once_and_one_that_fails_keeps_none_from_being_made(tmp_path, monkeypatch, capfd):
    program = tmp_path / "scripts/bench"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1" != bad ] && echo "$@" >>ran && echo {} >"$3"\n')
    program.chmod(0o755)
    monkeypatch.setattr(every, "ROOT", tmp_path)
    monkeypatch.setattr(every, "_git", lambda *_: "")
    monkeypatch.setattr(every, "COMMANDS", {"one": "bench one", "bad": "bench bad", "two": "bench two"})
    reports = tmp_path / "reports"
    for _ in range(2):
        assert every.main(["--folder", str(reports)]) == 1
        assert "2 of 3 reports" in (said := capfd.readouterr().err)
        assert "not made: bad" in said
    assert [line.split()[0] for line in (tmp_path / "ran").read_text().splitlines()] == ["one", "two"]
    assert sorted(path.name for path in reports.iterdir()) == ["one.json", "two.json"]
    assert every.main(["--folder", str(reports), "--list"]) == 0
    assert [line.split()[1:] for line in capfd.readouterr().out.splitlines()][:2] == [
        ["is", "there"],
        ["scripts/bench", "bad"],
    ]


def _options(command: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for option, value in itertools.pairwise(command.split()):
        if option in ("--parts", "--variants", "--scenario"):
            found.setdefault(option, []).extend(value.split(","))
    return found


@pytest.mark.parametrize(
    ("bench", "known"),
    [("stripefs", stripefs.ALL), ("checkpoint", checkpoint.PARTS), ("ablate", [part.name for part in ablated.PARTS])],
)
def test_no_two_commands_of_all_measure_the_same_part(bench, known):
    """In the same form: a quick report is of another size. What a command without --parts measures is all."""
    of_form: dict[bool, list[str]] = {True: [], False: []}
    for command in every.COMMANDS.values():
        if command.split()[1] == bench:
            of_form["--quick" in command] += _options(command).get("--parts") or known
    assert all(len(set(parts)) == len(parts) for parts in of_form.values()), of_form


@pytest.mark.parametrize("name", ["cluster", "cluster-known"])
def test_the_commands_of_all_make_the_runs_that_are_on_record(name, monkeypatch):
    """Figures compare scenarios of one report, so a command that lacks one of them makes fewer figures."""
    monkeypatch.chdir(ROOT)
    made = {
        f"{one.name}:{variant}"
        for named in _options(every.COMMANDS[name])["--scenario"]
        for one in scenario.of_sizes(scenario.load(named), 8)
        for variant in (*one.variants, *(["local"] if "ordinary" in one.variants else []))
    }
    record = msgspec.json.decode((ROOT / f"bench/results/{name}.json").read_bytes(), type=Report)
    assert {run.variant for run in record.runs} <= made


def test_the_list_names_every_benchmark_and_a_result_of_it():
    results = {path.stem.partition("-")[0] for path in (ROOT / "bench/results").glob("*.json")}
    assert set(BENCHMARKS) <= results
    assert all(f"  {name} " in listing() and importlib.util.find_spec(one.module) for name, one in BENCHMARKS.items())


def test_a_rebased_layer_has_its_python_elsewhere_and_a_link_to_it():
    members = [
        Member("usr/lib/python3.11", "dir"),
        Member("usr/lib/python3.11/os.py", data=b"import sys"),
        Member("usr/lib/python3.11/link.py", "hardlink", link="usr/lib/python3.11/os.py"),
        Member("usr/lib/python3.11/x.cpython-311.so", data=b"\x7fELF and so on"),
        Member("usr/bin/python3.11", data=b"\x7fELF, too"),
    ]
    out, moved = io.BytesIO(), set()
    with (
        tarfile.open(fileobj=io.BytesIO(tar_of(members))) as given,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in given:
            rebuilt.rebase(given, member, made, moved)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as archive:
        found = {one.name: one.linkname or (archive.extractfile(one).read() if one.isreg() else b"") for one in archive}
    assert found == {
        "usr/lib/python3.11": "python3.12",
        "usr/lib/python3.12": b"",
        "usr/lib/python3.12/os.py": b"import sys",
        "usr/lib/python3.12/link.py": "usr/lib/python3.12/os.py",
        "usr/lib/python3.12/x.cpython-311.so": b"\x7fELF and so onupgraded",
        "usr/bin/python3.11": b"\x7fELF, tooupgraded",
    }
