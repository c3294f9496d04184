"""``bootseer fs`` against a real HDFS: between stores, files that are still written."""

import json
import os
import subprocess
import uuid
from collections.abc import Callable

import pytest

from bootseer.errors import BootseerError
from bootseer.hdfs import client as hdfs
from bootseer.stripefs import open_fs
from bootseer.stripefs.maintenance import check, collect
from support import forked, hadoop

pytestmark = pytest.mark.hdfs

BIG = os.urandom(5 << 20)
Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def base() -> str:
    return f"{hadoop.shared().url}/{uuid.uuid4().hex}"


@pytest.fixture
def call(tmp_path) -> Call:
    def run(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = forked.cli("fs", *args, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done

    return run


def plain(url: str, data: bytes) -> None:
    folder, _, name = url.rpartition("/")
    sink = open_fs(folder).backend.create(name)
    sink.write(data)
    sink.close()


def test_a_checkpoint_from_a_folder_to_hdfs_and_back(call, base, tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/model").write_bytes(BIG)
    (tmp_path / "ck/config").write_bytes(b"{}")
    call("put", "ck", f"{base}/run/step-1", "--commit")
    assert call("ls", "--latest", f"{base}/run").stdout == f"{base}/run/step-1\n"
    call("cp", f"{base}/run/step-1", "local/step-1", "--verify")
    call("get", "local/step-1", "out")
    assert (tmp_path / "out/model").read_bytes() == BIG
    call("fsck", base)
    assert call("rm", base, code=78).stderr.endswith("is a folder; remove it with --recursive\n")


def test_a_plain_file_is_imported_in_place_but_not_while_it_is_written(call, base):
    plain(f"{base}/model", BIG)
    done = json.loads(call("cp", "--stripe", base, "--width", "3", "--json").stdout)
    assert [(file["striped"], file["skipped"]) for file in done["files"]] == [(True, "")]
    assert json.loads(call("inspect", f"{base}/model", "--json").stdout)["width"] == 3
    call("fsck", "--read", base)
    with hdfs.connect(base).create(f"{hdfs.split(base)[1]}/open", block_size=1 << 20) as writer:
        writer.write(BIG + BIG)  # its full blocks count as its size already
        for how in (
            ["cp", "--stripe", f"{base}/open"],
            ["get", f"{base}/open", "out"],
            ["cp", f"{base}/open", f"{base}/b"],
        ):
            assert "still being written" in call(*how, code=73).stderr
        with open_fs(base).open("open") as file:  # who reads it on purpose gets what there is
            assert file.unfinished
            assert file.read(0, file.size) == (BIG + BIG)[: file.size]
    assert "1 file, 10.5 MB striped" in call("cp", "--stripe", f"{base}/open").stdout


def test_garbage_that_a_living_writer_has_open_is_kept(call, base):
    fs = open_fs(base)
    writer = fs.create("f", striped=True, unit=4096, width=2)
    writer.write(BIG)
    before = sorted((entry.name, entry.version) for entry in fs.backend.list(".bsx"))
    dry = json.loads(call("gc", base, "--age", "0", "--json", "--dry-run").stdout)
    assert ["it may be open" in removal["kept"] for removal in dry["kept"]] == [True]
    assert sorted((entry.name, entry.version) for entry in fs.backend.list(".bsx")) == before
    kept = json.loads(call("gc", base, "--age", "0", "--json").stdout)
    assert {removal["kept"] for removal in kept["kept"]} == {"a writer has it open"}
    assert {removal.kept for removal in collect.gc(fs.backend, age=0)} == {
        "a writer has it open"
    }  # the writer is of this process
    writer.finish()
    with fs.open("f") as file:
        assert file.read(0, file.size) == BIG
    late = fs.create("g", striped=True, unit=4096, width=2)
    late.write(BIG)
    call("gc", base, "--age", "0", "--open")
    with pytest.raises(BootseerError):
        late.finish()
    call("gc", base, "--age", "0", "--open")
    assert check.fsck(fs.backend).findings == ()
