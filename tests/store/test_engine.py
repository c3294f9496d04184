"""The read engine over real DataNodes: files that are replaced.

Frozen DataNodes, damage, and blocks that move: `chaos/test_stripefs_faults.py`.
"""

import os
import time
import uuid

import pytest

from bootseer.backends.engine.engine import Engine, shared
from bootseer.backends.hdfs_native import NativeSource
from bootseer.errors import DataError, UnavailableError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.stripefs import open_fs
from bootseer.stripefs.store import StripeFS
from support.stripes import content

pytestmark = pytest.mark.hdfs

UNIT = 1 << 20


@pytest.fixture
def fs(cluster) -> StripeFS:
    return open_fs(f"{cluster.url}/{uuid.uuid4().hex}")


def write(fs: StripeFS, path: str, size: int = 24 << 20) -> bytes:
    data = os.urandom(size)
    with fs.create(path, striped=True, unit=UNIT, width=4) as out:
        out.write(data)
    return data


def plain(fs: StripeFS, name: str, data: bytes, *, block_size: int = 1 << 20, replication: int = 3) -> str:
    """A file as any tool writes it; its path in HDFS."""
    path = fs.backend.full(name)
    namenode = NameNode.connect(fs.url)
    namenode.delete(path)
    with FileOutput(namenode, path, block_size=block_size, replication=replication) as out:
        out.write(data)
    return path


def _stripe(fs: StripeFS, index: int) -> str:
    return f".bsx/{fs.backend.list('.bsx')[index].name}"


@pytest.mark.serial  # a DataNode that a busy machine delays is left out
def test_every_datanode_serves(fs):
    data = write(fs, "f", 48 << 20)
    before = _served()
    assert content(fs, "f") == data
    given = [served - before.get(address, 0) for address, served in _served().items()]
    assert sum(given) >= len(data)
    assert sum(count > 0 for count in given) == 4


def _served() -> dict[str, int]:
    return {node.address: node.served for node in shared().scheduler.nodes.values()}


def test_what_is_erasure_coded_goes_through_hdfs_native(cluster, fs):
    fs.backend.make_folder("")
    cluster.web.make_erasure_coded(fs.backend.full(""), "XOR-2-1-1024k")
    data = write(fs, "f", 5 << 20)
    assert content(fs, "f") == data
    (tail, source) = data[-100:], fs.backend.open(_stripe(fs, 0), pinned=True)
    assert isinstance(source, NativeSource)
    assert not source.unfinished
    with fs.open("f") as file:
        assert file.read(len(data) - 100, 100) == tail


def test_xor_coded_files_are_right_or_an_error_while_a_datanode_is_down(cluster, fs):
    """hdfs-native computes no lost cells of them (of Reed-Solomon codes it does), and says so."""
    fs.backend.make_folder("")
    cluster.web.make_erasure_coded(fs.backend.full(""), "XOR-2-1-1024k")
    data = write(fs, "f", 5 << 20)
    problems = []
    for index in range(len(cluster.datanodes)):
        cluster.kill(index)
        try:
            assert content(fs, "f") == data
        except UnavailableError as exc:
            problems.append(str(exc))
        finally:
            cluster.restart(index)
    assert problems
    assert all("codec: xor" in problem for problem in problems)
    cluster.wait_live(len(cluster.datanodes))
    assert content(fs, "f") == data


def test_what_goes_through_hdfs_native_has_the_rights_of_who_asks(cluster, fs, monkeypatch):
    """A process may become somebody else: one client served all, with the rights of the first."""
    folder = fs.backend.full("")
    fs.backend.make_folder("")
    cluster.web.make_erasure_coded(folder, "XOR-2-1-1024k")
    names = fs.backend.namenode()
    names.set_permission(folder, 0o777)
    for user in ("alice", "bob", "alice"):
        monkeypatch.setenv("HADOOP_USER_NAME", user)
        with fs.backend.create(user, mode=0o600) as out:
            out.write(user.encode())
        assert names.info(f"{folder}/{user}").owner == user
        assert fs.backend.open(user).read(0, len(user)) == user.encode()
        fs.backend.delete(user)


@pytest.mark.parametrize("size", [1 << 20, (5 << 20) + 3])
def test_a_file_replaced_under_its_reader_gives_its_own_bytes_or_an_error(fs, size):
    data, other, problem = os.urandom(size), os.urandom(size), ""
    path = plain(fs, "p", data)
    with fs.open("p") as file:
        plain(fs, "p", other)
        for _ in range(20):
            try:
                found = file.read(0, size)
            except DataError as exc:
                problem = str(exc)
                break
            assert found == data
            time.sleep(0.2)
    assert problem in ("", f"{path} was replaced while it was read; open it again")
    assert content(fs, "p") == other


def test_a_file_truncated_and_appended_to_is_noticed(cluster, fs):
    data = os.urandom(3 << 20)
    path = plain(fs, "p", data, replication=1)
    with fs.open("p") as file:
        assert file.read(0, len(data)) == data
        cluster.fs_shell(["-truncate", "-w", str((2 << 20) + 5), path])
        with pytest.raises(DataError, match=r"was replaced while it was read|ends at"):
            file.read(0, len(data))
    assert content(fs, "p") == data[: (2 << 20) + 5]


def test_a_forked_child_reads_on(fs):
    data = write(fs, "f", 9 << 20)
    with fs.open("f") as file:
        assert file.read(0, file.size) == data
        if not (pid := os.fork()):
            code = 1
            try:
                code = 0 if file.read(0, file.size) == data and content(fs, "f") == data else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert file.read(0, file.size) == data


def test_no_transfers_are_left(fs):
    engine = shared()
    assert isinstance(engine, Engine)
    until = time.monotonic() + 5
    while engine.scheduler.busy and time.monotonic() < until:
        time.sleep(0.05)
    assert not engine.scheduler.busy
