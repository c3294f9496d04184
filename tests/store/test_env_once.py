"""Nodes that start together, against real stores: one runs the command or converts, the others use its result."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer import env, image
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Target
from bootseer.objects import open_store
from support import hadoop
from support.images import Member, write_image
from support.objectserver import BUCKET, ObjectServer
from support.waits import together, until

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


@pytest.mark.parametrize("fails", [False, True])
def test_sixteen_nodes_run_the_command_once(
    url: str, tmp_path: Path, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each with its own folders; or, when it fails, all: what others say of a failure ends no start."""
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
            return int(fails)

        spec = EnvSpec(
            targets=(Target("/opt/env", str(home / "target")),),
            command=("make-env",),
            image_digest="sha256:1",
            background=False,
            restore="unpack",
        )
        config = Config(cache_dir=str(home / "cache"), state_dir=str(home / "state"))
        barrier.wait(60)
        return env.run(spec, runner, store_url=url, config=config)

    with ThreadPoolExecutor(NODES) as pool:
        results = list(pool.map(start, range(NODES)))
    outcomes = sorted(result.outcome.value for result in results)
    if fails:
        assert outcomes == ["ran"] * NODES
        assert {result.exit_code for result in results} == {1}
        assert len(set(runs)) == len(runs) == NODES
    else:
        assert outcomes == ["ran-and-published"] + ["restored-unpack"] * (NODES - 1)
        assert len(runs) == 1
        assert list(open_store(url).list("leases")) == []
    for number in runs if fails else range(NODES):
        assert (tmp_path / f"node{number}" / "target" / "made").read_text() == "made"


def test_four_nodes_convert_an_image_once(url: str, tmp_path: Path) -> None:
    write_image(tmp_path / "layout", [[Member("a", data=b"data" * 50_000)]], tag="v1")

    def convert(number: int) -> image.Ensured:
        return image.ensure(f"oci:{tmp_path}/layout:v1", url, work_dir=tmp_path / str(number), wait=600.0)

    made = together(convert, range(4))
    assert sorted(found.fresh for found in made) == [False] * 3 + [True]
    assert len({found.record.tree for found in made}) == 1
    assert list(open_store(url).list("leases")) == []
