import os
import sys
import xml.etree.ElementTree as ET
from argparse import Namespace
from pathlib import Path

import pytest

from bootseer.blocks.formats.pagelist import PageList, PageRange
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.report import Report, Run

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports modules of bench/ by name, and forgets them."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield __import__
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", None)).startswith(f"{BENCH}/")]:
        del sys.modules[name]


def runs(variant, *seconds, **details):
    return [Run(variant=variant, n=n + 1, seconds=s, details=details) for n, s in enumerate(seconds)]


def test_figures_rest_on_medians_of_the_runs_that_ended_well(bench):
    document = Report(
        name="image",
        runs=[
            *runs("local", 5.0, 4.0, 6.0),
            *runs("hot-fanotify", 5.0, 5.2, 9.0, stall_seconds=0.1, slow_faults=30, reads=900),
            *runs("record-fanotify", 9.0, 6.0, 6.0, waste=0.1, reads=15000),
            *runs("on-demand-fanotify", 14.0, stall_seconds=8.0),
            *runs("containerd", 91.0, 92.0),
            Run(variant="nydus", n=1, failed="nydusd is not built"),
            *runs("read-filled-fanotify-plain", 1.0, sequential_mb_per_s=1000, us_per_4k=10),
            *runs("read-filled-fanotify", 1.0, sequential_mb_per_s=1000, us_per_4k=12.5),
        ],
    )
    said = []
    bench("_figures").compute(document, said.append)
    found = {figure.name: figure for figure in document.figures}
    assert found["readiness_vs_local_fanotify"].value == pytest.approx(1.04)
    assert found["readiness_vs_local_fanotify"].met
    assert found["readiness_vs_full_pull"].value == pytest.approx(5.2 / 91.5, abs=1e-4)
    assert found["readiness_vs_full_pull"].n == 2
    assert found["slow_faults"].value == pytest.approx(0.002)
    assert found["stall_vs_on_demand"].value == pytest.approx(0.0125)
    assert found["complete_vs_erofs"].value == pytest.approx(0.8)
    assert not found["complete_vs_erofs"].met
    assert "readiness_vs_nydus" not in found
    assert any("readiness_vs_nydus:" in line for line in said)


def test_what_is_read_ahead_for_nobody_is_waste(bench):
    trace = Trace("ab" * 32, 1 << 20, 1, True, "fuse", (Touch(0, 9, 5, 3), Touch(2, 9, 100, 1)))
    ranges = [PageRange(b"a", 0, 4 * UNIT, 3 * UNIT), PageRange(b"b", 0, 100 * UNIT, UNIT)]
    unused = bench("_rounds").unused
    assert unused(PageList("ab" * 32, "fuse", 1, ranges), trace) == 0.25
    assert unused(PageList("ab" * 32, "fuse", 1, []), trace) == 0
    document = Report(name="image", runs=[*runs("hot-fuse", 6.0), *runs("page-list-fuse", 0.0, unused=0.25, starts=3)])
    bench("_figures").compute(document, lambda line: None)
    (figure,) = document.figures
    assert (figure.name, figure.value, figure.n, figure.met) == ("readahead_waste", 0.25, 3, False)


def test_the_drivers_share_no_runs(bench):
    document = Report(name="image", runs=[*runs("local", 5.0), *runs("hot-fuse", 6.0)])
    bench("_figures").compute(document, lambda line: None)
    assert [figure.name for figure in document.figures] == ["readiness_vs_local_fuse"]


def test_the_chart_is_well_formed_and_leaves_out_what_did_not_run(bench):
    order = ["local", "hot-fuse", "nydus"]
    some = [*runs("local", 5.0), *runs("hot-fuse", 6.0, 7.0), Run(variant="nydus", n=1, failed="no")]
    chart = bench("_plot").readiness(some, order)
    texts = [element.text for element in ET.fromstring(chart).iter() if element.text]
    assert "hot-fuse" in texts
    assert "nydus" not in texts
    ET.fromstring(bench("_plot").readiness([], order))


def test_files_a_job_reads_are_seen(bench, tmp_path):
    if os.statvfs(tmp_path).f_flag & os.ST_NOATIME:
        pytest.skip("mounted without access times")
    for name in ("read", "left"):
        (tmp_path / name).write_text("x")
    found = bench("_parts").opened_files(tmp_path, lambda: (tmp_path / "read").read_text())
    assert found == ["/read"]


def test_variants_are_chosen_by_name_and_by_beginning(bench, tmp_path):
    image, rounds = bench("image"), bench("_rounds")
    known = {*rounds.starts(), *rounds.OTHERS}
    options = Namespace(variants="local,nydus*", without="nydus-prefetch*", quick=False)
    assert image._choose(options, tmp_path) == ["local", "nydus", "nydus-10ms"]
    options = Namespace(variants=None, without=None, quick=False)
    assert known >= set(image._choose(options, tmp_path)) >= known - {*rounds.SPARE}
    options = Namespace(variants="nidus", without=None, quick=False)
    with pytest.raises(SystemExit):
        image._choose(options, tmp_path)
