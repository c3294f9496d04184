"""The NameNode of a real Hadoop: files, blocks, leases, and calls whose answers are lost."""

import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from bootseer import faults
from bootseer.errors import ConfigError, NotFoundError, NotWritableError, UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs.errors import RemoteError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.records import Block, DataNode, FileBlocks
from support import hadoop
from support.replicas import datanodes
from support.waits import until

pytestmark = pytest.mark.hdfs
MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> NameNode:
    return NameNode.connect(hadoop.shared().url)


@pytest.fixture
def folder(node: NameNode) -> Iterator[str]:
    path = f"/{uuid.uuid4().hex}"
    node.mkdirs(path)
    yield path
    node.delete(path, recursive=True)


def put(path: str, data: bytes, block_size: int = MIB, replication: int = 3) -> None:
    """A file written by hdfs-native."""
    with hdfs.connect(hadoop.shared().url).create(path, block_size=block_size, replication=replication) as out:
        out.write(data)


def located(node: NameNode, path: str, replicas: int = 3) -> FileBlocks:
    """Its blocks, when every DataNode has told of its replica: a write waits for one of them only."""
    until = time.monotonic() + 30
    while True:
        found = node.blocks(path)
        if all(len(block.nodes) == replicas for block in found.blocks):
            return found
        assert time.monotonic() < until
        time.sleep(0.05)


def test_files_and_folders(node, folder):
    put(f"{folder}/a", b"x" * (2 * MIB + 5), replication=2)
    found = node.info(f"{folder}/a")
    assert (found.path, found.size, found.is_dir) == (f"{folder}/a", 2 * MIB + 5, False)
    assert (found.replication, found.block_size, found.erasure, found.encrypted) == (2, MIB, "", False)
    assert abs(found.mtime_ms / 1000 - time.time()) < 300
    node.mkdirs(f"{folder}/b/c")
    node.mkdirs(f"{folder}/b/c")
    assert [(entry.path, entry.is_dir) for entry in node.list(folder)] == [
        (f"{folder}/a", False),
        (f"{folder}/b", True),
    ]
    assert [entry.path for entry in node.list(f"{folder}/a")] == [f"{folder}/a"]
    assert node.list(f"{folder}/b/c") == []
    assert node.info("/").is_dir
    assert folder in [entry.path for entry in node.list("/")]

    node.rename(f"{folder}/a", f"{folder}/b/a")
    assert node.info(f"{folder}/a") is None
    assert node.info(f"{folder}/b/a").file_id == found.file_id
    put(f"{folder}/a", b"new")
    with pytest.raises(FileExistsError):
        node.rename(f"{folder}/a", f"{folder}/b/a")
    node.rename(f"{folder}/a", f"{folder}/b/a", overwrite=True)
    assert node.info(f"{folder}/b/a").size == 3
    assert node.info(f"{folder}/b/a").file_id != found.file_id
    with pytest.raises(NotFoundError):
        node.rename(f"{folder}/none", f"{folder}/other")
    with pytest.raises(NotWritableError):
        node.mkdirs(f"{folder}/b/a/below")
    assert node.info(f"{folder}/b/a/below") is None
    with pytest.raises(NotFoundError):
        node.list(f"{folder}/none")
    with pytest.raises(NotWritableError, match="not empty"):
        node.delete(f"{folder}/b")
    assert node.delete(f"{folder}/b", recursive=True)
    assert not node.delete(f"{folder}/b", recursive=True)


@pytest.mark.parametrize("name", ["ä€\U0001f600", "a b", "%20+&?#", 'quote"\\', "line\nfeed", "x" * 255])
def test_names_arrive_as_they_are(node, folder, name):
    put(f"{folder}/{name}", b"1")
    (found,) = node.list(folder)
    assert found.path == f"{folder}/{name}"
    assert node.info(found.path) == found
    assert hdfs.connect(node.url).read(found.path) == b"1"  # another implementation


@pytest.mark.parametrize("name", ["x" * 300, "a//b", "..", "\udcff"])
def test_names_that_hdfs_refuses_are_an_error(node, folder, name):
    with pytest.raises((ConfigError, NotWritableError)):
        node.create(f"{folder}/{name}")


def test_blocks_and_where_they_are(node, folder):
    put(f"{folder}/a", os.urandom(2 * MIB + 5))
    found = located(node, f"{folder}/a")
    assert (found.length, found.under_construction, found.erasure, found.encrypted) == (2 * MIB + 5, False, "", False)
    assert [(block.offset, block.block.length) for block in found.blocks] == [(0, MIB), (MIB, MIB), (2 * MIB, 5)]
    live = {each.uuid: each for each in datanodes(hadoop.shared())}
    assert len(live) == 4
    for block in found.blocks:
        assert len({each.uuid for each in block.nodes} & live.keys()) == 3
        assert all(live[each.uuid].address == each.address for each in block.nodes)
        assert len({each.storage_id for each in block.nodes} - {""}) == 3
    assert len({block.block.id for block in found.blocks}) == 3
    (middle,) = node.blocks(f"{folder}/a", MIB + 7, 10).blocks
    assert middle.block == found.blocks[1].block
    with pytest.raises(NotFoundError, match="no such file"):
        node.blocks(f"{folder}/none")
    with pytest.raises(NotFoundError, match="it is a folder"):
        node.blocks(folder)


def test_a_file_without_blocks_and_one_that_is_being_written(node, folder):
    path = f"{folder}/a"
    made = node.create(path, replication=2, block_size=4 * MIB)
    file_id = made.file_id
    found = node.info(path)
    assert found == made
    assert (found.size, found.replication, found.block_size) == (0, 2, 4 * MIB)
    assert node.blocks(path).under_construction
    with pytest.raises(FileExistsError):
        node.create(path)
    node.renew_lease()
    assert node.complete(path, file_id, None)
    assert node.complete(path, file_id, None)  # as when the first answer was lost
    assert not node.blocks(path).under_construction
    with pytest.raises(FileExistsError):
        node.create(path)
    with pytest.raises((NotWritableError, NotFoundError)):
        node.add_block(path, file_id)
    assert node.delete(path)
    assert node.create(path).file_id != file_id


def test_blocks_are_placed_given_up_and_renewed(node, folder):
    path = f"{folder}/a"
    live = datanodes(hadoop.shared())
    file_id = node.create(path, replication=2).file_id
    first = node.add_block(path, file_id, exclude=[live[1], live[3]])
    assert {each.uuid for each in first.nodes} == {live[2].uuid, live[0].uuid}
    assert (first.offset, first.block.length) == (0, 0)
    node.abandon_block(first.block, path, file_id)
    second = node.add_block(path, file_id, exclude=first.nodes)
    assert not {each.uuid for each in second.nodes} & {each.uuid for each in first.nodes}
    other = node.create(f"{folder}/b", replication=1).file_id
    with pytest.raises(UnavailableError, match="too few DataNodes"):
        node.add_block(f"{folder}/b", other, exclude=live)

    renewed = node.update_block_for_pipeline(second.block, path)
    assert renewed.block.id == second.block.id
    assert renewed.block.generation > second.block.generation
    new = renewed.block._replace(length=0)
    node.update_pipeline(second.block, new, second.nodes[:1], path)
    (left,) = node.blocks(path).blocks or (None,)
    assert left is None or left.block.generation == renewed.block.generation
    with pytest.raises(Exception, match=rf"change the DataNodes of block {second.block.id} of {path} on .*stamp"):
        node.update_pipeline(second.block, second.block, second.nodes, path)
    assert not node.complete(path, file_id, new, deadline=5.0)  # no DataNode has it


def test_the_lease_of_another_is_recovered(node, folder):
    path = f"{folder}/a"
    other = NameNode([("127.0.0.1", int(node.url.rpartition(":")[2]))], node.user)
    file_id = other.create(path).file_id
    until(lambda: node.recover_lease(path), 30)
    assert node.recover_lease(path)
    with pytest.raises(NotWritableError, match="another writer") as caught:
        other.add_block(path, file_id)
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.java == "LeaseExpiredException"
    other.close()


@pytest.fixture
def lost(monkeypatch) -> Iterator[None]:
    """The answer to the first call is lost after the NameNode has given it."""
    faults.visits.clear()
    monkeypatch.setenv("BOOTSEER_FAULTS", "hdfs.rpc.answered=eio@1")
    yield
    assert faults.visits["hdfs.rpc.answered"] > 1


def test_a_rename_whose_answer_was_lost_is_a_success(node, folder, lost):
    node.rename(f"{folder}", f"{folder}.renamed")
    node.rename(f"{folder}.renamed", folder)


def test_a_delete_whose_answer_was_lost_says_that_it_removed(node, folder, lost):
    assert node.delete(folder)


def test_a_create_whose_answer_was_lost_is_no_file_that_exists(node, folder, lost):
    file_id = node.create(f"{folder}/a", replication=1, block_size=MIB).file_id
    assert node.info(f"{folder}/a").file_id == file_id


def test_a_block_whose_answer_was_lost_is_added_once(node, folder, monkeypatch):
    file_id = node.create(f"{folder}/a", replication=1).file_id
    faults.visits.clear()
    monkeypatch.setenv("BOOTSEER_FAULTS", "hdfs.rpc.answered=eio@1")
    added = node.add_block(f"{folder}/a", file_id)
    assert faults.visits["hdfs.rpc.answered"] == 2
    again = node.add_block(f"{folder}/a", file_id)
    assert again.block == added.block


def test_a_replica_that_is_reported_is_no_longer_told_of(node, folder):
    put(f"{folder}/a", b"z" * 1000)
    (block,) = located(node, f"{folder}/a").blocks
    node.report_bad_blocks([block.picked([0])])
    until(lambda: block.nodes[0] not in node.blocks(f"{folder}/a").blocks[0].nodes, 30)


def test_an_erasure_coded_folder_is_named_and_so_are_its_files(node, folder):
    hadoop.shared().web.make_erasure_coded(folder, "XOR-2-1-1024k")
    assert node.info(folder).erasure == "XOR-2-1-1024k"
    made = node.create(f"{folder}/a")
    assert made == node.info(f"{folder}/a")
    assert made.erasure == node.blocks(f"{folder}/a").erasure == "XOR-2-1-1024k"


def test_many_threads_and_a_forked_child(node, folder):
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                path = f"{folder}/{number}-{i}"
                assert node.complete(path, node.create(path).file_id, None)
                assert node.info(path).size == 0
            assert hdfs.connect(node.url).open(path).size == 0
        except BaseException as exc:
            wrong.append(exc)
            if number == 99:
                raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    child = multiprocessing.get_context("fork").Process(target=work, args=(99,), daemon=True)
    child.start()
    for thread in threads:
        thread.join(60)
    child.join(30)
    exitcode = child.exitcode
    child.kill()
    assert wrong == []
    assert exitcode == 0  # None: it hangs
    assert len(node.list(folder)) == 65


def test_defaults_and_the_way_to_the_cluster(node):
    defaults = node.defaults()
    assert (defaults.block_size, defaults.replication) == (128 * MIB, 3)
    assert not defaults.encrypt_data_transfer
    assert node.way() == "neither authentication nor wire encryption"


def test_a_port_that_is_not_the_namenodes_is_said():
    live = datanodes(hadoop.shared())[0]
    assert isinstance(live, DataNode)
    assert isinstance(live.message.id.ipc_port, int)
    wrong = NameNode([(live.host, live.message.id.ipc_port)], "ann")
    with pytest.raises(ConfigError, match="not the NameNode's RPC port"):
        wrong.info("/")
    wrong.close()
    assert Block("p", 1, 2, 3).message.pool == "p"
