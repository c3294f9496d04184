"""What benchmarks take away from the product is there: a part that was renamed is to be noticed here."""

import sys
from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.errors import UnsupportedError
from bootseer.report import Report, Run

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports modules of bench/ by name, and forgets them."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield __import__
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", None)).startswith(f"{BENCH}/")]:
        del sys.modules[name]


def test_every_part_of_ablate(bench, monkeypatch):
    for part in bench("_ablated").PARTS:
        assert part.patch or part.settings
        assert all(hasattr(Config(), name.removeprefix("BOOTSEER_").lower()) for name in {*part.settings, *part.both})
        if part.patch:
            monkeypatch.setattr(f"{part.patch.module}.{part.patch.name}", part.patch.value)


def test_every_part_of_the_scheduler(bench):
    cases = {case.name: case for case in bench("_scheduler_cases").CASES}
    for part in bench("_scheduler_parts").PARTS:
        with part.taken_away():
            assert cases["quick"].seconds(bench("random").Random(1)) > 0


def test_every_part_of_shared_reads(bench):
    from bootseer.stripefs.torch import shared_read

    once = bench("_checkpoint_once")
    assert shared_read._READS > 1
    assert bench("checkpoint").GiB // 4 // once.RANKS > shared_read.BUCKET  # also of the quick form
    report = Report(name="checkpoint")
    seconds = {once.ONCE: 9.0, once.ONE_READ: 10.0, once.ONE_BUCKET: 12.0}
    report.runs += [Run(variant=name, n=1, seconds=took) for name, took in seconds.items()]
    said = []
    bench("_checkpoint_figures").compute(report, said.append)
    assert {figure.name: figure.value for figure in report.figures} == {"gain_two_reads": 10.0, "gain_buckets": 25.0}


def test_figures_of_checkpoint(bench):
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
    bench("_checkpoint_figures").compute(report, said.append)
    found = {figure.name: (figure.value, figure.met) for figure in report.figures}
    assert found == {
        "mount_sequential_gbs": (10.4858, True),
        "mount_vs_pyfuse3": (2.5, True),
        "torch_resume_vs_vanilla": (4.0, True),  # the faster of the two that are vanilla
        "second_resume_vs_first": (18.0, True),
        "frozen_write_vs_healthy": (1.5, True),
    }
    assert any("capped:save-mount" in line for line in said)


def test_a_variant_that_cannot_run_is_listed_once(bench, tmp_path):
    (tmp_path / "content").write_bytes(b"content")
    report = Report(name="checkpoint")
    runner = bench("_stripes_run").LocalRunner(report, "local", tmp_path / "content")

    def missing():
        raise UnsupportedError("could not run: no such option")

    assert [runner.record("mount", missing) for _ in range(3)] == [None] * 3
    assert report.runs == [Run(variant="local:mount", n=1, failed="could not run: no such option")]
