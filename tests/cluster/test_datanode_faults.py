"""Blocks read while their DataNode is frozen, killed and restarted, in a cluster that wants block tokens."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bootseer.errors import UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs import datanode
from bootseer.hdfs.connection import Transfer
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import Located
from bootseer.hdfs.replica_errors import Cancelled, StaleReplica
from support.hadoop import HadoopCluster
from support.waits import until

pytestmark = pytest.mark.hdfs

SIZE = 96 << 20
TRIES = 10  # for what must happen in the middle of a read


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HadoopCluster]:
    root = tmp_path_factory.mktemp("hdfs")
    with HadoopCluster(root, 2, settings={"dfs.block.access.token.enable": "true"}) as made:
        yield made


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(1).randbytes(1 << 20) * (SIZE >> 20)


@pytest.fixture(scope="module")
def located(cluster: HadoopCluster, content: bytes) -> Located:
    with hdfs.connect(cluster.url).create("/large", replication=2, block_size=128 << 20) as out:
        out.write(content)
    namenode = NameNode.connect(cluster.url)
    until(lambda: len(namenode.blocks("/large").blocks[0].nodes) == 2, 30.0, "both replicas")
    return namenode.blocks("/large").blocks[0]


@pytest.fixture
def index(cluster: HadoopCluster, located: Located) -> Iterator[int]:
    """Which of the cluster's DataNodes has the block's first replica; it runs."""
    datanode.idle.clear()
    sites = [cluster.root / "conf" / daemon.name / "hdfs-site.xml" for daemon in cluster.datanodes]
    index = next(i for i, site in enumerate(sites) if f":{located.nodes[0].port}<" in site.read_text())
    if not cluster.datanodes[index].alive():
        cluster.restart(index)
    yield index
    datanode.idle.clear()


class Reading(threading.Thread):
    """A read of the whole block in a thread; ``error`` is what it ended with."""

    def __init__(self, located: Located, deadline: float) -> None:
        super().__init__()
        self.located, self.deadline = located, deadline
        self.transfer, self.memory = Transfer(), bytearray(SIZE)
        self.error: BaseException | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        part = memoryview(self.memory)
        try:
            datanode.read(
                self.located.nodes[0], self.located, 0, [part], deadline=self.deadline, verify=True,
                transfer=self.transfer,
            )  # fmt: skip
        except BaseException as exc:
            self.error = exc
        self.ended = time.monotonic()

    def strike(self, action: Callable[[], object]) -> bool:
        """Do it in the middle of the read; False when that was missed."""
        until = time.monotonic() + 10
        while not self.transfer.received and self.is_alive() and time.monotonic() < until:
            time.sleep(0.001)
        action()
        return self.transfer.received < SIZE


def small(located: Located, deadline: float = 10.0, replica: int = 0) -> bytes:
    memory = bytearray(5000)
    datanode.read(located.nodes[replica], located, 4_000, [memoryview(memory)], deadline=deadline, verify=True)
    return bytes(memory)


def test_block_tokens(cluster, located, content):
    assert located.token.identifier
    assert small(located) == content[4_000:9_000]
    with hdfs.connect(cluster.url).create("/other", replication=2) as out:
        out.write(b"x")
    (other,) = NameNode.connect(cluster.url).blocks("/other").blocks
    forged = wire.Token.FromString(located.token.SerializeToString())
    forged.password = os.urandom(len(forged.password))
    for token in (other.token, forged, wire.Token(identifier=b"", password=b"", kind="", service="")):
        with pytest.raises(StaleReplica, match="block token"):
            small(dataclasses.replace(located, token=token))
    assert small(located) == content[4_000:9_000]


def test_a_frozen_datanode_costs_the_deadline_and_no_more(cluster, located, content, index):
    assert small(located) == content[4_000:9_000]  # now there is a kept connection
    for _ in range(TRIES):
        reading = Reading(located, 1.0)
        began = time.monotonic()
        if reading.strike(lambda: cluster.pause(index)):
            break
        reading.join()
        cluster.resume(index)
    try:
        reading.join(20)
        assert isinstance(reading.error, UnavailableError)
        assert "no answer within 1 s" in str(reading.error)
        assert reading.ended - began < 5
        for _ in range(2):  # over a kept connection, over a fresh one
            began = time.monotonic()
            with pytest.raises(UnavailableError, match=r"no answer within 0\.3 s"):
                small(located, 0.3)
            assert time.monotonic() - began < 3
        assert small(located, replica=1) == content[4_000:9_000]

        waiting = Reading(located, 30.0)
        time.sleep(0.3)
        began = time.monotonic()
        waiting.transfer.cancel()
        waiting.join(20)
        assert isinstance(waiting.error, Cancelled)
        assert waiting.ended - began < 1
    finally:
        cluster.resume(index)
    assert small(located) == content[4_000:9_000]


def test_a_cancelled_read_leaves_the_datanode_to_others(located, content, index):
    for _ in range(TRIES):
        reading, beside = Reading(located, 30.0), Reading(located, 30.0)
        began = [0.0]

        def cancel(began: list[float] = began, reading: Reading = reading) -> None:
            began[0] = time.monotonic()
            reading.transfer.cancel()

        reading.strike(cancel)
        reading.join(20)
        beside.join(60)
        assert beside.error is None
        assert beside.memory == content
        if reading.error is not None:
            break
    assert isinstance(reading.error, Cancelled)
    assert reading.ended - began[0] < 1


def test_a_killed_datanode_is_one_line_and_a_restarted_one_serves_again(cluster, located, content, index, monkeypatch):
    monkeypatch.setattr(datanode.idle, "seconds", 600.0)  # a DataNode takes its time to restart
    for _ in range(TRIES):
        reading = Reading(located, 30.0)
        # the small read leaves a kept connection to the DataNode that is killed
        if reading.strike(lambda: (small(located), cluster.kill(index))):
            break
        reading.join()
        cluster.restart(index)
    reading.join(20)
    assert isinstance(reading.error, UnavailableError)
    cluster.restart(index)
    assert datanode.idle.count((located.nodes[0].host, located.nodes[0].port)) == 1
    until = time.monotonic() + 30
    while True:
        try:
            assert small(located) == content[4_000:9_000]
            break
        except StaleReplica:  # its keys for block tokens come with its first heartbeat
            assert time.monotonic() < until
            time.sleep(0.2)
    cluster.kill(index)
    for _ in range(2):  # over a kept connection, over a fresh one
        with pytest.raises(UnavailableError, match="Connection refused"):
            small(located)
    assert small(located, replica=1) == content[4_000:9_000]
