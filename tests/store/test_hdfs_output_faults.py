"""Writes to real HDFS while its daemons are frozen, killed and restarted: right bytes in bounded time, or one error."""

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from bootseer.errors import BootseerError, UnavailableError
from bootseer.hdfs import blockwriter, lease, pipeline, placement, probe
from bootseer.hdfs import client as hdfs
from bootseer.hdfs.blockwriter import BlockLost
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.placement import Placement
from support import forked
from support.hadoop import HadoopCluster
from support.waits import later, until

pytestmark = pytest.mark.hdfs

MIB = 1 << 20


@pytest.fixture
def path() -> str:
    return f"/{uuid.uuid4().hex}/f"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No DataNode is avoided because of an earlier test."""
    yield
    placement.shunned_nodes.clear()


@contextlib.contextmanager
def down(cluster: HadoopCluster, index: int, how: str) -> Iterator[None]:
    """DataNode ``index`` is frozen or dead inside."""
    (cluster.pause if how == "frozen" else cluster.kill)(index)
    try:
        yield
    finally:
        (cluster.resume if how == "frozen" else cluster.restart)(index)


def content(cluster: HadoopCluster, path: str) -> bytes:
    return hdfs.connect(cluster.url).read(path)


@pytest.mark.parametrize(
    ("how", "replication", "position"),
    [
        # first, in the middle, last: who notices differs
        *(("frozen", replication, position) for replication, position in ((3, 0), (3, 1), (2, 0), (2, 1))),
        ("killed", 3, 0),
    ],
)
def test_a_datanode_fails_in_the_middle_of_a_block(cluster, namenode, path, how, replication, position, caplog):
    data = os.urandom(24 * MIB)  # the rest is more than may be on its way
    out = FileOutput(namenode, path, replication=replication, block_size=32 * MIB)
    with out:
        out.write(data[: 5 * MIB + 77])
        out._block._drain(4 * MIB)  # type: ignore[union-attr]
        victim = out.nodes[position]
        with down(cluster, cluster.index_of(victim.address), how):
            begin = time.monotonic()
            out.write(data[5 * MIB + 77 :])
            out.close()
            assert time.monotonic() - begin < 20
    assert content(cluster, path) == data
    assert f"goes on with {replication - 1} of {replication} DataNodes" in caplog.text
    blocks = namenode.blocks(path)
    assert sum(block.block.length for block in blocks.blocks) == len(data)
    # where one is left, its block ends, and the next one has all its replicas
    assert len(blocks.blocks) == (2 if replication == 2 else 1)
    # the replica of the failed DataNode is of an older generation and does not count
    assert all(victim not in block.nodes for block in blocks.blocks[:1]) or how == "killed"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_datanode_fails_between_the_last_byte_and_the_end(cluster, namenode, path, position):
    data = os.urandom(3 * MIB)
    out = FileOutput(namenode, path, replication=3)
    with out:
        out.write(data)
        out._flush()
        assert out._block is not None
        out._block._drain(0)  # type: ignore[union-attr]
        with down(cluster, cluster.index_of(out.nodes[position].address), "frozen"):
            out.close()
    assert content(cluster, path) == data


def test_files_written_together_leave_a_frozen_datanode_at_once(cluster, namenode, path, caplog, monkeypatch):
    """Who finds it silent tells the others. What it has when it wakes up is of an older generation."""
    asked: list[int] = []
    dial = probe.dial

    def counted(host: str, port: int, until: float) -> socket.socket:
        asked.append(port)
        return dial(host, port, until)

    monkeypatch.setattr(probe, "dial", counted)
    together = Placement()
    data = [os.urandom(14 * MIB) for _ in range(4)]  # more than a window
    outs = [FileOutput(namenode, f"{path}{i}", replication=2, placement=together) for i in range(4)]
    for out, whole in zip(outs, data, strict=True):
        out.write(whole[: 2 * MIB])
        out._block._drain(0)  # type: ignore[union-attr]
    victim = outs[0].nodes[1]
    having = [out for out in outs if victim in out.nodes]
    assert len(having) == 2
    with cluster.frozen(cluster.index_of(victim.address)):
        for out, whole in zip(outs, data, strict=True):
            out.write(whole[2 * MIB :])
            assert victim not in out.nodes
        for out in outs:
            out.close()
        assert asked.count(victim.port) == 1
        assert caplog.text.count("goes on with 1 of 2 DataNodes") == 2
    for i, whole in enumerate(data):
        assert content(cluster, f"{path}{i}") == whole
        blocks = namenode.blocks(f"{path}{i}").blocks
        assert sum(block.block.length for block in blocks) == len(whole)


def test_what_one_datanode_has_alone_is_copied_while_the_file_is_open(cluster, namenode, path):
    """The NameNode knows of it, which by itself would copy it when the file is closed. More is written
    than may be on its way, or nobody waits for the frozen one."""
    data = os.urandom(32 * MIB)
    with FileOutput(namenode, path, replication=2, block_size=64 * MIB) as out:
        out.write(data[: 5 * MIB])
        victim = out.nodes[0]
        with cluster.frozen(cluster.index_of(victim.address)):
            out.write(data[5 * MIB :])
            until(lambda: victim not in (nodes := namenode.blocks(path).blocks[0].nodes) and len(nodes) == 2)
    assert content(cluster, path) == data


def test_a_pause_of_a_datanode_costs_one_block_at_most(cluster, namenode, path):
    """It takes part in the next one."""
    data = os.urandom(24 * MIB)
    with FileOutput(namenode, path, replication=3, block_size=16 * MIB) as out:
        out.write(data[: 2 * MIB])
        victim = out.nodes[1]
        resume = threading.Timer(1.0, cluster.resume, [cluster.index_of(victim.address)])
        cluster.pause(cluster.index_of(victim.address))
        resume.start()
        try:
            out.write(data[2 * MIB : 15 * MIB])
        finally:
            resume.join()
        until(lambda: victim not in placement.shunned())
        out.write(data[15 * MIB :])
    blocks = namenode.blocks(path).blocks
    assert [block.block.length for block in blocks] == [16 * MIB, 8 * MIB]
    assert content(cluster, path) == data


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_datanode_that_is_down_already_is_left_out(cluster, namenode, path, how, caplog):
    """At set-up the block is given up and another one asked for without that DataNode; the next file avoids it."""
    caplog.set_level(logging.WARNING)
    data = os.urandom(2 * MIB)
    with down(cluster, 1, how):
        for number in range(4):
            with FileOutput(namenode, f"{path}{number}", replication=3, block_size=MIB) as out:
                out.write(data)
            assert content(cluster, f"{path}{number}") == data
    assert "goes elsewhere" in caplog.text


def test_two_datanodes_fail_one_after_the_other(cluster, namenode, path):
    data = os.urandom(36 * MIB)
    with FileOutput(namenode, path, replication=3, block_size=64 * MIB) as out:
        out.write(data[: 6 * MIB])
        first = cluster.index_of(out.nodes[2].address)
        with down(cluster, first, "frozen"):
            out.write(data[6 * MIB : 12 * MIB])
            out._block._drain(0)  # type: ignore[union-attr]
            second = cluster.index_of(out.nodes[0].address)
            with down(cluster, second, "frozen"):
                out.write(data[12 * MIB :])
                # the one that is left copies what it has to the fourth one: the next failure does not lose it
                assert len(out.nodes) == 2
                until(lambda: len(namenode.blocks(path).blocks[0].nodes) == 2)
                out.close()
    assert content(cluster, path) == data
    assert len(namenode.blocks(path).blocks) == 2


def test_two_datanodes_freeze_at_once(cluster, namenode, path):
    data = os.urandom(12 * MIB)
    with FileOutput(namenode, path, replication=3, block_size=64 * MIB) as out:
        out.write(data[: 4 * MIB])
        with cluster.frozen(*(cluster.index_of(node.address) for node in out.nodes[:2])):
            out.write(data[4 * MIB :])
            out.close()
    assert content(cluster, path) == data


def test_the_namenode_is_away_during_a_recovery(cluster, namenode, path):
    """The new generation of a block comes from the NameNode: the write waits for it, and goes on."""
    data = os.urandom(12 * MIB)
    with FileOutput(namenode, path, replication=2, block_size=64 * MIB) as out:
        out.write(data[: 4 * MIB])
        with down(cluster, cluster.index_of(out.nodes[1].address), "frozen"):
            with cluster.frozen_namenode():
                writing = later(
                    lambda: (out.write(data[4 * MIB :]), out.close())
                )  # sockets may hold all that is written
                time.sleep(4)
                assert not writing.done()
            writing.result(60)
    assert content(cluster, path) == data


KILLED = """
import sys
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.placement import Placement
from bootseer.hdfs.records import DataNode
with FileOutput(NameNode.connect(sys.argv[1]), sys.argv[2], replication=2, block_size=1 << 20) as out:
    out.write(b"x" * (3 << 20))
"""


@pytest.mark.parametrize("point", ["create", "add-block@2", "packet@3", "block-end", "complete"])
def test_kill_9_leaves_a_file_that_another_writer_may_replace_at_once(cluster, namenode, path, point):
    name, _, nth = point.partition("@")
    fault = f"hdfs.output.{name}=kill{'@' + nth if nth else ''}"
    assert forked.run("-c", KILLED, cluster.url, path, env={**os.environ, "BOOTSEER_FAULTS": fault}).returncode == -9
    namenode.delete(path)
    with FileOutput(namenode, path) as out:
        out.write(b"mine")
    assert content(cluster, path) == b"mine"


def test_the_loss_of_the_only_replica_is_an_error_that_names_the_block(cluster, namenode, path, monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 1.0)
    monkeypatch.setattr(probe, "PROBE", 0.5)
    out = FileOutput(namenode, path, replication=1)
    out.write(b"x" * (4 * MIB))
    index = cluster.index_of(out.nodes[0].address)
    begin = time.monotonic()
    with down(cluster, index, "killed"), pytest.raises(BlockLost, match="no DataNode is left that has all of block"):
        out.write(b"x" * (40 * MIB))
    assert time.monotonic() - begin < 30
    monkeypatch.setattr("bootseer.hdfs.output.HEARTBEAT", 0.0)
    out.keep_alive()
    for step in (lambda: out.write(b"y"), out.close):  # a caller who goes on must not succeed
        with pytest.raises(UnavailableError, match="an earlier write of it failed"):
            step()
    out.abandon()
    assert namenode.info(path) is None


def test_no_datanode_at_all_is_an_error_in_time(cluster, namenode, path, monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 1.0)
    monkeypatch.setattr(probe, "PROBE", 0.5)
    monkeypatch.setattr(blockwriter, "PATIENCE", 4.0)
    out = FileOutput(namenode, path, replication=2)
    with cluster.frozen(0, 1, 2, 3):
        begin = time.monotonic()
        with pytest.raises(UnavailableError, match=r"no pipeline after|no DataNode is left|cannot add a block"):
            out.write(b"x" * (20 * MIB))
        assert time.monotonic() - begin < 30
    out.abandon()
    assert namenode.info(path) is None


def test_the_namenode_restarts_while_a_file_is_written(cluster, namenode, path):
    data = os.urandom(24 * MIB)
    with FileOutput(namenode, path, replication=2, block_size=4 * MIB) as out:
        out.write(data[: 9 * MIB])
        cluster.kill_namenode()
        back = threading.Timer(1.0, cluster.restart_namenode)
        back.start()
        try:
            out.write(data[9 * MIB :])  # needs blocks that only the NameNode can give
        finally:
            back.join()
    assert content(cluster, path) == data


def test_a_frozen_namenode_does_not_hold_up_a_block(cluster, namenode, path):
    data = os.urandom(8 * MIB)
    with FileOutput(namenode, path, replication=2, block_size=32 * MIB) as out:
        out.write(data[:MIB])
        with cluster.frozen_namenode():
            out.write(data[MIB:])
            out._block._drain(0)  # type: ignore[union-attr]
    assert content(cluster, path) == data


@pytest.mark.soak
def test_without_renewal_the_lease_is_lost(tmp_path, monkeypatch):
    """A NameNode whose hard limit is seconds: one file's lease is renewed, the other's, the control, is not."""
    settings = {"dfs.namenode.lease-hard-limit-sec": "6", "dfs.namenode.lease-recheck-interval-ms": "200"}
    with HadoopCluster(tmp_path / "hdfs", 1, settings=settings) as cluster:
        address = urlsplit(cluster.url)
        renewed = NameNode.connect(cluster.url)
        control = NameNode([(str(address.hostname), int(address.port or 0))], renewed.user)  # another lease holder
        monkeypatch.setattr(lease, "RENEW", 0.5)
        with FileOutput(renewed, "/f", replication=1, block_size=MIB) as kept:
            kept.write(b"a" * MIB)
            out = FileOutput(control, "/g", replication=1, block_size=MIB)
            lease.release(out)
            out.write(b"a" * MIB)
            time.sleep(8)
            with pytest.raises(BootseerError, match=r"cannot add a block|cannot renew"):
                out.write(b"b" * (2 * MIB))
            kept.write(b"b" * MIB)
        assert content(cluster, "/f") == b"a" * MIB + b"b" * MIB
        out.abandon()
        control.close()
