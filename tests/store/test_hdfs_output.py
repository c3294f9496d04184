"""Files written over our own pipelines, read back by everybody: hdfs-native, Hadoop's own client, DataNodes' disks."""

import os
import random
import threading
import time
from collections import Counter

import pytest

from bootseer.errors import NotFoundError, NotWritableError, UnsupportedError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs import lease
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.placement import Placement
from bootseer.objects import open_store
from bootseer.stripefs import open_fs
from support.hadoop import HadoopCluster
from support.waits import together, until

pytestmark = pytest.mark.hdfs

MIB = 1 << 20


def native(cluster: HadoopCluster, path: str) -> bytes:
    return hdfs.connect(cluster.url).read(path)


def wait_replicas(namenode: NameNode, path: str, expected: list[int]) -> None:
    """A file is complete when one DataNode of each block has told the NameNode; the others do so a moment later."""
    until(lambda: [len(block.nodes) for block in namenode.blocks(path).blocks] == expected, 20, f"replicas of {path}")


def test_files_of_all_sizes_are_what_everybody_reads(cluster, namenode, folder, tmp_path):
    sizes = [0, 1, 511, 512, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 7, 5 * MIB + 4096]
    data = {f"{size}-{replication}": os.urandom(size) for size in sizes for replication in (1, 3)}
    for name, content in data.items():
        replication = int(name[-1])
        with FileOutput(namenode, f"{folder}/{name}", replication=replication, block_size=2 * MIB) as out:
            view, rng = memoryview(content), random.Random(len(content))
            while view:
                take = rng.choice([1, 100, 70_000, MIB, 3 * MIB])
                assert out.write(view[:take]) == min(take, len(view))
                view = view[take:]
        info = namenode.info(f"{folder}/{name}")
        assert (info.size, info.replication, info.block_size) == (len(content), replication, 2 * MIB)
        assert not namenode.blocks(f"{folder}/{name}").under_construction
        wait_replicas(namenode, f"{folder}/{name}", [replication] * -(-len(content) // (2 * MIB)))
        assert native(cluster, f"{folder}/{name}") == content
    cluster.fs_shell(["-get", folder, str(tmp_path / "back")])
    for name, content in data.items():
        assert (tmp_path / "back" / name).read_bytes() == content


def disk_checksums(cluster: HadoopCluster, block: int) -> list[tuple[int, int]]:
    """(type, bytes per checksum) in the file beside each replica of ``block`` on the DataNodes' disks."""
    found = []
    for meta in cluster.root.glob(f"dn*/current/BP-*/current/finalized/**/blk_{block}_*.meta"):
        header = meta.read_bytes()[:7]
        found.append((header[2], int.from_bytes(header[3:7], "big")))
    return found


def test_bytes_per_checksum_are_as_chosen(cluster, namenode, folder):
    cases = [(512, MIB, 512), (65536, MIB, 65536), (MIB, 4 * MIB, MIB), (MIB, 786432, 262144)]
    for number, (chosen, block_size, real) in enumerate(cases):
        data, path = os.urandom(block_size + 100_001), f"{folder}/{number}"
        with FileOutput(namenode, path, block_size=block_size, bytes_per_checksum=chosen, replication=2) as out:
            out.write(data)
        wait_replicas(namenode, path, [2, 2])
        for located in namenode.blocks(path).blocks:
            assert disk_checksums(cluster, located.block.id) == [(2, real)] * 2
        assert native(cluster, path) == data
    told = cluster.fs_shell(["-checksum", *(f"{folder}/{number}" for number in range(len(cases)))])
    for line, (_, _, real) in zip(told.splitlines(), cases, strict=True):
        assert f"-of-{real}CRC32C" in line


def test_memory_that_changes_after_the_write_is_written_as_it_was(cluster, namenode, folder):
    buffer = bytearray(300_000)  # less than a packet: some is not sent yet when it changes
    expected = bytearray()
    with FileOutput(namenode, f"{folder}/f", replication=1) as out:
        for step in range(9):
            buffer[:] = bytes([step]) * len(buffer)
            expected += buffer
            out.write(memoryview(buffer))
    assert native(cluster, f"{folder}/f") == expected


def test_what_is_abandoned_is_gone_and_what_fails_says_why(cluster, namenode, folder):
    def interrupted() -> None:
        with FileOutput(namenode, f"{folder}/f") as out:
            out.write(b"x" * (3 * MIB))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert namenode.info(f"{folder}/f") is None
    with FileOutput(namenode, f"{folder}/f") as out:
        out.write(b"1")
    with pytest.raises(FileExistsError):
        FileOutput(namenode, f"{folder}/f")
    with pytest.raises(NotWritableError):
        FileOutput(namenode, f"{folder}/f/g")
    assert native(cluster, f"{folder}/f") == b"1"
    with pytest.raises(ValueError, match="closed"):
        out.write(b"3")
    out.abandon()  # does nothing to a finished file
    assert native(cluster, f"{folder}/f") == b"1"


def test_a_writer_whose_name_another_one_took_gives_up_and_leaves_the_other_file(cluster, namenode, folder):
    late = FileOutput(namenode, f"{folder}/f", block_size=MIB)
    late.write(b"late" * MIB)
    assert namenode.delete(f"{folder}/f")
    with FileOutput(namenode, f"{folder}/f") as out:
        out.write(b"mine")
    with pytest.raises((NotWritableError, NotFoundError)), late:
        late.write(b"late" * MIB)
    assert native(cluster, f"{folder}/f") == b"mine"


def test_a_writer_gives_up_while_its_name_changes_hands(cluster, namenode, folder, monkeypatch):
    """Another writer moves its own file there, after ours was seen at the path and before it is deleted."""
    with FileOutput(namenode, f"{folder}/mine") as out:
        out.write(b"mine")
    late = FileOutput(namenode, f"{folder}/f")
    real = NameNode.delete

    def renamed(self: NameNode, path: str, recursive: bool = False, *, deadline: float | None = None) -> bool:
        assert path == f"/.reserved/.inodes/{late.file_id}"
        self.rename(f"{folder}/mine", f"{folder}/f", overwrite=True)
        return real(self, path, recursive, deadline=deadline)

    with monkeypatch.context() as patched:
        patched.setattr(NameNode, "delete", renamed)
        late.abandon()
    assert native(cluster, f"{folder}/f") == b"mine"


def test_two_writers_of_one_name_at_once(cluster, namenode, folder):
    """Without overwriting exactly one gets the name; the file is wholly that one's."""
    outcomes: list[bytes] = []
    start = threading.Barrier(4)

    def writer(mark: bytes) -> None:
        start.wait(20)
        try:
            with FileOutput(namenode, f"{folder}/f", block_size=MIB) as out:
                out.write(mark * (MIB + 5))
            outcomes.append(mark)
        except FileExistsError:
            pass

    together(writer, (b"a", b"b", b"c", b"d"))
    assert len(outcomes) == 1
    assert native(cluster, f"{folder}/f") == outcomes[0] * (MIB + 5)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_files_written_together_burden_all_datanodes_alike(cluster, namenode, folder, replication):
    """Also for an ordinary user: the NameNode tells only its superuser which DataNodes there are."""
    placement = Placement()
    outs = [FileOutput(namenode, f"{folder}/{i}", placement=placement, replication=replication) for i in range(4)]
    for out in outs:
        out.write(b"x" * MIB)
    assert {len(out.nodes) for out in outs} == {replication}
    burden = Counter(node.uuid for out in outs for node in out.nodes)
    assert sorted(burden.values()) == [replication] * 4
    for out in outs:
        out.close()


def test_stripes_are_on_all_datanodes_alike_with_large_checksum_chunks(cluster, namenode, folder):
    fs = open_fs(f"{cluster.url}{folder}")
    data = os.urandom(9 * MIB + 17)
    with fs.create("f", striped=True) as out:
        out.write(data)
    with fs.open("f") as file:
        assert file.read(0, len(data)) == data
    stripes = [entry.path for entry in namenode.list(f"{folder}/.bsx")]
    assert len(stripes) == 4
    burden: Counter[str] = Counter()
    for path in stripes:
        wait_replicas(namenode, path, [3])
        (block,) = namenode.blocks(path).blocks
        burden.update(node.uuid for node in block.nodes)
        assert disk_checksums(cluster, block.block.id) == [(2, MIB)] * 3
    assert sorted(burden.values()) == [3, 3, 3, 3]


def test_of_an_object_small_ranges_are_checked(cluster, namenode, folder):
    """A DataNode sends whole what has one checksum: of a frame of an image it would send 1 MiB."""
    open_store(f"{cluster.url}{folder}").put("pack", b"x" * MIB)
    wait_replicas(namenode, f"{folder}/pack", [3])
    (block,) = namenode.blocks(f"{folder}/pack").blocks
    assert disk_checksums(cluster, block.block.id) == [(2, 4096)] * 3


def test_leases_are_renewed_only_while_files_are_open(cluster, namenode, folder, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 0.05)
    renewed: list[float] = []
    real = NameNode.renew_lease

    def counted(self: NameNode, *, deadline: float | None = None) -> None:
        real(self, deadline=deadline)
        renewed.append(time.monotonic())

    monkeypatch.setattr(NameNode, "renew_lease", counted)
    with FileOutput(namenode, f"{folder}/f") as out:
        out.write(b"x")
        until(lambda: len(renewed) >= 3, 20)
    until(lambda: not any(thread.name == "bootseer-leases" for thread in threading.enumerate()), 20)


def test_an_idle_pipeline_is_kept_open(cluster, namenode, folder, monkeypatch):
    monkeypatch.setattr("bootseer.hdfs.output.HEARTBEAT", 0.0)
    data = os.urandom(3 * MIB)
    with FileOutput(namenode, f"{folder}/f", replication=3) as out:
        out.write(data[:MIB])
        for _ in range(5):
            out.keep_alive()
        out.write(data[MIB : 2 * MIB])
        out.keep_alive()
        out.write(data[2 * MIB :])
    assert native(cluster, f"{folder}/f") == data


def test_below_an_erasure_coding_policy_nothing_is_written(cluster, namenode, folder):
    """The site chose the policy; who wants a file there writes it through hdfs-native."""
    cluster.web.make_erasure_coded(folder, "RS-6-3-1024k")
    with pytest.raises(UnsupportedError, match=r"erasure-coded \(RS-6-3-1024k\)"):
        FileOutput(namenode, f"{folder}/f")
    assert namenode.info(f"{folder}/f") is None
