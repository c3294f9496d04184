import os
import sys
import xml.etree.ElementTree as ET
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest

from bootseer.blocks.formats.pagelist import PageList, PageRange
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.config import Config
from bootseer.errors import NotFoundError
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


def figures(bench, document):
    said = []
    bench("_figures").compute(document, said.append)
    return {figure.name: figure for figure in document.figures}, said


def test_figures_rest_on_medians_of_the_runs_that_ended_well(bench):
    document = Report(
        name="image",
        runs=[
            *runs("local", 5.0, 4.0, 6.0),
            *runs("hot", 5.0, 5.2, 9.0, stall_seconds=0.1, slow_faults=30, reads=900),
            *runs("record", 9.0, 6.0, 6.0, waste=0.1, reads=15000),
            *runs("on-demand", 14.0, stall_seconds=8.0),
            *runs("containerd", 91.0, 92.0),
            Run(variant="nydus", n=1, failed="nydusd is not built"),
            *runs("read-complete-plain", 1.0, sequential_mb_per_s=1000, us_per_4k=10),
            *runs("read-complete", 1.0, sequential_mb_per_s=1000, us_per_4k=12.5),
            *runs("read-filled-plain", 1.0, sequential_mb_per_s=1000, us_per_4k=10),
            *runs("read-filled", 1.0, sequential_mb_per_s=700, us_per_4k=31),
        ],
    )
    found, said = figures(bench, document)
    assert found["readiness_vs_local"].value == pytest.approx(1.04)
    assert found["readiness_vs_local"].met
    assert found["readiness_vs_full_pull"].value == pytest.approx(5.2 / 91.5, abs=1e-4)
    assert found["readiness_vs_full_pull"].n == 2
    assert found["slow_faults"].value == pytest.approx(0.002)
    assert found["stall_vs_on_demand"].value == pytest.approx(0.0125)
    assert found["complete_vs_erofs"].value == pytest.approx(0.8)
    assert not found["complete_vs_erofs"].met
    assert (found["filled_vs_erofs"].value, found["filled_vs_erofs"].met) == (0.7, True)
    assert (found["filled_random_us"].value, found["filled_random_us"].met) == (31, False)
    assert "readiness_vs_nydus" not in found
    assert any("readiness_vs_nydus:" in line for line in said)


def test_starts_from_two_checkouts_are_compared_round_by_round(bench):
    """Of rounds in which one of them failed nothing is said. Recordings take no turns."""
    document = Report(
        name="image",
        runs=[
            *runs("record", 9.0),
            *runs("record@before", 3.0),
            *runs("hot", 5.0, 6.0, 20.0, 8.0),
            *runs("hot@before", 4.0, 6.0),
            Run(variant="hot@before", n=3, failed="it is said why"),
            Run(variant="hot@before", n=4, seconds=10.0),
            *runs("warm", 5.0),
            Run(variant="warm@before", n=1, failed="no"),
        ],
    )
    found, said = figures(bench, document)
    assert list(found) == ["hot_vs_before"]
    assert (found["hot_vs_before"].value, found["hot_vs_before"].n, found["hot_vs_before"].met) == (1.0, 3, True)
    assert "hot_vs_before: 1.250 1.000 0.800" in said
    assert any("warm_vs_before:" in line for line in said)


def test_an_order_tells_another_checkout_what_it_wants_to_know(bench, tmp_path):
    checkout, node = bench("_checkout"), bench("_node")
    (tmp_path / "bench").mkdir()
    with pytest.raises(NotFoundError, match="no checkout"):
        checkout.Checkout(tmp_path, checkout.BEFORE)
    (tmp_path / "bench/_node.py").write_text("")
    other = checkout.Checkout(tmp_path, checkout.BEFORE)
    order = node.Order(how="lazy", work="w", link="l", command=["c"], ref="r", record="f")
    python, script, words = other.argv(order)
    assert (python, script) == (sys.executable, str(tmp_path / "bench/_node.py"))
    assert msgspec.json.decode(words, type=node.Order) == order
    assert msgspec.json.decode(words)["driver"] == "fuse"
    assert other.environ()["PYTHONPATH"] == str(tmp_path / "src")
    own = tmp_path / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert checkout.Checkout(tmp_path, checkout.BEFORE).argv(order)[0] == str(own)


def test_what_a_part_saves(bench):
    ablate = bench("ablate")
    document = Report(
        name="ablate",
        runs=[
            *runs("hotpack:with", 5.0, 6.0, 6.0),
            *runs("hotpack:without", 10.0, 10.0),
        ],
    )
    for run in document.runs:
        run.bytes["link"] = 3_000_000
    ablate.compute(document)
    (figure,) = document.figures
    assert (figure.name, figure.value, figure.n, figure.met) == ("gain_hotpack", 45.0, 2, True)
    *_, line = ablate.table(document.runs)
    assert line.startswith("| hotpack |")
    assert line.endswith("| 6.00 | 10.00 | 45.0 | 40.0 to 50.0 | 3 | 3 |")


def test_every_part_that_is_taken_away_is_there(bench, monkeypatch):
    """Patches and settings name what is in the product: a part that was renamed is to be noticed here."""
    for part in bench("_ablated").PARTS:
        assert part.patch or part.settings
        assert all(hasattr(Config(), name.removeprefix("BOOTSEER_").lower()) for name in {*part.settings, *part.both})
        if part.patch:
            monkeypatch.setattr(f"{part.patch.module}.{part.patch.name}", part.patch.value)


def test_what_is_read_ahead_for_nobody_is_waste(bench):
    trace = Trace("ab" * 32, 1 << 20, 1, True, "fuse", (Touch(0, 9, 5, 3), Touch(2, 9, 100, 1)))
    ranges = [PageRange(b"a", 0, 4 * UNIT, 3 * UNIT), PageRange(b"b", 0, 100 * UNIT, UNIT)]
    unused = bench("_rounds").unused
    assert unused(PageList("ab" * 32, "fuse", 1, ranges), trace) == 0.25
    assert unused(PageList("ab" * 32, "fuse", 1, []), trace) == 0
    document = Report(name="image", runs=[*runs("hot", 6.0), *runs("page-list", 0.0, unused=0.25, starts=3)])
    bench("_figures").compute(document, lambda line: None)
    (figure,) = document.figures
    assert (figure.name, figure.value, figure.n, figure.met) == ("readahead_waste", 0.25, 3, False)


def test_reports_of_two_drivers_are_read_as_of_the_one_that_stayed(bench):
    document = Report(name="image", runs=[*runs("local", 5.0), *runs("hot-fuse", 6.0), *runs("hot-fanotify", 5.0)])
    found, _ = figures(bench, document)
    assert found["readiness_vs_local"].value == pytest.approx(1.2)


def test_the_chart_is_well_formed_and_leaves_out_what_did_not_run(bench):
    order = ["local", "hot", "nydus"]
    some = [*runs("local", 5.0), *runs("hot", 6.0, 7.0), Run(variant="nydus", n=1, failed="no")]
    chart = bench("_plot").readiness(some, order)
    texts = [element.text for element in ET.fromstring(chart).iter() if element.text]
    assert "hot" in texts
    assert "nydus" not in texts
    ET.fromstring(bench("_plot").readiness([], order))


def test_files_a_job_reads_are_seen(bench, tmp_path):
    if os.statvfs(tmp_path).f_flag & os.ST_NOATIME:
        pytest.skip("mounted without access times")
    for name in ("read", "left"):
        (tmp_path / name).write_text("x")
    found = bench("_parts").opened_files(tmp_path, lambda: (tmp_path / "read").read_text())
    assert found == ["/read"]


def test_variants_are_chosen_by_name_and_by_beginning(bench):
    image, rounds = bench("image"), bench("_rounds")
    known = [*rounds.STARTS, *rounds.OTHERS]
    options = Namespace(variants="local,nydus*", without="nydus-prefetch*", quick=False)
    assert image._choose(options) == ["local", "nydus", "nydus-10ms"]
    options = Namespace(variants=None, without=None, quick=False)
    assert image._choose(options) == known
    options = Namespace(variants="nidus", without=None, quick=False)
    with pytest.raises(SystemExit):
        image._choose(options)
