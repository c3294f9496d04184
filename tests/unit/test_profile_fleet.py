"""Many start-ups: their rows in Parquet, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bootseer.errors import DataError, NotFoundError
from bootseer.profile import fleet, regression, starts
from support import forked
from support.startups import StartUp

DAY = 86_400
FIRST = 1_767_225_601  # 2026-01-01 00:00:01 UTC, a Thursday
BASE = 1_750_000_000  # where `StartUp` has its zero


def analyse(paths: list[Path], **how: Any) -> fleet.FleetReport:
    return fleet.analyse(starts.load(paths), **how)


def started(folder: Path, job: str, began: float, seconds: dict[str, float], cycle: int = 0, **attrs: str) -> Path:
    """A start of ``len(seconds)`` nodes: 10 s of image, ``env`` of so many seconds, then a first step of 10 s."""
    made = StartUp(job, cycle=cycle, gpus=8, zero=began - BASE)
    for node, env in seconds.items():
        last = 10 + max(seconds.values())
        made.span(node, "image", 0, 10, **attrs)
        made.span(node, "env", 10, 10 + env)
        made.span(node, "first_step", last, last + 10)
    folder.mkdir(exist_ok=True)
    return made.write(folder / f"{len(list(folder.iterdir()))}.jsonl")


def profile(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return forked.cli("profile", *args, env={**os.environ, "COLUMNS": "140"})


@pytest.fixture
def weeks(tmp_path: Path) -> Path:
    """Three starts: two of ``a`` in one week (n4 slow in both), one of ``b`` in the next."""
    folder = tmp_path / "events"
    slow = {"n1": 20.0, "n2": 20.0, "n3": 20.0, "n4": 60.0}
    started(folder, "a", FIRST, slow, team="vision")
    started(folder, "a", FIRST + DAY, slow, cycle=1, team="vision")
    started(folder, "b", FIRST + 7 * DAY, {"n4": 30.0})
    return folder


def test_figures_computed_by_hand(weeks: Path) -> None:
    report = analyse([weeks])
    # a: 10 + 60 + 10 s on 4 x 8 GPUs; b: 10 + 30 + 10 s on 8 GPUs
    assert report.total.hours == pytest.approx((2 * 80 * 32 + 50 * 8) / 3600)
    assert report.total.own_hours == pytest.approx((2 * (3 * 40 + 80) * 8 + 50 * 8) / 3600)
    assert report.total.wait_hours == pytest.approx(2 * 3 * 40 * 8 / 3600)
    assert (report.total.p50, report.total.p90) == (80.0, 80.0)
    assert [(week.name, week.starts) for week in report.periods] == [("2026-W01", 2), ("2026-W02", 1)]
    assert [(job.job, job.starts) for job in report.top_jobs] == [("a", 2), ("b", 1)]
    assert [(team.name, team.starts) for team in report.teams] == [("vision", 2), ("", 1)]
    assert report.offenders == [fleet.Offender("n4", 2, ["env"])]
    env = next(stage for stage in report.stages if stage.stage == "env")
    assert env.own_hours == pytest.approx((2 * (3 * 20 + 60) * 8 + 30 * 8) / 3600)
    assert (env.starts, env.straggler_starts, env.max_over_median) == (3, 2, 3.0)
    assert report.starts_per_job == {"p50": 1, "p90": 2, "max": 2}


def test_the_stages_add_up(weeks: Path) -> None:
    report = analyse([weeks])
    assert sum(stage.own_hours for stage in report.stages) == pytest.approx(report.total.own_hours)
    assert sum(stage.wait_hours for stage in report.stages) == pytest.approx(report.total.wait_hours)


def test_compacted_rows_say_the_same_and_count_once(weeks: Path, tmp_path: Path) -> None:
    kept = tmp_path / "it's [1].parquet"
    content, count = starts.compact([weeks])
    kept.write_bytes(content)
    assert count == 3
    assert analyse([kept]) == analyse([weeks]) == analyse([weeks, kept, kept])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events", kept.name]


def test_the_name_of_a_folder_is_no_figure(weeks: Path, tmp_path: Path) -> None:
    """DuckDB takes such a folder for the column of that name."""
    (tmp_path / "job=other").mkdir()
    (tmp_path / "job=other/starts.parquet").write_bytes(starts.compact([weeks])[0])
    assert analyse([tmp_path / "job=other"]).jobs == 2


def test_what_is_known_now_replaces_what_was_known_earlier(weeks: Path, tmp_path: Path) -> None:
    (file,) = weeks.glob("2.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))  # its first step has not ended yet
    early = tmp_path / "early.parquet"
    early.write_bytes(starts.compact([weeks])[0])
    assert analyse([early]).total.unfinished == 1
    file.write_text("".join(lines))
    for order in ([early, weeks], [weeks, early]):
        assert (analyse(order).total.starts, analyse(order).total.unfinished) == (3, 0)


def test_choices(weeks: Path) -> None:
    assert analyse([weeks], since_us=(FIRST + 2 * DAY) * 10**6).total.starts == 1
    assert analyse([weeks], team="vision").total.starts == 2
    nothing = analyse([weeks], team="nobody")
    assert (nothing.total.starts, nothing.jobs, nothing.periods) == (0, 0, [])
    assert [period.name for period in analyse([weeks], period="month").periods] == ["2026-01"]
    assert len(analyse([weeks], period="day").periods) == 3


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file or folder"):
        analyse([tmp_path / "none"])
    with pytest.raises(DataError, match="no start-up in"):
        analyse([tmp_path])
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match="cannot read"):
        analyse([bad])
    for told in ("{bootseer_starts: '4'}", "{other: '3'}"):
        starts.connect().execute(f"COPY (SELECT 1 AS job) TO '{bad}' (FORMAT parquet, KV_METADATA {told})")
        with pytest.raises(DataError, match=r"of version '4'|not of"):
            analyse([bad])


def test_the_command_line(weeks: Path, tmp_path: Path) -> None:
    kept = tmp_path / "starts.parquet"
    done = profile("export", weeks, "--format", "parquet", "-o", kept)
    assert (done.returncode, done.stderr) == (0, f"{kept}: 3 start-ups\n")
    assert json.loads(profile("fleet", kept, "--json").stdout) == msgspec.to_builtins(analyse([weeks]))
    shown = profile("fleet", kept).stdout
    assert "3 start-ups of 2 jobs: 1.53 GPU-hours" in shown
    assert re.search(r"n4 +2 +env", shown)
    assert profile("fleet", kept, "--period", "year").returncode == 2
    missing = profile("export", weeks, "--format", "parquet", "-o", tmp_path / "no/x.parquet")
    assert (missing.returncode, missing.stderr.count("\n")) == (66, 1)


@pytest.mark.parametrize(
    ("env", "slower"), [(20.0, []), (23.9, []), (24.1, ["env"]), (40.0, ["start-up", "env"])], ids=str
)
def test_a_slower_start_is_found(tmp_path: Path, env: float, slower: list[str]) -> None:
    for number, seconds in enumerate([20.0, 20.0, 90.0]):  # one of them was unusual
        started(tmp_path / "before", "a", FIRST + number, {"n1": seconds}, cycle=number)
    started(tmp_path / "before", "other", FIRST, {"n1": 1.0})
    started(tmp_path / "now", "a", FIRST + 100, {"n1": env}, cycle=9)
    verdict = regression.check(starts.rows([tmp_path / "now"])[0], starts.rows([tmp_path / "before", tmp_path / "now"]))
    assert [row.stage for row in verdict.slower] == slower
    assert {row.starts for row in verdict.rows} == {3}
    report = tmp_path / "junit.xml"
    done = profile("check", tmp_path / "now", "--baseline", tmp_path / "before", "--junit", report)
    assert done.returncode == (1 if slower else 0), done.stderr
    cases = {case.get("name"): case.find("failure") is not None for case in xml.parse(report).iter("testcase")}
    assert cases == {name: name in slower for name in ("start-up", "image", "env", "first_step")}
    assert profile("check", tmp_path / "now", "--baseline", tmp_path / "before", "--tolerance", "3").returncode == 0


def test_what_cannot_be_compared(weeks: Path) -> None:
    before = starts.rows([weeks])
    with pytest.raises(NotFoundError, match="no other complete, cold start of job b"):
        regression.check(before[-1], before)
    with pytest.raises(DataError, match="has not ended"):
        regression.check(msgspec.structs.replace(before[0], startup_seconds=None), before)
    assert profile("check", weeks, "--baseline", weeks, "--job", "c").returncode == 66
    assert profile("check", weeks).returncode == 2
    kept, wrong = weeks / "starts.parquet", weeks.parent / "wrong.parquet"
    kept.write_bytes(starts.compact([weeks])[0])
    starts.connect().execute(
        f"COPY (SELECT * REPLACE (NULL::VARCHAR AS attempt) FROM read_parquet('{kept}'))"
        f" TO '{wrong}' (FORMAT parquet, KV_METADATA {{bootseer_starts: '3'}})"
    )
    done = profile("check", weeks, "--baseline", wrong)
    assert (done.returncode, done.stderr.count("\n")) == (65, 1)
    assert "wrong.parquet is no start-up" in done.stderr


def test_prometheus_reads_it(weeks: Path) -> None:
    hostile = 'x"} 1\nevil{a="'
    started(weeks, hostile, FIRST, {hostile: 1.0})
    made = StartUp("own", zero=1000)
    made.span("n", hostile, 0, 5)
    made.span("n", "env", 5, 6)
    made.write(weeks / "own.jsonl")
    done = profile("export", weeks, "--format", "prometheus")
    found = {family.name: family for family in text_string_to_metric_families(done.stdout)}
    kinds = {name: family.type for name, family in found.items()}
    assert kinds == {
        "bootseer_startup_seconds": "histogram", "bootseer_startup_stage_seconds": "histogram",
        "bootseer_startups": "counter", "bootseer_startup_cost_seconds": "counter",
        "bootseer_startup_unfinished_seconds": "gauge",
    }  # fmt: skip
    samples = found["bootseer_startup_seconds"].samples
    whole = {sample.labels.get("le", sample.name[-3:]): sample.value for sample in samples}
    assert (whole["10"], whole["30"], whole["60"], whole["120"], whole["+Inf"]) == (0, 1, 2, 4, 4)
    assert whole["sum"] == pytest.approx(80 + 80 + 50 + 21)
    cost = sum(sample.value for sample in found["bootseer_startup_cost_seconds"].samples)
    assert cost == pytest.approx(3600 * analyse([weeks]).total.hours, abs=0.1)
    complete = {(s.labels["kind"], s.labels["complete"]): s.value for s in found["bootseer_startups"].samples}
    assert complete == {("cold", "true"): 4, ("cold", "false"): 1}
    board = json.loads((Path(__file__).parents[2] / "deploy/grafana/startups.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    told = {sample.name: set(sample.labels) for family in found.values() for sample in family.samples}
    for name in re.findall(r"bootseer_\w+", asked):
        assert name in told
    labels = {label for group in re.findall(r"by \(([^)]*)\)", asked) for label in group.split(", ")}
    assert labels <= set().union(*told.values())


def test_names_are_only_names(tmp_path: Path) -> None:
    hostile = "[red]<script>'; DROP TABLE starts; --\x1b[31m"
    started(tmp_path / "events", hostile, FIRST, {hostile: 10.0})
    assert analyse([tmp_path / "events"]).top_jobs[0].job == hostile
    shown = profile("fleet", tmp_path / "events").stdout
    assert "\x1b[31m" not in shown
    assert "[red]" in shown


def test_without_duckdb_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['duckdb'] = None; from bootseer.profile import starts; starts.connect()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.endswith("views of many start-ups need the package duckdb; pip install 'bootseer[fleet]'\n")


def test_a_table_is_read_to_a_limit_and_its_numbers_are_looked_at(
    weeks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, many = tmp_path / "kept.parquet", tmp_path / "many.parquet"
    kept.write_bytes(starts.compact([weeks])[0])
    form = "(FORMAT parquet, KV_METADATA {bootseer_starts: '3'})"

    def write(what: str, more: str = "") -> None:
        starts.connect().execute(f"COPY (SELECT {what} FROM read_parquet('{kept}') AS s{more}) TO '{many}' {form}")

    wrongs = ("'nan'::DOUBLE AS hours", "'inf'::DOUBLE AS gap_hours", "9e300 AS own_hours", "repeat('x', 9999) AS job")
    for wrong in wrongs:
        write(f"* REPLACE ({wrong})")
        with pytest.raises(DataError, match=r"a row of .*many\.parquet is no start-up"):
            starts.rows([many])
    monkeypatch.setattr(starts, "_ROWS", 1000)
    write("s.*", ", range(1000)")
    with pytest.raises(DataError, match="has more than 1000 rows"):
        starts.rows([many])
    os.truncate(many, 2 << 40)
    with pytest.raises(DataError, match="has more than 1073741824 bytes"):
        starts.rows([many])


def test_hours_that_came_to_no_first_step_stand_apart(weeks: Path) -> None:
    before = analyse([weeks])
    made = StartUp("a", "9", gpus=8, zero=FIRST - BASE)
    made.span("n1", "env", 0, 5, team="vision")
    made.span("n1", "init", 5, 5 + 2 * DAY)
    made.write(weeks / "never.jsonl")
    after = analyse([weeks])
    assert (after.total.hours, after.total.unfinished) == (before.total.hours, 1)
    assert after.total.unfinished_hours == pytest.approx(8 * (2 * DAY + 5) / 3600)
    assert after.stages == before.stages
    assert [job.hours for job in after.top_jobs] == [job.hours for job in before.top_jobs]
    for one, other in ((after.teams, before.teams), (after.periods, before.periods)):
        assert sum(group.hours for group in one) == pytest.approx(sum(group.hours for group in other))
    text = profile("export", weeks, "--format", "prometheus").stdout
    assert 'bootseer_startup_unfinished_seconds{unit="gpu"} 1382440.000' in text
