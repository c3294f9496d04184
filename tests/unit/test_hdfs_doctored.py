"""Answers that no NameNode should give: right bytes or one line within the deadline, at the package's door."""

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends.cluster import HdfsBackend
from bootseer.errors import BootseerError, DataError, UnavailableError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.proto import hdfs_pb2 as wire
from support.fakedatanode import FakeBlock, FakeDataNode
from support.fakenamenode import Call, Server

DATA = os.urandom(3000)
SOON = 10.0  # s; half of it is what a read waits for DataNodes that come back
TOKEN = wire.Token(identifier=b"identifier", password=b"password", kind="kind", service="service")


class Doctored:
    """A cluster of one file, ``/a``: ``answers``, by method, are those of its NameNode; a DataNode answers rightly."""

    def __init__(self, datanode: FakeDataNode) -> None:
        self.datanode = datanode
        self.server = Server(self.act)
        self.url = f"hdfs://127.0.0.1:{self.server.port}"
        self.backend = HdfsBackend(f"{self.url}/")
        self.mend()

    def mend(self) -> None:
        blocks = [self.block(at, min(1000, 3000 - at)) for at in range(0, 3000, 1000)]
        located = wire.LocatedBlocks(
            length=3000, blocks=blocks, last_block=blocks[-1], under_construction=False, last_block_complete=True
        )
        listing = wire.DirectoryListing(entries=[self.status()], remaining=0)
        defaults = wire.ServerDefaults(
            block_size=1000, bytes_per_checksum=512, write_packet_size=65536, replication=1, file_buffer_size=4096
        )
        self.answers: dict[str, Message | SimpleNamespace | str] = {
            "getFileInfo": wire.GetFileInfoResponse(status=self.status()),
            "getBlockLocations": wire.GetBlockLocationsResponse(locations=located),
            "getListing": wire.GetListingResponse(listing=listing),
            "getServerDefaults": wire.GetServerDefaultsResponse(defaults=defaults),
        }

    def act(self, call: Call) -> None:
        answer = self.answers.get(call.method, "org.apache.hadoop.ipc.RpcNoSuchMethodException")
        call.fail(answer, "Unknown method") if isinstance(answer, str) else call.answer(answer)

    def node(self, uuid: str = "there", host: str = "127.0.0.1", port: int = 0) -> wire.NodeInfo:
        port = port or self.datanode.node.port
        id = wire.NodeId(address=host, hostname="host", uuid=uuid, transfer_port=port, info_port=1, ipc_port=2)
        return wire.NodeInfo(id=id, location="/rack")

    def block(self, at: int, length: int, *nodes: wire.NodeInfo) -> wire.LocatedBlock:
        block = wire.Block(pool="BP-1", id=at, generation=1, length=length)
        found = wire.LocatedBlock(block=block, offset=at, nodes=nodes or [self.node()], corrupt=False, token=TOKEN)
        found.storage_types.append(1)
        found.storage_ids.append("disk")
        return found

    @staticmethod
    def status() -> wire.FileStatus:
        return wire.FileStatus(
            kind=2,
            path=b"a",
            length=3000,
            permission=wire.Permission(mode=0o644),
            owner="owner",
            group="group",
            mtime=1,
            atime=1,
            replication=1,
            block_size=1000,
            file_id=5,
        )

    @property
    def located(self) -> wire.LocatedBlocks:
        answer = self.answers["getBlockLocations"]
        assert isinstance(answer, wire.GetBlockLocationsResponse)
        return answer.locations

    def read(self) -> None:
        source = self.backend.open("a", pinned=True)
        out = bytearray(min(source.size, len(DATA)))
        source.readinto(0, [memoryview(out)])
        assert out == DATA[: len(out)]

    def use(self) -> None:
        """Whatever is not right bytes is one line, soon."""
        for operation in (lambda: self.backend.list(""), lambda: NameNode.connect(self.url).list("/a"), self.read):
            began = time.monotonic()
            said = ""
            try:
                operation()
            except BootseerError as exc:
                said = str(exc)
            assert "\n" not in said
            assert time.monotonic() - began < SOON


@pytest.fixture(scope="module")
def cluster() -> Iterator[Doctored]:
    def answer(request: wire.ReadBlock) -> Iterator[bytes]:
        at = request.header.base.block.id
        return FakeBlock(DATA[at : at + 1000]).answer(request)

    with pytest.MonkeyPatch.context() as patch, FakeDataNode(answer) as datanode:
        for name in ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_TOKEN_FILE_LOCATION"):
            patch.delenv(name, raising=False)
        made = Doctored(datanode)
        try:
            yield made
        finally:
            NameNode.connect(made.url).close()
            made.server.close()


@pytest.fixture(autouse=True)
def right_again(cluster: Doctored) -> Iterator[None]:
    """No bad answer does harm to the reads after it."""
    yield
    cluster.mend()
    cluster.read()


def raw(data: bytes) -> SimpleNamespace:
    return SimpleNamespace(SerializeToString=lambda: data)


@given(st.data())
def test_any_change_of_an_answer_is_right_bytes_or_one_line(cluster, data):
    cluster.mend()
    method = data.draw(st.sampled_from(sorted(cluster.answers)))
    answer = bytearray(cluster.answers[method].SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(answer)))
        cut, put = data.draw(st.sampled_from([(1, 1), (0, 1), (1, 0), (len(answer), 0)]))
        answer[place : place + cut] = data.draw(st.binary(min_size=put, max_size=put))
    cluster.answers[method] = raw(bytes(answer))
    began = time.monotonic()
    cluster.use()
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("word", [b"127.0.0.1", b"host", b"there", b"/rack", b"disk", b"BP-1", b"kind", b"service"])
def test_text_that_is_no_utf8_ends_no_reads(cluster, word):
    """Red before: a `TypeError` of the read scheduler."""
    answer = cluster.answers["getBlockLocations"].SerializeToString()
    cluster.answers["getBlockLocations"] = raw(answer.replace(word, b"\xff" + word[1:]))
    cluster.use()


@pytest.mark.parametrize("word", [b"owner", b"group"])
def test_owners_that_are_no_utf8_are_listed(cluster, word):
    """Red before: a `TypeError`."""
    answer = cluster.answers["getListing"].SerializeToString()
    cluster.answers["getListing"] = raw(answer.replace(word, b"\xff" + word[1:]))
    assert [entry.name for entry in cluster.backend.list("")] == ["a"]


@pytest.mark.parametrize("field", ["block", "offset", "token", "identifier", "password", "id", "pool", "length"])
def test_an_answer_without_what_it_must_have_is_one_line(cluster, field):
    """Red before: an `EncodeError` where a token had no identifier; other fields were taken for 0."""
    located = cluster.located.blocks[0]
    for message in (located, located.block, located.token, located.nodes[0]):
        if field in message.DESCRIPTOR.fields_by_name:
            message.ClearField(field)
            break
    partial = cluster.answers["getBlockLocations"]
    cluster.answers["getBlockLocations"] = raw(partial.SerializePartialToString())
    with pytest.raises(DataError, match=r"lacks what|blocks of /a hold"):
        cluster.read()


@pytest.mark.parametrize(
    "wrong",
    ["none", "first missing", "middle missing", "last missing", "twice", "reversed", "overlapping", "longer", "empty"],
)
def test_locations_that_are_not_those_of_the_file_are_one_line(cluster, wrong):
    blocks = list(cluster.located.blocks)
    made = {
        "none": [],
        "first missing": blocks[1:],
        "middle missing": [blocks[0], blocks[2]],
        "last missing": blocks[:2],
        "twice": [blocks[0], blocks[0], blocks[2]],
        "reversed": blocks[::-1],
        "overlapping": [blocks[0], cluster.block(500, 1000), blocks[2]],
        "longer": [cluster.block(0, 1 << 62), *blocks[1:]],
        "empty": [cluster.block(0, 0), *blocks[1:]],
    }[wrong]
    cluster.located.ClearField("blocks")
    cluster.located.blocks.extend(made)
    with pytest.raises(DataError, match="blocks of /a hold"):
        cluster.read()


def test_dead_datanodes_among_the_replicas_are_passed_over(cluster):
    for block in cluster.located.blocks:
        nodes = [cluster.node("dead", port=1), cluster.node("unknown", host="no.such.host.invalid"), cluster.node()]
        block.ClearField("nodes")
        block.nodes.extend(nodes)
    cluster.read()


@pytest.mark.parametrize("nodes", [[], [("dead", 1)], [("", 1), ("", 2)]], ids=["none", "dead", "nameless"])
def test_without_a_datanode_that_answers_it_is_one_line(cluster, nodes):
    block = cluster.located.blocks[1]
    block.ClearField("nodes")
    block.nodes.extend(cluster.node(uuid, port=port) for uuid, port in nodes)
    began = time.monotonic()
    with pytest.raises((UnavailableError, DataError), match=r"/a|block") as caught:
        cluster.read()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("method", ["getFileInfo", "getBlockLocations", "getListing"])
def test_a_method_that_is_not_there_is_one_line(cluster, method):
    del cluster.answers[method]
    with pytest.raises(BootseerError, match=r"RpcNoSuchMethod|Unknown method") as caught:
        cluster.backend.list("") if method == "getListing" else cluster.read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("java", ["StandbyException", "SafeModeException", "RetriableException"])
def test_a_namenode_that_is_not_ready_for_a_moment_is_waited_for(cluster, java):
    """Two refusals of each question."""
    asked: dict[str, int] = {}

    def act(call: Call) -> None:
        asked[call.method] = asked.get(call.method, 0) + 1
        call.fail(f"org.apache.hadoop.ipc.{java}") if asked[call.method] < 3 else cluster.act(call)

    cluster.server.act = act
    try:
        cluster.read()
    finally:
        cluster.server.act = cluster.act
    assert asked["getBlockLocations"] == 3
