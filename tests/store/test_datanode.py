"""Blocks from real DataNodes: every checksum size and type, any range, many threads, damaged and missing replicas."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs import datanode
from bootseer.hdfs.connection import Connection
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.records import FileBlocks, Located
from bootseer.hdfs.replica_errors import CorruptReplica, StaleReplica, UncheckedReplica
from support import hadoop
from support.waits import together

pytestmark = pytest.mark.hdfs

SIZES = (1, 511, 512, 513, 65_536, 1_000_000, (2 << 20) + 1, (5 << 20) - 7)
BLOCK = 2 << 20
# bytes per checksum, type: the default; another type and no power of two; as large as a packet; larger; none
KINDS = ((512, "CRC32C"), (1000, "CRC32"), (65_536, "CRC32C"), (1 << 20, "CRC32C"), (512, "NULL"))


def fetch(located: Located, offset: int, sizes: Sequence[int], verify: bool = True, replica: int = 0) -> bytes:
    whole = memoryview(bytearray(sum(sizes)))
    parts, at = [], 0
    for size in sizes:
        parts.append(whole[at : at + size])
        at += size
    datanode.read(located.nodes[replica], located, offset, parts, deadline=20, verify=verify)
    return bytes(whole)


def blocks(path: str) -> FileBlocks:
    return NameNode.connect(hadoop.shared().url).blocks(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, int], tuple[str, bytes]]:
    """(bytes per checksum, type, size) -> (path in HDFS, content); CRC32 and none written by Hadoop's own client."""
    cluster, folder = hadoop.shared(), tmp_path_factory.mktemp("files")
    contents = {size: random.Random(size).randbytes(size) for size in SIZES}
    for size, content in contents.items():
        (folder / str(size)).write_bytes(content)

    def put(step: int, kind: str) -> str:
        target, block = f"/{uuid.uuid4().hex}", BLOCK // step * step
        NameNode.connect(cluster.url).mkdirs(target)
        if kind == "CRC32C":
            for size, content in contents.items():
                namenode, path = NameNode.connect(cluster.url), f"{target}/{size}"
                with FileOutput(namenode, path, replication=2, block_size=block, bytes_per_checksum=step) as out:
                    out.write(content)
            return target
        settings = {"bytes-per-checksum": step, "checksum.type": kind, "blocksize": block, "replication": 2}
        options = [word for key, value in settings.items() for word in ("-D", f"dfs.{key}={value}")]
        cluster.fs_shell([*options, "-put", *(str(folder / str(size)) for size in SIZES), target])
        return target

    with ThreadPoolExecutor(2) as pool:
        targets = dict(zip(KINDS, pool.map(lambda each: put(*each), KINDS), strict=True))
    return {(*each, size): (f"{targets[each]}/{size}", contents[size]) for each in KINDS for size in SIZES}


@pytest.mark.parametrize(("step", "kind"), [kind for kind in KINDS if kind[1] != "NULL"])
def test_every_checksum_size_and_any_range(files, step, kind):
    chance = random.Random(step)
    for size in SIZES:
        path, content = files[step, kind, size]
        found = blocks(path)
        assert found.length == size
        assert b"".join(fetch(located, 0, [located.block.length]) for located in found.blocks) == content
        for located in found.blocks:
            data = content[located.offset : located.offset + located.block.length]
            for _ in range(6):
                begin = chance.randrange(len(data))
                length = chance.choice([1, 100, step, len(data)])
                length = min(length, len(data) - begin)
                cut = chance.randint(0, length)
                for verify in (True, False):
                    replica = chance.randrange(len(located.nodes))
                    got = fetch(located, begin, [cut, length - cut], verify, replica)
                    assert got == data[begin : begin + length]


def test_a_file_without_checksums_is_read_only_unverified(files):
    path, content = files[512, "NULL", 1_000_000]
    (located,) = blocks(path).blocks
    assert fetch(located, 0, [1_000_000], verify=False) == content
    with pytest.raises(UncheckedReplica, match="has no checksums"):
        fetch(located, 0, [1_000_000])


def test_many_threads_and_parts(files):
    path, content = files[512, "CRC32C", SIZES[-1]]
    found = blocks(path).blocks

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(25):
            located = chance.choice(found)
            data = content[located.offset : located.offset + located.block.length]
            begin = chance.randrange(len(data))
            count = chance.choice([1, 3, 700])
            sizes = [(len(data) - begin) // count] * count
            got = fetch(located, begin, sizes, chance.random() < 0.5, chance.randrange(2))
            assert got == data[begin : begin + sum(sizes)]

    together(work, range(8))


def test_a_connection_is_kept_and_replaced_when_the_datanode_closed_it(files, monkeypatch):
    path, content = files[512, "CRC32C", 65_536]
    (located,) = blocks(path).blocks
    address = (located.nodes[0].host, located.nodes[0].port)
    datanode.idle.clear()
    made = [0]
    connect = datanode.connect

    def counted(*args: object) -> Connection:
        made[0] += 1
        return connect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(datanode, "connect", counted)
    for _ in range(20):
        assert fetch(located, 0, [65_536]) == content
    assert (made[0], datanode.idle.count(address)) == (1, 1)
    monkeypatch.setattr(datanode.idle, "seconds", 60.0)
    monkeypatch.setattr(Connection, "alive", lambda self: True)  # not seen to be closed before it is used
    time.sleep(5)  # longer than a DataNode keeps an idle connection
    assert fetch(located, 0, [65_536]) == content
    assert made[0] == 2


def test_replicas_that_are_gone_or_of_another_generation(files):
    path, content = files[512, "CRC32C", 1_000_000]
    (located,) = blocks(path).blocks
    newer = dataclasses.replace(located, block=located.block._replace(generation=located.block.generation + 1))
    with pytest.raises(StaleReplica, match="gen stamp"):
        fetch(newer, 0, [10])
    other = dataclasses.replace(located, block=located.block._replace(id=located.block.id + 1_000_000))
    with pytest.raises(StaleReplica, match=r"Replica not found|ReplicaNotFound"):
        fetch(other, 0, [10])
    longer = dataclasses.replace(located, block=located.block._replace(length=2_000_000))
    with pytest.raises(StaleReplica, match="don't match block"):
        fetch(longer, 900_000, [200_000])
    # another cluster's: a DataNode waits 20 s for the NameNode to tell it of that pool
    elsewhere = dataclasses.replace(located, block=located.block._replace(pool="BP-1-127.0.0.1-1"))
    with pytest.raises(UnavailableError, match=r"no answer within 0\.3 s"):
        datanode.read(located.nodes[0], elsewhere, 0, [memoryview(bytearray(9))], deadline=0.3, verify=True)
    assert fetch(located, 0, [1_000_000]) == content


def test_a_deleted_file_ends_as_stale(files, tmp_path):
    client = hdfs.connect(hadoop.shared().url)
    path = f"/{uuid.uuid4().hex}"
    with client.create(path, replication=1) as out:
        out.write(b"x" * 100_000)
    (located,) = blocks(path).blocks
    assert fetch(located, 0, [100_000]) == b"x" * 100_000
    client.delete(path)
    until = time.monotonic() + 30
    while time.monotonic() < until:  # the DataNode is told with its next heartbeat
        try:
            assert fetch(located, 0, [100_000]) == b"x" * 100_000
        except StaleReplica:
            return
        time.sleep(0.2)
    pytest.fail("the replica of a deleted file could be read for 30 s")


def _files_of(located: Located) -> list[Path]:
    """The replicas of a block on the DataNodes' disks, in no particular order."""
    root = hadoop.shared().root
    return sorted(root.glob(f"dn*/current/*/current/finalized/**/blk_{located.block.id}"))


def test_damage_on_disk(files):
    client = hdfs.connect(hadoop.shared().url)
    path = f"/{uuid.uuid4().hex}"
    content = os.urandom(3_000_000)
    with client.create(path, replication=1, block_size=4 << 20) as out:
        out.write(content)
    (located,) = blocks(path).blocks
    (replica,) = _files_of(located)
    with open(replica, "r+b") as file:
        file.seek(2_000_000)
        file.write(bytes([content[2_000_000] ^ 4]))
    assert fetch(located, 0, [1_900_000]) == content[:1_900_000]
    assert fetch(located, 2_000_384, [900_000]) == content[2_000_384:2_900_384]
    with pytest.raises(CorruptReplica, match="is damaged within 512 bytes from 1999872") as caught:
        fetch(located, 1_000, [2_500_000])
    assert caught.value.offset == 1_999_872
    with pytest.raises(CorruptReplica):
        fetch(located, 2_000_100, [1])  # beside the damage, in its chunk
    assert fetch(located, 0, [3_000_000], verify=False) != content
    with open(replica, "r+b") as file:
        file.seek(2_000_000)
        file.write(content[2_000_000:2_000_001])
    assert fetch(located, 0, [3_000_000]) == content
    meta = next(replica.parent.glob(f"{replica.name}_*.meta"))
    whole = meta.read_bytes()
    meta.write_bytes(whole[: len(whole) // 2])
    with pytest.raises((CorruptReplica, UnavailableError)):
        fetch(located, 0, [3_000_000])
    meta.write_bytes(whole)
    os.truncate(replica, 1_000_000)
    with pytest.raises(UnavailableError):
        fetch(located, 0, [3_000_000], verify=False)
    replica.unlink()
    with pytest.raises(StaleReplica):
        fetch(located, 0, [3_000_000])
    client.delete(path)


def test_a_datanode_is_told_from_something_else():
    located = _any_located()
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = dataclasses.replace(located.nodes[0], port=server.getsockname()[1])

        def web() -> None:
            sock = server.accept()[0]
            with sock:
                sock.recv(1000)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=web)
        thread.start()
        with pytest.raises(UnavailableError, match="from DataNode 127"):
            datanode.read(node, located, 0, [memoryview(bytearray(5))], deadline=5, verify=True)
        thread.join()
    # and the port of the NameNode
    port = int(hadoop.shared().url.rpartition(":")[2])
    node = dataclasses.replace(located.nodes[0], port=port)
    with pytest.raises(UnavailableError):
        datanode.read(node, located, 0, [memoryview(bytearray(5))], deadline=5, verify=True)


def _any_located() -> Located:
    path = f"/{uuid.uuid4().hex}"
    with hdfs.connect(hadoop.shared().url).create(path, replication=1) as out:
        out.write(b"12345")
    return blocks(path).blocks[0]
