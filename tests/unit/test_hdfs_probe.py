"""Which DataNodes answer: silence is told from refusal and from trouble of our own."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer.errors import UnavailableError
from bootseer.hdfs import datanode, dial, placement, probe
from bootseer.hdfs.records import DataNode
from bootseer.hdfs.replica_errors import OwnLimit
from support.fakedatanode import FakeBlock, FakeDataNode, refused
from support.waits import until

NOBODY = "x" * 64 + ".example"


def node(name: str, address: tuple[str, int]) -> DataNode:
    return DataNode(name, *address)


@pytest.fixture
def frozen() -> Iterator[DataNode]:
    """Its kernel accepts connections, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield node("frozen", listener.getsockname())


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(probe, "PROBE", 0.5)


def test_who_answers_and_who_does_not(frozen):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = node("dead", closed.getsockname())
    named = node("named", ("localhost", 0))
    with FakeDataNode(lambda request: [refused(3, "no such block"), None]) as fake:
        named = node("named", ("localhost", fake.node.port))
        nodes = [fake.node, frozen, dead, node("unknown", (NOBODY, 1)), named]
        began = time.monotonic()
        assert probe.silent(nodes, "pool") == (1, 2, 3)
        assert time.monotonic() - began < 10
        assert [request.header.base.block.pool for request in fake.requests] == ["pool", "pool"]


def test_whose_answer_is_the_end_of_the_connection_is_there():
    """A DataNode that wants a login takes four bytes of the question and closes: the kernel resets what has unread
    bytes."""

    def refuse() -> None:
        taken, _ = listener.accept()
        with taken:
            taken.recv(4, socket.MSG_WAITALL)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(refuse)
        assert probe.silent([node("secured", listener.getsockname())], "pool") == ()
        done.result(10)


def late(seconds: float) -> FakeDataNode:
    def answer(request: object) -> list[object]:
        time.sleep(seconds)
        return [refused(3, "no such block"), None]

    return FakeDataNode(answer)


def test_who_is_silent_beside_one_that_answers_is_found_soon(frozen, monkeypatch):
    monkeypatch.setattr(probe, "PROBE", 20.0)
    with late(0) as fake:
        began = time.monotonic()
        assert probe.silent([fake.node, frozen], "pool") == (1,)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("position", [0, 1])
def test_who_is_reached_late_may_answer_late(monkeypatch, position):
    """Behind a full link the kernel's answer is as late as its own: a slow DataNode is no frozen one."""
    monkeypatch.setattr(probe, "PROBE", 20.0)
    with late(0) as quick, late(0.8) as slow:
        nodes = [quick.node, slow.node][:: -1 if position == 0 else 1]

        def dialled(host: str, port: int, until: float) -> socket.socket:
            time.sleep(0.2 if port == slow.node.port else 0)
            return dial.dial(host, port, until)

        monkeypatch.setattr(probe, "dial", dialled)
        assert probe.silent(nodes, "pool") == ()


def test_a_datanode_is_used_again_as_soon_as_its_pause_is_over():
    with late(0) as quick, late(1.2) as pausing:
        assert probe.silent([quick.node, pausing.node], "pool") == (1,)
        placement.shun([pausing.node])
        assert placement.shunned() == [pausing.node]
        until(lambda: not placement.shunned())
    placement.shun([pausing.node])  # for another reason
    assert placement.shunned() == [pausing.node]
    placement.shunned_nodes.clear()


@pytest.mark.parametrize(
    ("number", "limit"),
    [
        (errno.EMFILE, r"this process has too many open files \(its limit is \d+\)"),
        (errno.ENFILE, r"fs\.file-max"),
        (errno.ENOBUFS, r"tcp_mem"),
        (errno.EADDRNOTAVAIL, r"ip_local_port_range"),
    ],
)
def test_trouble_of_our_own_says_nothing_of_a_datanode(monkeypatch, frozen, caplog, number, limit):
    block, parts = FakeBlock(bytes(10)), [memoryview(bytearray(10))]

    def none(*args: object) -> socket.socket:
        raise OSError(number, "words")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", none)
        with pytest.raises(OwnLimit, match=rf"cannot read block 7 at 0 from DataNode 127.0.0.1:\d+: .*{limit}"):
            datanode.read(frozen, block.located, 0, parts, deadline=1.0, verify=True)
        assert probe.silent([frozen], "pool") == ()
    assert "cannot ask DataNode 127.0.0.1" in caplog.text
    assert probe.silent([frozen], "pool") == (0,)


@pytest.mark.parametrize("host", [NOBODY, "a..b", "no.such.host.invalid"])
def test_what_is_no_host_name_is_one_line(host):
    block, parts = FakeBlock(bytes(10)), [memoryview(bytearray(10))]
    with pytest.raises(UnavailableError, match=f"from DataNode {host}:1: .") as caught:
        datanode.read(DataNode("a", host, 1), block.located, 0, parts, deadline=10.0, verify=True)
    assert "\n" not in str(caught.value)
    assert not dial.own_limit(socket.gaierror(socket.EAI_NONAME, "unknown"))
