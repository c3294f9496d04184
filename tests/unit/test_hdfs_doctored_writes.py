"""Answers that nobody should give to a writer: one line within the deadline, and nothing that is torn is published."""

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends.cluster import HdfsBackend
from bootseer.errors import BootseerError
from bootseer.hdfs import blockwriter, pipeline, placement, probe
from bootseer.hdfs.framing import delimited
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.stripefs import layout
from bootseer.stripefs.files import writer
from support.fakenamenode import Call, Server
from support.fakepipeline import FakeWriterNode, ack

DATA = os.urandom(3000)
SOON = 12.0
IO, IPC, HDFS = "java.io.", "org.apache.hadoop.ipc.", "org.apache.hadoop.hdfs.server.namenode."
TOKEN = wire.Token(identifier=b"", password=b"", kind="", service="")
Answers = dict[str, Message | SimpleNamespace | str]


def raw(data: bytes) -> SimpleNamespace:
    return SimpleNamespace(SerializeToString=lambda: data)


class Doctored:
    """A cluster in which the folder ``/`` is empty; ``answers``, by method: those of its NameNode. ``nodes``: its
    DataNodes. ``asked``: methods in order."""

    def __init__(self) -> None:
        self.server = Server(self.act)
        self.url = f"hdfs://127.0.0.1:{self.server.port}"
        self.backend = HdfsBackend(f"{self.url}/")
        self.node = FakeWriterNode(replicas=1)
        self.mend()

    def mend(self) -> None:
        self.node.behave(replicas=1)
        self.asked: list[str] = []
        defaults = wire.ServerDefaults(
            block_size=2048, bytes_per_checksum=512, write_packet_size=65536, replication=1, file_buffer_size=4096
        )
        done = wire.Result(result=True)
        self.answers: Answers = {
            "getFileInfo": wire.GetFileInfoResponse(),
            "getServerDefaults": wire.GetServerDefaultsResponse(defaults=defaults),
            "create": wire.CreateResponse(status=self.status()),
            "addBlock": wire.AddBlockResponse(block=self.block(self.info(self.node.port))),
            "complete": done,
            "delete": done,
            "mkdirs": done,
            "rename2": wire.Empty(),
            "abandonBlock": wire.Empty(),
            "renewLease": wire.Empty(),
            "updatePipeline": wire.Empty(),
            "updateBlockForPipeline": wire.UpdateBlockForPipelineResponse(block=self.block()),
            "getAdditionalDatanode": wire.AddBlockResponse(block=self.block(self.info(self.node.port))),
        }

    def act(self, call: Call) -> None:
        self.asked.append(call.method)
        answer = self.answers.get(call.method, IPC + "RpcNoSuchMethodException")
        call.fail(answer, "said so") if isinstance(answer, str) else call.answer(answer)  # type: ignore[arg-type]

    @staticmethod
    def info(port: int, uuid: str = "there", host: str = "127.0.0.1") -> wire.NodeInfo:
        id = wire.NodeId(address=host, hostname="host", uuid=uuid, transfer_port=port, info_port=1, ipc_port=2)
        return wire.NodeInfo(id=id, location="/rack")

    @staticmethod
    def block(*nodes: wire.NodeInfo, length: int = 0) -> wire.LocatedBlock:
        block = wire.Block(pool="BP-1", id=1, generation=1, length=length)
        found = wire.LocatedBlock(block=block, offset=0, nodes=nodes, corrupt=False, token=TOKEN)
        found.storage_types.extend([1] * len(nodes))
        found.storage_ids.extend(["disk"] * len(nodes))
        return found

    @staticmethod
    def status(block_size: int = 2048, replication: int = 1) -> wire.FileStatus:
        return wire.FileStatus(
            kind=2,
            path=b"a",
            length=0,
            permission=wire.Permission(mode=0o644),
            owner="owner",
            group="group",
            mtime=1,
            atime=1,
            replication=replication,
            block_size=block_size,
            file_id=5,
        )

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
def cluster() -> Iterator[Doctored]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_TOKEN_FILE_LOCATION"):
            patch.delenv(name, raising=False)
        made = Doctored()
        try:
            yield made
        finally:
            NameNode.connect(made.url).close()
            made.server.close()
            made.node.close()


@pytest.fixture(autouse=True)
def right_again(cluster: Doctored, monkeypatch) -> Iterator[None]:
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


def dead(cluster: Doctored) -> wire.AddBlockResponse:
    return wire.AddBlockResponse(block=cluster.block(cluster.info(1)))


NAMENODE: dict[str, tuple[str, Callable[[Doctored], object], int]] = {
    "no locations": ("addBlock", lambda c: wire.AddBlockResponse(block=c.block()), 69),
    "dead": ("addBlock", dead, 69),
    "unknown host": ("addBlock", lambda c: wire.AddBlockResponse(block=c.block(c.info(1, host="no.such.invalid"))), 69),
    "port 0": ("addBlock", lambda c: wire.AddBlockResponse(block=c.block(c.info(0))), 69),
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
    "blocks of 0 bytes": ("create", lambda c: wire.CreateResponse(status=c.status(block_size=0)), 65),
    "no replicas": ("create", lambda c: wire.CreateResponse(status=c.status(replication=0)), 65),
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
    method = data.draw(st.sampled_from(["create", "addBlock", "complete", "getServerDefaults"]))
    answer = bytearray(cluster.answers[method].SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(answer)))
        cut, put = data.draw(st.sampled_from([(1, 1), (0, 1), (1, 0), (len(answer), 0)]))
        answer[place : place + cut] = data.draw(st.binary(min_size=put, max_size=put))
    cluster.answers[method] = raw(bytes(answer))
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
