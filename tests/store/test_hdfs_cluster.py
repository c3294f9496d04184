"""Real HDFS: the cluster that tests use, the client's deadlines, and what frozen and dead DataNodes do to reads."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from bootseer.backends.engine import engine
from bootseer.backends.engine.model import Tuning
from bootseer.errors import NotFoundError, NotWritableError, UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs.namenode import NameNode
from bootseer.stripefs import open_fs
from support.hadoop import HadoopCluster

pytestmark = pytest.mark.hdfs


@contextlib.contextmanager
def frozen(cluster: HadoopCluster, *datanodes: int) -> Iterator[None]:
    try:
        for index in datanodes:
            cluster.pause(index)
        yield
    finally:
        for index in datanodes:
            cluster.resume(index)
        cluster.wait_live(4)


def test_operations_and_their_errors(cluster, folder):
    client, node = hdfs.connect(cluster.url), NameNode.connect(cluster.url)
    assert client is hdfs.connect(f"{cluster.url}/some/folder")
    with client.create(f"{folder}/a/f", replication=2, block_size=1 << 20) as out:
        out.write(b"x" * (3 << 20))
    info = node.info(f"{folder}/a/f")
    assert (info.size, info.is_dir, info.replication, info.block_size) == (3 << 20, False, 2, 1 << 20)
    assert client.open(f"{folder}/a/f").read((1 << 20) - 2, 4) == b"xxxx"
    assert [entry.path for entry in node.list(folder)] == [f"{folder}/a"]
    with pytest.raises(FileExistsError):
        client.create(f"{folder}/a/f")
    node.mkdirs(f"{folder}/b/c")
    node.rename(f"{folder}/a/f", f"{folder}/b/f")
    with client.create(f"{folder}/g") as out:
        out.write(b"y")
    with pytest.raises(FileExistsError):
        node.rename(f"{folder}/g", f"{folder}/b/f")
    node.rename(f"{folder}/g", f"{folder}/b/f", overwrite=True)
    assert client.read(f"{folder}/b/f") == b"y"
    assert not client.delete(f"{folder}/none")
    for call in (client.open, node.list, node.blocks):
        with pytest.raises(NotFoundError, match=f"{folder}/none on {cluster.url}: no such file or folder$"):
            call(f"{folder}/none")
    with pytest.raises(NotFoundError, match="it is a folder"):
        client.open(folder)
    with pytest.raises(NotWritableError, match=r"is not a directory"):
        client.create(f"{folder}/b/f/g")
    with pytest.raises(NotFoundError, match="a part of it is a file"):
        node.blocks(f"{folder}/b/f/g")
    with pytest.raises(NotWritableError, match="non empty"):
        client.delete(folder)
    assert client.delete(folder, recursive=True)


def test_the_stock_client_sees_the_parts(cluster, folder, tmp_path):
    data = os.urandom(5 << 20)
    (tmp_path / "f").write_bytes(data)
    open_fs(f"{cluster.url}{folder}").put(tmp_path / "f", "ck/state.pt", width=2)
    listing = cluster.fs_shell(["-ls", "-R", folder])
    assert listing.count("/.bsx/") == 2
    assert cluster.fs_shell(["-cat", f"{folder}/ck/state.pt"]).startswith("bootseer striped file 1\n")
    cluster.fs_shell(["-mv", f"{folder}/ck", f"{folder}/moved"])  # a folder moves with its stripes
    fs = open_fs(f"{cluster.url}{folder}")
    assert fs.open("moved/state.pt").read(0, len(data)) == data
    cluster.fs_shell(["-put", str(tmp_path / "f"), f"{folder}/plain"])
    with fs.open("plain") as file:
        assert file.read(3 << 20, 1 << 20) == data[3 << 20 : 4 << 20]
    with pytest.raises(NotFoundError, match="No such file"):
        cluster.fs_shell(["-get", f"{folder}/none", str(tmp_path / "x")])


def test_every_call_ends_when_no_datanode_answers(cluster, folder):
    client = hdfs.HdfsClient(cluster.url, deadline=2)
    with client.create(f"{folder}/f") as out:
        out.write(b"x" * 1000)
    reader = client.open(f"{folder}/f")
    with frozen(cluster, 0, 1, 2, 3):
        begin = time.monotonic()
        with pytest.raises(UnavailableError, match="no answer within 2 s"):
            reader.read(0, 1000)
        with pytest.raises(UnavailableError), client.create(f"{folder}/g") as out:
            out.write(b"y")
        assert time.monotonic() - begin < 12
    assert reader.read(0, 1000) == b"x" * 1000


def test_every_call_ends_when_the_namenode_does_not_answer(cluster, folder):
    client = hdfs.HdfsClient(cluster.url, deadline=1)
    cluster.namenode.signal(signal.SIGSTOP)
    try:
        for call in (client.open, client.create, client.delete):
            begin = time.monotonic()
            with pytest.raises(UnavailableError, match="no answer within 1 s"):
                call(f"{folder}/none")
            assert time.monotonic() - begin < 3
    finally:
        cluster.namenode.signal(signal.SIGCONT)
    cluster.wait_live(4)


def test_a_frozen_storage_is_an_error_in_time_and_not_other_bytes(cluster, folder, monkeypatch):
    monkeypatch.setattr(engine, "_engine", engine.Engine(tuning=Tuning(patience=8.0)))
    fs = open_fs(f"{cluster.url}{folder}")
    data = os.urandom(2 << 20)
    with fs.create("f", striped=True, unit=1 << 18) as out:
        out.write(data)
    with fs.open("f") as file:
        with frozen(cluster, 0, 1, 2, 3):
            begin = time.monotonic()
            with pytest.raises(UnavailableError, match="no part of f has come within 8 s"):
                file.read(0, len(data))
            assert time.monotonic() - begin < 20
        assert file.read(0, len(data)) == data
