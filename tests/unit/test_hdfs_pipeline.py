"""A write pipeline against DataNodes that say what real ones rarely do: late, torn, wrong, foreign."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from crc32c import crc32c

from bootseer.errors import BootseerError
from bootseer.hdfs import checksum, dial, pipeline, probe
from bootseer.hdfs.framing import delimited
from bootseer.hdfs.pipeline import Broken, Packet, Pipeline, Setup, Terms
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import Block, DataNode, Located
from support.fakepipeline import FakeWriterNode, ack
from support.waits import until

STEP = 1024
TERMS = Terms("client", 1 << 20, STEP)


def node(uuid: str, port: int, storage: str = "") -> DataNode:
    message = wire.NodeInfo(
        id=wire.NodeId(address="127.0.0.1", hostname="h", uuid=uuid, transfer_port=port, info_port=1, ipc_port=1)
    )
    return DataNode.of(message, 1, storage)


def located(*ports: int) -> Located:
    nodes = tuple(node(f"n{i}", port, f"s{i}") for i, port in enumerate(ports))
    token = wire.Token(identifier=b"", password=b"", kind="", service="")
    return Located(Block("pool", 1, 2, 0), 0, nodes, token)


@pytest.fixture
def made() -> Iterator[Callable[..., FakeWriterNode]]:
    nodes: list[FakeWriterNode] = []

    def make(*args: object, **options: object) -> FakeWriterNode:
        nodes.append(FakeWriterNode(*args, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for one in nodes:
        if one.alive:
            one.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "STALL", 0.1)
    monkeypatch.setattr(pipeline, "PATIENCE", 0.3)


def connected(first: FakeWriterNode, *others: FakeWriterNode) -> Pipeline:
    ports = [first.port, *(other.port for other in others)]
    return Pipeline(located(*ports, *(first.port,) * (3 - len(ports))), TERMS, Setup())


def test_a_message_without_end_is_refused(made):
    """Red before: whatever came was kept."""
    with pytest.raises(Broken, match="announces a message of 34359738"):
        connected(made(setup=b"\xff\xff\xff\xff\x7f"))


def packet(number: int, offset: int, data: bytes, *, last: bool = False) -> Packet:
    parts = [memoryview(data[:10]), memoryview(data[10:])]
    return Packet(number, offset, len(data), checksum.of(parts, STEP), tuple(parts), last)


def send_all(pipe: Pipeline) -> None:
    pipe.send(packet(0, 0, b"a" * 2 * STEP))
    pipe.heartbeat()
    pipe.send(packet(1, 2 * STEP, b"b" * 100))
    pipe.drain(0)
    pipe.send(packet(2, 2 * STEP + 100, b"", last=True))
    pipe.drain(0)


def broken(pipe: Pipeline) -> Broken:
    with pytest.raises(Broken) as caught:
        send_all(pipe)
    pipe.close()
    return caught.value


def test_a_block_arrives_whole_and_the_request_says_what_it_must(made):
    first = made()
    pipe = connected(first)
    send_all(pipe)
    assert (pipe.acked, pipe.in_flight, len(pipe.unacked)) == (2 * STEP + 100, 0, 0)
    pipe.close()
    assert [(p.number, p.offset, bytes(p.parts[0]), p.last) for p in first.packets] == [
        (0, 0, b"a" * 2 * STEP, False),
        (-1, 0, b"", False),
        (1, 2 * STEP, b"b" * 100, False),
        (2, 2 * STEP + 100, b"", True),
    ]
    asked = first.request
    assert [target.id.uuid for target in asked.targets] == ["n1", "n2"]
    assert (asked.stage, asked.pipeline_size, asked.header.base.block.length) == (6, 3, 1 << 20)
    assert (asked.checksum.type, asked.checksum.bytes_per_checksum) == (2, STEP)
    assert (asked.storage_id, list(asked.target_storage_ids)) == ("s0", ["s1", "s2"])
    assert crc32c(b"123456789") == 0xE3069283  # the checksum of the protocol


def test_acknowledgements_in_single_bytes_and_several_at_once(made):
    held: list[bytes] = []

    def late(p: Packet) -> list[bytes]:
        held.append(ack(p.number, 0, 0, 0))
        if p.number == 0:
            return []
        whole, held[:] = b"".join(held), []
        return [whole[i : i + 1] for i in range(len(whole))]

    pipe = connected(made(late))
    send_all(pipe)
    pipe.close()


@pytest.mark.parametrize(
    ("answer", "bad", "reason"),
    [
        (lambda p: [ack(p.number, 0, 0, 1)], (2,), "answered: error"),
        (lambda p: [ack(p.number, 0, 2)], (1,), "checksum error"),
        (lambda p: [ack(-2, 8)], (0,), "restarting"),
        (lambda p: [ack(p.number + 1, 0, 0, 0)], (0,), "acknowledged packet 1, not 0"),
        (lambda p: [ack(p.number, 0, 0)], (0,), "acknowledged packet"),
        (lambda p: [b"\xff" * 9], (0,), "no acknowledgement"),
        (lambda p: [b"\x03\xff\xff\xff"], (0,), "no acknowledgement"),
        (lambda p: [b""], (0,), "connection to .* ended"),
        (lambda p: [], (2,), "no acknowledgement within"),
    ],
)
def test_what_is_wrong_and_whose_fault_it_is(made, answer, bad, reason):
    problem = broken(connected(made(answer)))
    assert problem.bad == bad
    with pytest.raises(Broken, match=reason):
        raise problem


def test_the_one_that_does_not_answer_is_at_fault(made, monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 60.0)
    monkeypatch.setattr(probe, "PROBE", 0.3)
    problem = broken(connected(made(lambda p: []), made(), made(mute=True)))
    assert (problem.bad, problem.reason.endswith("does not answer")) == ((2,), True)
    problem = broken(connected(made(lambda p: [b""]), made(mute=True), made()))  # the first one closes because of it
    assert problem.bad == (1,)


def test_what_another_pipeline_found_meanwhile_is_not_asked_again(made, monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 60.0)
    monkeypatch.setattr(probe, "PROBE", 0.3)
    waits = connected(made(lambda p: []), made(mute=True))
    assert probe.silent(waits.nodes, "pool") == (1,)
    monkeypatch.setattr(probe, "PROBE", 60.0)
    began = time.monotonic()
    assert broken(waits).bad == (1,)
    assert time.monotonic() - began < 20


def test_a_pipeline_that_is_only_late_is_asked_about_less_and_less(made, monkeypatch):
    """Else a slow cluster would answer probes all the time. But not so seldom that a later freeze would not be seen."""
    monkeypatch.setattr(pipeline, "STALL", 0.02)
    monkeypatch.setattr(pipeline, "LONGEST_STALL", 0.16)
    monkeypatch.setattr(pipeline, "PATIENCE", 60.0)
    asked: list[float] = []

    def answered(*_: object) -> tuple[int, ...]:
        asked.append(time.monotonic())
        return (1,) if len(asked) == 9 else ()

    monkeypatch.setattr(probe, "silent", answered)
    began = time.monotonic()
    assert broken(connected(made(lambda p: []))).bad == (1,)
    assert asked[-1] - began >= 0.9  # 20, 40, 80, then 160 ms apart; every 20 ms they would be 180 ms
    assert time.monotonic() - began < 9  # doubled each time they would be 10 s


def test_who_knows_better_than_to_wait_ends_the_wait(made):
    def watch() -> None:
        raise Broken("held up", (1,), slow=True)

    pipe = Pipeline(located(*(made(lambda p: []).port,) * 3), TERMS, Setup(), watch)
    problem = broken(pipe)
    assert (problem.bad, problem.slow) == ((1,), True)


def test_acknowledgements_are_taken_without_waiting(made):
    pipe = connected(made())
    pipe.collect()
    pipe.send(packet(0, 0, b"a" * STEP))
    until = time.monotonic() + 20
    while pipe.in_flight and time.monotonic() < until:
        pipe.collect()
    assert (pipe.in_flight, pipe.acked) == (0, STEP)
    pipe.close()


def test_a_datanode_copies_what_it_has_to_another_one(made):
    first = made()
    copy = Pipeline(located(first.port), TERMS, Setup(acked=5, copy_to=node("to", 9, "s")))
    until(lambda: first.copy.targets)
    copy.look_after()
    copy.close()
    asked = first.copy
    # of a copy by a client the other one would not tell the NameNode
    assert (asked.header.base.block.length, asked.header.client) == (5, "")
    assert [(one.id.uuid, one.id.transfer_port) for one in asked.targets] == [("to", 9)]
    assert (list(asked.target_storage_types), list(asked.target_storage_ids)) == ([1], ["s"])


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (delimited(wire.BlockOpResponse(status=1, message="no room")), "no room"),
        (b"", "ended"),
        (b"\x04HTTP", "does not speak"),
    ],
)
def test_a_copy_that_fails_is_one_line_and_nobody_waits_for_it(made, setup, reason):
    copy = Pipeline(located(made(setup=setup).port), TERMS, Setup(acked=5, copy_to=node("to", 9)))

    def look() -> bool:
        copy.look_after()
        return False

    with pytest.raises(Broken, match=reason):
        until(look)
    copy.close()


def test_a_pipeline_that_is_refused(made):
    second = made()
    link = wire.BlockOpResponse(status=1, first_bad_link=f"127.0.0.1:{second.port}", message="no room")
    with pytest.raises(Broken, match=f"{second.port} refused to take part: no room") as caught:
        connected(made(setup=delimited(link)), second)
    assert caught.value.bad == (1,)
    with pytest.raises(Broken, match="ended: closed") as caught:
        connected(made(setup=b""))
    assert caught.value.bad == (0,)
    with pytest.raises(Broken, match="does not speak"):
        connected(made(setup=b"\x04HTTP"))
    gone = made()
    gone.close()
    with pytest.raises(Broken, match="cannot connect"):
        connected(gone)


@pytest.mark.parametrize(
    ("number", "limit"), [(errno.EMFILE, "open files"), (errno.ENOBUFS, "memory"), (errno.EADDRNOTAVAIL, "port_range")]
)
def test_what_this_process_lacks_is_no_fault_of_a_datanode(made, monkeypatch, number, limit):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(dial.socket, "socket", fail)
    with pytest.raises(BootseerError, match=f"cannot connect to .*: this .*{limit}"):
        Pipeline(located(1), TERMS, Setup())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_keep_a_pipeline_open(made):
    pipe = connected(made())
    if not (child := os.fork()):
        os._exit(0 if pipe._sock.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    send_all(pipe)
    pipe.close()


def test_silence_of_some(made, monkeypatch):
    monkeypatch.setattr(probe, "PROBE", 0.5)
    alive, mute, gone = made(), made(mute=True), made()
    gone.close()
    nodes = [node("a", alive.port), node("b", mute.port), node("c", gone.port), node("d", alive.port)]
    assert probe.silent(nodes, "pool") == (1, 2)
    assert probe.silent([], "pool") == ()


def test_a_pause_of_all_datanodes_is_waited_for_at_first(made, monkeypatch):
    """Or what pauses all (this machine's network, too) would leave no DataNode for the new block but others."""
    monkeypatch.setattr(pipeline, "PATIENCE", 60.0)
    monkeypatch.setattr(probe, "PROBE", 0.2)
    first, others = made(mute=True), (made(mute=True), made(mute=True))
    first._setup = b"\x02"  # the rest of the answer comes when they are there again

    def thaw() -> None:
        for each in (first, *others):
            each._mute = False
        first._open[0].sendall(delimited(wire.BlockOpResponse(status=0))[1:])

    timer = threading.Timer(0.5, thaw)
    timer.start()
    try:
        connected(first, *others).close()
    finally:
        timer.join()


def test_an_acknowledgement_that_comes_while_the_datanodes_are_asked_counts_more_than_their_silence(made, monkeypatch):
    """On slow links an answer may take longer than a DataNode has for it."""
    monkeypatch.setattr(pipeline, "PATIENCE", 60.0)
    monkeypatch.setattr(probe, "PROBE", 0.4)

    def late(p: Packet) -> list[bytes]:
        time.sleep(0.25 if p.number == 0 else 0)
        return [ack(p.number, 0, 0, 0)]

    pipe = connected(made(late), made(), made(mute=True))
    send_all(pipe)
    pipe.close()
