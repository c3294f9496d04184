"""Answers that nobody should give to a writer: one line within the deadline, and nothing that is torn is published."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError
from bootseer.hdfs import blockwriter, pipeline, placement, probe
from bootseer.hdfs.framing import delimited
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.stripefs import layout
from bootseer.stripefs.files import writer
from support import doctored
from support.doctored import Doctored, defaults, info, raw, status
from support.fakenamenode import Call
from support.fakepipeline import FakeWriterNode, ack

DATA = os.urandom(3000)
SOON = 12.0
IO, IPC, HDFS = "java.io.", "org.apache.hadoop.ipc.", "org.apache.hadoop.hdfs.server.namenode."
TOKEN = wire.Token(identifier=b"", password=b"", kind="", service="")
block = partial(doctored.block, token=TOKEN)


class Cluster(Doctored):
    """The folder ``/`` is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.node = FakeWriterNode(replicas=1)
        self.mend()

    def mend(self) -> None:
        self.node.behave(replicas=1)
        self.asked.clear()
        done, there = wire.Result(result=True), block(info(self.node.port))
        self.answers = {
            "getFileInfo": wire.GetFileInfoResponse(),
            "getServerDefaults": defaults(2048),
            "create": wire.CreateResponse(status=status(0, 2048)),
            "addBlock": wire.AddBlockResponse(block=there),
            "complete": done,
            "delete": done,
            "mkdirs": done,
            "rename2": wire.Empty(),
            "abandonBlock": wire.Empty(),
            "renewLease": wire.Empty(),
            "updatePipeline": wire.Empty(),
            "updateBlockForPipeline": wire.UpdateBlockForPipelineResponse(block=block()),
            "getAdditionalDatanode": wire.AddBlockResponse(block=there),
        }

    def write(self) -> None:
        """A file of two blocks, whose end is what a rename would publish."""
        sink = self.backend.create("a")
        try:
            sink.write(DATA)
            sink.close()
        except BaseException:
            sink.abandon()
            raise

    def fails(self) -> BootseerError:
        """What a write says, soon, in one line; nobody could take the file for whole."""
        began = time.monotonic()
        with pytest.raises(BootseerError) as caught:
            self.write()
        assert time.monotonic() - began < SOON
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
        return caught.value


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    with made.served():
        yield made
    made.node.close()


@pytest.fixture(autouse=True)
def right_again(cluster: Cluster, monkeypatch) -> Iterator[None]:
    """No bad answer does harm to the writes after it."""
    for module, name, seconds in (
        (blockwriter, "PATIENCE", 1.5),
        (pipeline, "PATIENCE", 0.8),
        (pipeline, "STALL", 0.1),
        (probe, "PROBE", 0.5),
    ):
        monkeypatch.setattr(module, name, seconds)
    yield
    placement.shunned_nodes.clear()
    cluster.mend()
    cluster.write()
    assert cluster.asked.count("addBlock") == 2


def dead(cluster: Cluster) -> wire.AddBlockResponse:
    return wire.AddBlockResponse(block=block(info(1)))


NAMENODE: dict[str, tuple[str, Callable[[Cluster], object], int]] = {
    "no locations": ("addBlock", lambda c: wire.AddBlockResponse(block=block()), 69),
    "dead": ("addBlock", dead, 69),
    "unknown host": ("addBlock", lambda c: wire.AddBlockResponse(block=block(info(1, host="no.such.invalid"))), 69),
    "port 0": ("addBlock", lambda c: wire.AddBlockResponse(block=block(info(0))), 69),
    "no block": ("addBlock", lambda c: raw(b""), 65),
    "garbage": ("addBlock", lambda c: raw(b"\xff" * 40), 65),
    "not replicated yet": ("addBlock", lambda c: HDFS + "NotReplicatedYetException", 69),
    "safe mode": ("addBlock", lambda c: HDFS + "SafeModeException", 69),
    "standby": ("addBlock", lambda c: IPC + "StandbyException", 69),
    "lease expired": ("addBlock", lambda c: HDFS + "LeaseExpiredException", 73),
    "file gone": ("addBlock", lambda c: IO + "FileNotFoundException", 66),
    "quota": ("addBlock", lambda c: "org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", 74),
    "never complete": ("complete", lambda c: wire.Result(result=False), 69),
    "complete in safe mode": ("complete", lambda c: HDFS + "SafeModeException", 69),
    "complete without lease": ("complete", lambda c: HDFS + "LeaseExpiredException", 73),
    "complete, garbage": ("complete", lambda c: raw(b"\xff\xff"), 65),
    "create in safe mode": ("create", lambda c: HDFS + "SafeModeException", 69),
    "create, no status": ("create", lambda c: raw(b""), 65),
    "blocks of 0 bytes": ("create", lambda c: wire.CreateResponse(status=status(0, 0)), 65),
    "no replicas": ("create", lambda c: wire.CreateResponse(status=status(0, 2048, 0)), 65),
    "create, garbage": ("create", lambda c: raw(b"\x0a\x03abc"), 65),
}


@pytest.mark.parametrize("case", NAMENODE)
def test_an_answer_of_the_namenode_that_no_write_gets_over_is_one_line_in_time(cluster, case):
    method, answer, code = NAMENODE[case]
    cluster.answers[method] = answer(cluster)
    error = cluster.fails()
    assert (error.exit_code, "/a" in str(error)) == (code, True), error
    if method != "create":
        assert "delete" in cluster.asked or "getFileInfo" in cluster.asked  # looked whether it is still its own


@pytest.mark.parametrize(
    "java", [HDFS + "SafeModeException", HDFS + "NotReplicatedYetException", IPC + "StandbyException"]
)
@pytest.mark.parametrize("method", ["create", "addBlock", "complete"])
def test_a_namenode_that_is_not_ready_for_a_moment_is_waited_for(cluster, java, method):
    refused = [java, java]

    def act(call: Call) -> None:
        if call.method == method and refused:
            return call.fail(refused.pop())
        return cluster.act(call)

    cluster.server.act = act
    try:
        cluster.write()
    finally:
        cluster.server.act = cluster.act
    assert not refused


ACKS: dict[str, Callable[[pipeline.Packet], list[bytes]]] = {
    "garbage": lambda p: [b"\xff" * 30],
    "no message": lambda p: [b"\x03\xff\xff\xff"],
    "empty": lambda p: [b"\x00"],
    "truncated": lambda p: [ack(p.number, 0)[:-1], b""],
    "oversized": lambda p: [b"\xff\xff\xff\x7f" + bytes(1 << 16)],
    "endless": lambda p: [b"\xff\xff\xff\xff\x7f"],
    "of another packet": lambda p: [ack(p.number + 7, 0)],
    "without a number": lambda p: [b"\x02\x20\x00"],
    "of nobody": lambda p: [ack(p.number)],
    "an error": lambda p: [ack(p.number, 1)],
    "closed": lambda p: [b""],
    "silent": lambda p: [],
}


@pytest.mark.parametrize("case", ACKS)
def test_a_doctored_acknowledgement_is_one_line_in_time(cluster, case):
    """The only DataNode there is says so each time."""
    cluster.node.behave(ACKS[case], replicas=1)
    assert cluster.fails().exit_code == 69


REFUSALS = [wire.BlockOpResponse(status=99), wire.BlockOpResponse(status=1, message="no\nroom " * 200)]


@pytest.mark.parametrize("setup", [b"\x04HTTP", b"\xff" * 30, b"\x00", b"", *map(delimited, REFUSALS)])
def test_a_doctored_set_up_is_one_line_in_time(cluster, setup):
    cluster.node.behave(setup=setup)
    assert cluster.fails().exit_code == 69


@given(st.data())
def test_any_change_of_an_answer_is_a_whole_file_or_one_line(cluster, data):
    cluster.mend()
    cluster.alter(data, ["create", "addBlock", "complete", "getServerDefaults"])
    began = time.monotonic()
    said = ""
    try:
        cluster.write()
    except BootseerError as exc:
        said = str(exc)
    assert "\n" not in said
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("method", ["addBlock", "complete"])
def test_nothing_is_renamed_into_place_before_all_is_there(cluster, method):
    cluster.answers[method] = HDFS + "LeaseExpiredException"
    with pytest.raises(BootseerError) as caught, writer.StripeWriter(cluster.backend, "a") as out:
        out.write(DATA[: layout.PLAIN_BELOW])
    assert "\n" not in str(caught.value)
    assert "rename2" not in cluster.asked
