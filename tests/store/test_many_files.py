"""A folder of many small files to HDFS and back: what the NameNode is asked for each, and what changes meanwhile."""

import os
import uuid
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootseer.backends.cluster import HdfsBackend
from bootseer.cli.fs import app
from bootseer.hdfs.rpc import RpcClient
from bootseer.stripefs import open_fs
from support import hadoop

pytestmark = pytest.mark.hdfs

COUNT = 40


@pytest.fixture
def url() -> str:
    return f"{hadoop.shared().url}/{uuid.uuid4().hex}"


@pytest.fixture
def local(tmp_path) -> Path:
    for number in range(COUNT):
        file = tmp_path / f"many/d{number % 2}/f{number:02}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(1000 + 200 * number))
    return tmp_path / "many"


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    counted, real = Counter[str](), RpcClient.call

    def call(self, method, *args, **more):
        counted[method] += 1
        return real(self, method, *args, **more)

    monkeypatch.setattr(RpcClient, "call", call)
    return counted


def fs(*args: str) -> str:
    done = CliRunner().invoke(app, [*args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_small_file_is_put_and_got_with_the_calls_that_hdfs_needs(url, local, calls, tmp_path):
    fs("put", str(local), f"{url}/x")
    each = ("create", "addBlock", "rename2")
    assert {method: calls[method] for method in each} == dict.fromkeys(each, COUNT)
    # complete is asked again while a DataNode has not told of the block
    others = calls.total() - calls["complete"] - calls["renewLease"] - 3 * COUNT
    assert others <= 12, calls
    calls.clear()
    fs("get", f"{url}/x", str(tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(local)
    assert calls.total() <= 3 * 8, calls  # of three folders, none of a file
    calls.clear()
    fs("put", str(local), f"{url}/x")  # over what is there: it is looked at before and at the end, and claimed
    assert calls["rename2"] == COUNT
    assert calls.total() - calls["complete"] <= 9 * COUNT + 12, calls


def test_a_small_file_alone_is_looked_at_once(url, calls):
    store = open_fs(url)
    with store.create("x/f") as out:
        calls.clear()
        out.write(b"bytes")
    assert calls == {"create": 1, "addBlock": 1, "rename2": 1, "complete": calls["complete"]}


def test_a_file_that_appears_while_a_folder_is_put_is_another_writers(url, local, monkeypatch, tmp_path):
    (tmp_path / "other").write_bytes(b"of another writer")
    fs("put", str(tmp_path / "other"), f"{url}/x/d0/f00")
    monkeypatch.setattr(HdfsBackend, "list", lambda self, path: [])
    done = CliRunner().invoke(app, ["put", str(local), f"{url}/x"])
    monkeypatch.undo()
    assert done.exit_code != 0
    fs("get", f"{url}/x/d0/f00", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"of another writer"
    assert [entry.name for entry in open_fs(url).backend.list("x/d0") if entry.name.startswith(".tmp-")] == []


def test_a_file_that_is_replaced_while_its_folder_is_got_has_one_of_its_contents(url, local, monkeypatch, tmp_path):
    fs("put", str(local), f"{url}/x")
    real, new = HdfsBackend.read_many, os.urandom(1000)

    def read_many(self, pieces):
        real(self, pieces)
        if len(pieces) > 1 and pieces[0].name.startswith("x/d1"):
            (tmp_path / "new").write_bytes(new)
            open_fs(url).put(tmp_path / "new", "x/d1/f01")

    monkeypatch.setattr(HdfsBackend, "read_many", read_many)
    fs("get", f"{url}/x", str(tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(local) | {"d1/f01": new}


def test_files_of_every_kind_come_back_as_they_are(url, tmp_path):
    (tmp_path / "all/below").mkdir(parents=True)
    for name, data in {
        "empty": b"", "zeros": bytes(100), "part": b"bootseer stri", "large": os.urandom(5 << 20),
        "looks": b"bootseer striped file 1\nmine", "below/middle": os.urandom(3 << 20), "below/COMMIT": b"a user's",
    }.items():  # fmt: skip
        (tmp_path / "all" / name).write_bytes(data)
    fs("put", str(tmp_path / "all"), f"{url}/x")
    fs("get", f"{url}/x", str(tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(tmp_path / "all")


def test_a_small_file_that_is_not_what_its_commit_says_is_not_got(url, local, tmp_path):
    fs("put", str(local), f"{url}/x", "--commit")
    folder = open_fs(url)
    folder.backend.delete("x/d0/f02")
    sink = folder.backend.create("x/d0/f02")
    sink.write(os.urandom(1400))
    sink.close()
    done = CliRunner().invoke(app, ["get", f"{url}/x/d0", str(tmp_path / "back")])
    assert (done.exit_code, "does not have the digest of its COMMIT" in str(done.exception or done.output)) != (
        0,
        False,
    )
    assert not (tmp_path / "back/f02").exists()
