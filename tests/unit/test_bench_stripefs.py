"""The figures and the chart of bench/stripefs, from made-up runs."""

import sys
import xml.etree.ElementTree as ET
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
