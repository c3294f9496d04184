"""What the last load moved: kept by the processes that load, shown by ``bootseer fs explain --last``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bootseer.cli.fs import app
from bootseer.errors import NotFoundError
from bootseer.stripefs import loads, open_fs
from bootseer.stripefs.loads import LoadReport, NodeLoad

ONE = LoadReport(url="hdfs://nn/run/step-2", how="mount", pid=1, began=1000.0, seconds=2.0, needed=100, fetched=60)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BOOTSEER_STATE_DIR", str(tmp_path / "state"))
    return str(tmp_path / "state")


def test_the_last_load_is_that_of_all_ranks_that_loaded_the_same_at_the_same_time(state: str) -> None:
    change = msgspec.structs.replace
    of_ranks = [change(ONE, pid=10 + rank, rank=rank, began=2000.0 + 3 * (rank % 2)) for rank in range(3)]
    for report in [
        *of_ranks,
        change(ONE, pid=5, began=1500.0),
        change(ONE, pid=6, url="hdfs://nn/other", began=1999.0),
    ]:
        loads.keep(report, state)
    assert loads.last(state) == of_ranks


def test_a_later_report_of_a_load_replaces_the_earlier_one_and_old_ones_go(state: str) -> None:
    for count in range(70):
        loads.keep(msgspec.structs.replace(ONE, began=float(count * 1000), needed=1), state)
    loads.keep(msgspec.structs.replace(ONE, began=69_000.0, needed=2), state)
    assert [report.needed for report in loads.last(state)] == [2]
    assert len(list((Path(state) / "fs/loads").iterdir())) == 64


def test_what_is_no_report_is_left_out(state: str) -> None:
    assert loads.last(state) == []
    loads.keep(ONE, state)
    (Path(state) / "fs/loads/2.json").write_text("{")
    (Path(state) / "fs/loads/3.json").write_text('{"url": 3}')
    assert loads.last(state) == [ONE]


def test_a_state_folder_that_others_can_write_to_is_no_error_of_the_load(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    (tmp_path / "state").mkdir()
    os.chmod(tmp_path / "state", 0o777)
    loads.keep(ONE, str(tmp_path / "state"))
    assert "is not noted" in caplog.text
    assert not (tmp_path / "state/fs").exists()


def test_torch_load_is_shown(state: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from bootseer import torch as checkpoints

    url = f"{tmp_path}/store/step-1/"
    checkpoints.save({"w": torch.zeros(3_000_000)}, url)
    checkpoints.load(url.rstrip("/"))
    done = CliRunner().invoke(app, ["explain", "--last", "--json"])
    (found,) = json.loads(done.stdout)
    size = open_fs(str(tmp_path / "store")).stat("step-1/state.pt").size
    assert (found["how"], found["needed"], found["fetched"]) == ("torch.load", size, size)
    assert found["url"] == str(tmp_path / "store/step-1/state.pt")


def test_how_it_is_printed(state: str) -> None:
    nodes = (NodeLoad("10.0.0.1:9866", 60 << 20, float(60 << 20)), NodeLoad("10.0.0.2:9866", 3 << 20, None))
    loads.keep(msgspec.structs.replace(ONE, rank=3, hedged=2, hedges_won=1, nodes=nodes, plain_seconds=7.25), state)
    done = CliRunner().invoke(app, ["explain", "--last"])
    assert done.exit_code == 0
    for part in ("hdfs://nn/run/step-2", "mount, rank 3", "1 of 2", "7.2", "10.0.0.1:9866", "60"):
        assert part in done.stdout


@pytest.mark.parametrize("argv", [[], ["--last", "x"], ["--last", "--read"]], ids=["nothing", "both", "read"])
def test_a_file_or_the_last_load(state: str, argv: list[str]) -> None:
    done = CliRunner().invoke(app, ["explain", *argv])
    assert done.exit_code == 2
    assert "name a file, or use --last alone" in done.stderr


def test_no_load_is_known(state: str) -> None:
    done = CliRunner().invoke(app, ["explain", "--last"])
    assert isinstance(done.exception, NotFoundError)
    assert "no load of a checkpoint is known" in str(done.exception)


def test_seconds_in_which_several_wait_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(loads.time, "monotonic", lambda: now[0])
    waited = loads.Waited()
    for _ in range(2):
        with waited:
            now[0] += 1
            with waited:  # as another thread
                now[0] += 1
            now[0] += 1
        now[0] += 10
    assert waited.seconds == 6
