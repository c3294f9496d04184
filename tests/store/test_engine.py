"""The read engine over real DataNodes: files that are replaced, what `explain` says of it.

Frozen DataNodes, damage, and blocks that move: `chaos/test_stripefs_faults.py`.
"""

import os
import time
import uuid

import pytest

from bootseer.backends.engine.engine import Engine, shared
from bootseer.errors import DataError, NotFoundError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.stripefs import open_fs
from bootseer.stripefs.explain import explain
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
def test_every_datanode_serves_and_explain_says_so(fs):
    data = write(fs, "f", 48 << 20)
    before = {address: served for address, served in _served(fs, "f").items()}
    assert content(fs, "f") == data
    after = _served(fs, "f")
    assert len(after) == 4
    assert sum(after.values()) - sum(before.values()) >= len(data)
    assert all(after[address] > before[address] for address in after)
    told = explain(fs, "f")
    assert (told.access, told.width, told.unit, told.size) == ("direct", 4, UNIT, len(data))
    assert "authentication" in told.reason
    assert [stripe.index for stripe in told.stripes] == [0, 1, 2, 3]
    for stripe in told.stripes:
        assert (stripe.access, stripe.problem) == ("direct", "")
        for block in stripe.blocks:
            assert len(block.replicas) >= 1
            assert sum(block.planned.values()) == pytest.approx(block.length, abs=4)
    assert told.seconds is not None
    assert {node.state for node in told.nodes} <= {"closed", "open", "half-open"}  # this machine may be busy
    assert any(node.rate for node in told.nodes)


def _served(fs: StripeFS, path: str) -> dict[str, int]:
    return {node.address: node.served for node in explain(fs, path).nodes}


def test_explain_of_other_things(fs, tmp_path):
    with pytest.raises(NotFoundError):
        explain(fs, "nothing")
    data = write(fs, "f", 9 << 20)
    plain(fs, "p", data[:3000])
    told = explain(fs, "p")
    assert (told.width, told.size, [stripe.path for stripe in told.stripes]) == (0, 3000, ["p"])
    fs.backend.delete(_stripe(fs, 2))
    told = explain(fs, "f")
    assert [bool(stripe.problem) for stripe in told.stripes] == [False, False, True, False]
    local = open_fs(str(tmp_path))
    (tmp_path / "x").write_bytes(b"x")
    assert explain(local, "x").access == "folder"


def test_the_same_bytes_through_hdfs_native(fs, monkeypatch):
    data = write(fs, "f", 9 << 20)
    monkeypatch.setenv("BOOTSEER_HDFS_ACCESS", "native")
    other = open_fs(fs.url)
    assert content(other, "f") == data
    told = explain(other, "f")
    assert (told.access, told.stripes[0].access) == ("native", "native")
    assert "hdfs_access" in told.reason


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
