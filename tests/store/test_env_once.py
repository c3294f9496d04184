"""Nodes that start together, against real stores: one runs the command, the others use its result."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.env import EnvResult
from bootseer.objects import open_store
from support import envnode, hadoop
from support.objectserver import BUCKET, ObjectServer
from support.waits import until

NODES = 16


@pytest.fixture(params=["folder", "s3", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "store")
    elif request.param == "hdfs":
        yield f"{hadoop.shared().url}/{uuid.uuid4().hex}"
    else:
        import fsspec.config

        with ObjectServer() as server:
            monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
            yield f"s3://{BUCKET}/{uuid.uuid4().hex}"


def test_sixteen_nodes_run_the_command_once(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each with its own folders."""
    barrier, lock, runs = threading.Barrier(NODES), threading.Lock(), []

    def start(number: int) -> EnvResult:
        home = tmp_path / f"node{number}"

        def runner() -> int:
            with lock:
                runs.append(number)
            if len(runs) == 1:
                until(lambda: caplog.text.count("waiting for") >= NODES - 1, 120)
            (home / "target").mkdir(parents=True)
            (home / "target" / "made").write_text("made")
            return 0

        barrier.wait(60)
        return envnode.run(home, url, runner, restore="unpack")

    with ThreadPoolExecutor(NODES) as pool:
        results = list(pool.map(start, range(NODES)))
    outcomes = sorted(result.outcome.value for result in results)
    assert outcomes == ["ran-and-published"] + ["restored-unpack"] * (NODES - 1)
    assert len(runs) == 1
    assert list(open_store(url).list("leases")) == []
    for number in range(NODES):
        assert (tmp_path / f"node{number}" / "target" / "made").read_text() == "made"
