"""A file being written when things go wrong around it: forks, failures that came earlier, renames, odd block sizes.

The NameNode is a double; tests/store/test_hdfs_output.py and tests/store/test_hdfs_output_faults.py ask real ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from bootseer.errors import BootseerError, ConfigError, NotWritableError, UnavailableError
from bootseer.hdfs import blockwriter, output, pipeline, placement
from bootseer.hdfs.blockwriter import BlockWriter
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.pipeline import Broken, Packet, Setup, Terms
from bootseer.hdfs.placement import Placement
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import Block, DataNode, FileStatus, Located
from support.forks import in_child

PATH = "/folder/f"


class Names:
    """A NameNode that has one file; ``ids``: what it answers for the path of an id."""

    url, client_name = "hdfs://n:1", "client"

    def __init__(self, block_size: int = 1 << 20) -> None:
        self.file = FileStatus(PATH, 0, False, 123, 7, 3, block_size, "", False, "ann", "staff", 0o644)
        self.ids: FileStatus | None = replace(self.file, path="/.reserved/.inodes/7")
        self.deleted: list[str] = []
        self.refuses = False

    def create(self, path: str, **options: object) -> FileStatus:
        return self.file

    def info(self, path: str, *, deadline: float | None = None) -> FileStatus | None:
        if path != PATH:
            if self.refuses:
                raise NotWritableError("no such names here")
            return self.ids
        return self.file

    def delete(self, path: str, *, deadline: float | None = None) -> bool:
        self.deleted.append(path)
        return True

    def complete(self, *args: object, **options: object) -> bool:
        return True

    def renew_lease(self, *, deadline: float | None = None) -> None: ...


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_file_alone(names, tmp_path):
    touched = tmp_path / "touched"
    names.delete = lambda path, **options: touched.touch()
    out = FileOutput(names, PATH)  # type: ignore[arg-type]
    with out._lock:  # as if another thread of the parent were just at it
        assert in_child(out.abandon) == 0
        assert in_child(lambda: out.__exit__(None, None, None)) == 0
        assert in_child(lambda: out.__exit__(ValueError, ValueError(), None)) == 0
        assert in_child(lambda: out.write(b"x")) == 3
        assert in_child(out.close) == 3
    assert not touched.exists()
    out.abandon()
    assert touched.exists()


def test_whoever_goes_on_after_a_failure_is_told_of_it(names, monkeypatch):
    def fail(self: FileOutput) -> None:
        raise UnavailableError("no DataNode is left", hint="start some")

    out = FileOutput(names, PATH)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(FileOutput, "_flush", fail)
        with pytest.raises(UnavailableError, match="no DataNode is left"):
            out.write(b"x" * output.PACKET)
    for step in (lambda: out.write(b"y"), out.close):
        with pytest.raises(UnavailableError, match=r"an earlier write of it failed \(no DataNode is left\)") as caught:
            step()
        assert caught.value.hint == "start some"
        assert isinstance(caught.value.__cause__, UnavailableError)
    out.abandon()


@pytest.mark.parametrize("ids", ["same", "none", "other", "refused"])
def test_an_abandoned_file_is_removed_by_its_id(names, ids):
    """By its path only where ids cannot be asked for, or name a file of another NameNode behind a router."""
    out = FileOutput(names, PATH)  # type: ignore[arg-type]
    names.refuses = ids == "refused"
    if ids in ("none", "other"):
        names.ids = None if ids == "none" else replace(names.ids, mtime_ms=124)
    out.abandon()
    assert names.deleted == ["/.reserved/.inodes/7" if ids == "same" else PATH]


def test_an_abandoned_file_that_was_replaced_stays(names):
    out = FileOutput(names, PATH)  # type: ignore[arg-type]
    names.file = replace(names.file, file_id=8)
    out.abandon()
    assert names.deleted == []


@pytest.mark.parametrize(
    ("block_size", "chosen", "expected"),
    [(1 << 20, 1 << 20, 1 << 20), (3 << 18, 1 << 20, 1 << 18), (512 * 3, 1 << 20, 512), (999, 3, 3)],
)
def test_the_checksummed_chunks_divide_the_block(block_size, chosen, expected):
    out = FileOutput(Names(block_size), PATH, bytes_per_checksum=chosen)  # type: ignore[arg-type]
    assert out.bytes_per_checksum == expected
    out.abandon()


def test_a_block_size_that_only_tiny_chunks_divide_is_refused():
    names = Names((1 << 20) + 256)
    with pytest.raises(ConfigError, match="no multiple of 512 bytes"):
        FileOutput(names, PATH)  # type: ignore[arg-type]
    assert names.deleted  # there is no file then


class Line:
    """A pipeline that breaks when it is told to send a heartbeat."""

    made: ClassVar[list["Line"]] = []

    copied: ClassVar[bool] = True

    def __init__(self, located: Located, terms: Terms, setup: Setup, *more: object) -> None:
        self.acked, self.in_flight, self.copy_to = setup.acked, 0, setup.copy_to
        self.used = self.since = self.waited = 0.0
        self.unacked: list[Packet] = []
        self.sent: list[Packet] = []
        Line.made.append(self)

    def heartbeat(self) -> None:
        raise Broken("gone", (0,))

    def send(self, packet: Packet) -> None:
        self.sent.append(packet)

    def drain(self, left: int) -> None:
        self.acked = sum(packet.length for packet in self.sent)

    def look_after(self) -> bool:
        return self.copied

    def close(self) -> None: ...


@pytest.fixture
def lines(monkeypatch) -> Iterator[list[Line]]:
    Line.made = []
    monkeypatch.setattr(blockwriter, "Pipeline", Line)
    return Line.made


def test_a_broken_idle_pipeline_is_recovered_by_the_next_write_and_not_by_the_thread_of_the_leases(lines, monkeypatch):
    recovered: list[Broken] = []

    def recover(self: BlockWriter, broken: Broken, stage: int) -> None:
        recovered.append(broken)

    monkeypatch.setattr(BlockWriter, "_recover", recover)
    token = wire.Token(identifier=b"", password=b"", kind="", service="")
    located = Located(Block("pool", 1, 2, 0), 0, (), token)
    block = BlockWriter(Names(), PATH, located, Terms("c", 1 << 20, 512))  # type: ignore[arg-type]
    block.heartbeat()
    block.heartbeat()
    assert recovered == []
    block.write([memoryview(b"x")], 1)
    assert [broken.reason for broken in recovered] == ["gone"]
    block.finish()
    assert len(recovered) == 1


def alone() -> Located:
    """A new block for which the NameNode found only one DataNode."""
    identity = wire.NodeId(address="127.0.0.1", hostname="h", uuid="u", transfer_port=1, info_port=1, ipc_port=1)
    token = wire.Token(identifier=b"", password=b"", kind="", service="")
    nodes = (DataNode.of(wire.NodeInfo(id=identity), 1, "s"),)
    return Located(Block("pool", 1, 2, 0), 0, nodes, token)


def test_a_block_that_began_on_one_datanode_is_written_to_its_end(lines):
    """Or a cluster of one DataNode would get a block for every packet."""

    class Small(Names):
        blocks = 0

        def add_block(self, *args: object, **options: object) -> Located:
            self.blocks += 1
            return alone()

    names = Small(block_size=8 << 20)
    with FileOutput(names, PATH, replication=3) as out:  # type: ignore[arg-type]
        out.write(bytes(12 << 20))
    assert names.blocks == 2


def test_a_limit_of_this_process_ends_the_write_and_shuns_no_datanode(monkeypatch):
    class Full(Names):
        def add_block(self, *args: object, **options: object) -> Located:
            return alone()

        def abandon_block(self, *args: object, **options: object) -> None:
            raise AssertionError

    def fail(*_: object) -> None:
        raise BootseerError("this process is at its limit of open files")

    monkeypatch.setattr(blockwriter, "Pipeline", fail)
    shared = Placement()
    out = FileOutput(Full(), PATH, replication=1, placement=shared)  # type: ignore[arg-type]
    with pytest.raises(BootseerError, match="at its limit"):
        out.write(b"x" * output.PACKET)
    assert placement.shunned() == []
    out.abandon()


class Pair(Names):
    """A cluster of the DataNodes ``a`` and ``b``; ``begun``: blocks that were begun, ``left``: pipelines after that."""

    begun = left = 0
    spare: DataNode | None = None
    nodes: ClassVar = tuple(DataNode(name, "127.0.0.1", port) for port, name in enumerate("ab", 1))

    def _located(self, count: int) -> Located:
        token = wire.Token(identifier=b"", password=b"", kind="", service="")
        return Located(Block("pool", self.begun, 2, 0), 0, self.nodes[:count], token)

    def add_block(
        self, path: str, file_id: int, previous: object, exclude: object, *_: object, **__: object
    ) -> Located:
        self.begun += not exclude
        return self._located(1 if exclude else 2)

    def abandon_block(self, *args: object, **options: object) -> None: ...

    def additional_datanode(
        self, block: object, path: str, nodes: Sequence[DataNode], *_: object, **__: object
    ) -> Located:
        return replace(self._located(0), nodes=(*nodes, self.spare) if self.spare else tuple(nodes))

    def update_block_for_pipeline(self, *args: object, **options: object) -> Located:
        self.left += 1
        return self._located(0)

    def update_pipeline(self, *args: object, **options: object) -> None: ...


@pytest.fixture
def unshunned() -> Iterator[None]:
    yield
    placement.shunned_nodes.clear()
    placement.all_nodes.clear()


SPARE = DataNode("c", "127.0.0.1", 3)


@pytest.mark.parametrize("spare", [None, SPARE])
@pytest.mark.parametrize("slow", ["b", "ab"])
def test_a_block_never_has_fewer_replicas_because_a_datanode_is_only_slow(lines, unshunned, slow, spare):
    """Its block ends, and who has it all copies it to another one; where there is none, those that are slow end it. Red
    before: the write stood still while it was copied."""
    names, together = Pair(block_size=32 << 20), Placement()
    names.spare = spare
    with FileOutput(names, PATH, replication=2, placement=together) as out:  # type: ignore[arg-type]
        out.write(bytes(1 << 20))
        out._block._drain(0)  # type: ignore[union-attr]
        together._slow.update(slow)
        out.write(bytes(1 << 20))
        assert [node.uuid for node in placement.shunned()] == list(slow)
        assert placement.shunned(slow=False) == []
        if copied := spare is not None and slow == "b":
            assert out.nodes == ()
        out.write(bytes(1 << 20))
    assert [line.copy_to for line in lines if line.copy_to] == [spare] * copied
    assert (names.begun, names.left) == (2, copied)


def test_a_slow_datanode_that_has_all_of_a_block_is_not_left_while_it_ends(lines, unshunned, monkeypatch):
    """Red before: nobody copies what a block had when it ends, so the block ended with one replica."""
    names, together = Pair(block_size=32 << 20), Placement()
    names.spare = SPARE

    class Watched(Line):
        def __init__(
            self, located: Located, terms: Terms, setup: Setup, watch: Callable[[], None], *more: object
        ) -> None:
            super().__init__(located, terms, setup)
            self.watch = watch

        def send(self, packet: Packet) -> None:
            super().send(packet)
            if packet.last:
                together._slow.add("b")
                self.watch()

    monkeypatch.setattr(blockwriter, "Pipeline", Watched)
    with FileOutput(names, PATH, replication=2, placement=together) as out:  # type: ignore[arg-type]
        out.write(bytes(1 << 20))
    assert (names.begun, names.left) == (1, 0)


@pytest.mark.parametrize("failed", [False, True])
def test_a_pause_or_a_recovery_is_no_measure_of_datanodes(lines, unshunned, monkeypatch, failed):
    """Red before: what they took was divided by the time since the last measurement, so one that was busy was left."""
    names, together, now = Pair(), Placement(), [0.0]
    monkeypatch.setattr(blockwriter.time, "monotonic", lambda: now[0])
    token = wire.Token(identifier=b"", password=b"", kind="", service="")
    located = Located(Block("pool", 1, 2, 0), 0, (*Pair.nodes, SPARE), token)
    together.begin(1, names.url, Pair.nodes[:1], lambda: lambda: True)
    together.begin(2, names.url, located.nodes)
    block = BlockWriter(
        names,  # type: ignore[arg-type]
        PATH,
        located,
        Terms("c", 32 << 20, 512),
        lambda nodes, waited: together.slow(2, nodes, waited),
        together.took,
    )

    def runs(count: int, waited: float, rate: float) -> None:
        for _ in range(count):
            now[0] += placement.ENOUGH
            lines[-1].waited += waited * placement.ENOUGH
            lines[-1].in_flight = 1
            together.took(block.nodes, int(rate * placement.ENOUGH))
            block._watch()

    runs(3, 0.1, 30e6)
    runs(1, 0.8, 5e6)
    now[0] += 9
    lines[-1].in_flight = 0
    if failed:
        block._recover(Broken("gone", (2,)), pipeline.RECOVER)
    block._watch()
    runs(3, 0.8, 12e6)  # busy, not slow
    assert not together._slow
    runs(2, 0.8, 5e6)
    assert together._slow == {node.uuid for node in block.nodes[1:]}


def test_the_datanodes_of_a_file_that_is_written_are_idle(lines, unshunned):
    names, together = Pair(block_size=32 << 20), Placement()
    with FileOutput(names, PATH, replication=2, placement=together) as out:  # type: ignore[arg-type]
        out.write(bytes(1 << 20))
        key = id(out)
    del out
    assert (ask := together._idle[key]()) is not None
    assert ask()


@pytest.mark.parametrize("ended", [False, True])
def test_a_placement_knows_of_a_copy_until_it_has_ended(lines, unshunned, monkeypatch, ended):
    """Red before: what shares a link with a copy was taken for slow."""
    monkeypatch.setattr(Line, "copied", ended)
    names, together = Pair(block_size=32 << 20), Placement()
    names.spare = SPARE
    with FileOutput(names, PATH, replication=2, placement=together) as out:  # type: ignore[arg-type]
        out.write(bytes(1 << 20))
        out._block._drain(0)  # type: ignore[union-attr]
        lines[-1].heartbeat = lambda: (_ for _ in ()).throw(Broken("gone", (1,)))  # type: ignore[method-assign]
        out._block.heartbeat()  # type: ignore[union-attr]
        out.write(bytes(1 << 20))
        assert together._copies == {id(out): SPARE}
        out.write(bytes(1 << 20))
        assert bool(together._copies) is not ended
    assert not together._copies


@pytest.mark.parametrize("fails", [None, Broken("no room", (0,)), BootseerError("too many open files")])
def test_what_one_datanode_has_alone_after_a_failure_is_copied_to_another_one(lines, unshunned, monkeypatch, fails):
    """Red before: until the file was written and HDFS had copied it, one more failure lost it; and without a descriptor
    for the copy the write failed, all of which was there."""

    def line(located: Located, terms: Terms, setup: Setup, *more: object) -> Line:
        if setup.copy_to and fails:
            raise fails
        return Line(located, terms, setup)

    monkeypatch.setattr(blockwriter, "Pipeline", line)
    names = Pair(block_size=32 << 20)
    names.spare = SPARE
    with FileOutput(names, PATH, replication=2) as out:  # type: ignore[arg-type]
        out.write(bytes(1 << 20))
        out._block._drain(0)  # type: ignore[union-attr]
        lines[-1].heartbeat = lambda: (_ for _ in ()).throw(Broken("gone", (1,)))  # type: ignore[method-assign]
        out._block.heartbeat()  # type: ignore[union-attr]
        out.write(bytes(1 << 20))
        assert out.nodes == ()
        assert [node.uuid for node in placement.shunned()] == ["b"]
        assert [line.copy_to for line in lines if line.copy_to] == [SPARE] * (not fails)
    assert names.begun == 1


def test_a_long_file_keeps_one_connection_of_copies_however_many_blocks_are_copied(lines, unshunned, monkeypatch):
    """Red before: one for each block until the file was closed, to the limit of open files."""
    names, closed = Pair(block_size=2 << 20), list[Line]()
    names.spare = SPARE
    monkeypatch.setattr(Line, "close", lambda line: closed.append(line))
    monkeypatch.setattr(Line, "copied", False)
    with FileOutput(names, PATH, replication=2) as out:  # type: ignore[arg-type]
        for _ in range(5):
            placement.shunned_nodes.clear()
            out.write(bytes(1 << 20))
            out._block._drain(0)  # type: ignore[union-attr]
            lines[-1].heartbeat = lambda: (_ for _ in ()).throw(Broken("gone", (1,)))  # type: ignore[method-assign]
            out._block.heartbeat()  # type: ignore[union-attr]
            out.write(bytes(1 << 20))
        copies = [line for line in lines if line.copy_to]
        assert (len(copies), len([line for line in copies if line not in closed])) == (5, 1)


@pytest.mark.parametrize("heeds", [True, False])
def test_a_block_for_which_too_few_datanodes_are_left_is_asked_for_once(lines, unshunned, heeds):
    """Three DataNodes, all known, one shunned: a block of three replicas goes to the other two at once. A NameNode that
    heeds no wish is not asked twice."""

    class Three(Names):
        nodes = tuple(DataNode(name, "127.0.0.1", port) for port, name in enumerate("abc", 1))
        given_up = 0

        def add_block(
            self, path: str, file_id: int, previous: object, exclude: Sequence[DataNode], *_: object, **__: object
        ) -> Located:
            token = wire.Token(identifier=b"", password=b"", kind="", service="")
            nodes = tuple(node for node in self.nodes if node not in exclude) if heeds else self.nodes[:2]
            return Located(Block("pool", 1, 2, 0), 0, nodes, token)

        def abandon_block(self, *args: object, **options: object) -> None:
            self.given_up += 1

    names, together = Three(block_size=32 << 20), Placement()
    placement.too_few(names.url, names.nodes, ())
    if heeds:
        placement.shun(names.nodes[:1])
    together.begin(1, names.url, names.nodes)
    with FileOutput(names, PATH, replication=3, placement=together) as out:  # type: ignore[arg-type]
        out.write(bytes(1 << 20))
        assert not heeds or out.nodes == names.nodes[1:]
    assert names.given_up == (not heeds)
