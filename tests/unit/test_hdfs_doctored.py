"""Answers that no NameNode should give: right bytes or one line within the deadline, at the package's door."""

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, DataError, UnavailableError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.proto import hdfs_pb2 as wire
from support.doctored import Doctored, block, defaults, info, raw, status
from support.fakedatanode import FakeBlock, FakeDataNode
from support.fakenamenode import Call

DATA = os.urandom(3000)
SOON = 10.0  # s; half of it is what a read waits for DataNodes that come back
TOKEN = wire.Token(identifier=b"identifier", password=b"password", kind="kind", service="service")


class Cluster(Doctored):
    """One file, ``/a``. A DataNode answers rightly."""

    def __init__(self, datanode: FakeDataNode) -> None:
        super().__init__()
        self.datanode = datanode
        self.mend()

    def mend(self) -> None:
        blocks = [self.block(at, min(1000, 3000 - at)) for at in range(0, 3000, 1000)]
        located = wire.LocatedBlocks(
            length=3000, blocks=blocks, last_block=blocks[-1], under_construction=False, last_block_complete=True
        )
        listing = wire.DirectoryListing(entries=[status(3000, 1000)], remaining=0)
        self.answers = {
            "getFileInfo": wire.GetFileInfoResponse(status=status(3000, 1000)),
            "getBlockLocations": wire.GetBlockLocationsResponse(locations=located),
            "getListing": wire.GetListingResponse(listing=listing),
            "getServerDefaults": defaults(1000),
        }

    def block(self, at: int, length: int) -> wire.LocatedBlock:
        return block(info(self.datanode.node.port), number=at, at=at, length=length, token=TOKEN)

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
def cluster() -> Iterator[Cluster]:
    def answer(request: wire.ReadBlock) -> Iterator[bytes]:
        at = request.header.base.block.id
        return FakeBlock(DATA[at : at + 1000]).answer(request)

    with FakeDataNode(answer) as datanode:
        made = Cluster(datanode)
        with made.served():
            yield made


@pytest.fixture(autouse=True)
def right_again(cluster: Cluster) -> Iterator[None]:
    """No bad answer does harm to the reads after it."""
    yield
    cluster.mend()
    cluster.read()


@given(st.data())
def test_any_change_of_an_answer_is_right_bytes_or_one_line(cluster, data):
    cluster.mend()
    cluster.alter(data, sorted(cluster.answers))
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


@pytest.mark.parametrize("name", [b"a/b", b".", b"..", b"a\0b", b"/etc/passwd"])
def test_a_name_that_leads_elsewhere_is_one_line(cluster, name):
    """Red before: it was listed, as the last part of itself."""
    cluster.answers["getListing"].listing.entries[0].path = name
    with pytest.raises(DataError, match="lists / with the name"):
        cluster.backend.list("")


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
    port = cluster.datanode.node.port
    for each in cluster.located.blocks:
        each.ClearField("nodes")
        each.nodes.extend([info(1, "dead"), info(port, "unknown", "no.such.host.invalid"), info(port)])
    cluster.read()


@pytest.mark.parametrize("nodes", [[], [("dead", 1)], [("", 1), ("", 2)]], ids=["none", "dead", "nameless"])
def test_without_a_datanode_that_answers_it_is_one_line(cluster, nodes):
    each = cluster.located.blocks[1]
    each.ClearField("nodes")
    each.nodes.extend(info(port, uuid) for uuid, port in nodes)
    began = time.monotonic()
    with pytest.raises((UnavailableError, DataError), match=r"/a|block") as caught:
        cluster.read()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("method", ["getFileInfo", "getBlockLocations", "getListing"])
def test_a_method_that_is_not_there_is_one_line(cluster, method):
    del cluster.answers[method]
    with pytest.raises(BootseerError, match=r"RpcNoSuchMethod|said so") as caught:
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
