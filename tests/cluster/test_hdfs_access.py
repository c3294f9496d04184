"""A NameNode with block tokens, permissions and small pages; its outages; and a cluster that encrypts transfers."""

import itertools
import os
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.errors import FullError, NotWritableError, UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs import datanode
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.stripefs import open_fs
from support.hadoop import HadoopCluster

pytestmark = pytest.mark.hdfs
SETTINGS = {"dfs.block.access.token.enable": "true", "dfs.permissions.enabled": "true", "dfs.ls.limit": "5"}
DATA = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hdfs") / "root"


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[HadoopCluster]:
    with HadoopCluster(root, 1, settings=SETTINGS, keep=True) as running:
        with hdfs.connect(running.url).create("/kept", replication=1, block_size=1 << 20) as out:
            out.write(DATA)
        yield running


@pytest.fixture
def node(cluster: HadoopCluster) -> NameNode:
    return NameNode.connect(cluster.url)


class _Raw:
    """A request that the package has no message for, as its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self, deterministic: bool | None = None) -> bytes:
        return self._data


def safe_mode(node: NameNode, on: bool) -> None:
    request = _Raw(b"\x08" + (b"\x02" if on else b"\x01"))  # field 1, action: 1 leave, 2 enter
    node._rpc.call("setSafeMode", request, wire.Result, "set safe mode", deadline=20.0)


@pytest.mark.root
def test_a_mount_by_root_shows_others_what_hdfs_lets_them_see(cluster, node, config):
    """Owners and modes are those of HDFS; `nobody` is a user of every node, `stranger` of none."""

    def sees(where: Path, *names: str) -> list[str]:
        done = [
            subprocess.run(["cat", where / name], user=65534, group=65534, extra_groups=[], capture_output=True)
            for name in names
        ]
        return [one.stdout.decode() or one.stderr.decode().rpartition(": ")[2].strip() for one in done]

    fs = open_fs(f"{cluster.url}/shared")
    names = ("open", "mine", "private", "listed", "strange", "closed/f", "members", "super", "sticky/f")
    for name in names:
        with fs.create(name) as out:
            out.write(b"content")
    change = cluster.web.change
    modes = {"open": "644", "listed": "644", "closed/f": "644", "private": "600", "mine": "600", "strange": "640"}
    modes |= {"members": "604", "super": "660", "sticky": "1777", "sticky/f": "644"}
    for name, mode in (modes | {"closed": "700"}).items():
        change("SETPERMISSION", f"/shared/{name}", permission=mode)
    change("SETOWNER", "/shared/mine", owner="nobody")
    change("SETOWNER", "/shared/strange", owner="stranger", group="strangers")
    change("MODIFYACLENTRIES", "/shared/listed", aclspec="user:stranger:r--,group::---,mask::r--")
    change("SETOWNER", "/shared/listed", group="nogroup")
    assert (node.info("/shared/listed").acl, node.list("/shared")[1].acl) == (True, True)
    denied = "Permission denied"
    with tempfile.TemporaryDirectory() as folder:  # one that everybody can enter
        os.chmod(folder, 0o755)
        made = fsmount.start(fs.url, Path(folder, "mnt"), config=config)
        try:
            assert [(made.mountpoint / name).read_bytes() for name in names] == [b"content"] * len(names)
            assert stat.S_IMODE((made.mountpoint / "sticky").stat().st_mode) == 0o1707  # HDFS's group is unknown here
            info = (made.mountpoint / "mine").stat()
            assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (65534, 0o600)
            expected = ["content", "content", *[denied] * 6, "content"]
            assert sees(made.mountpoint, *names) == expected
            with os.scandir(made.mountpoint) as entries:  # a listing brings the attributes along
                told = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in entries}
            assert (told["listed"], told["private"], told["super"], told["open"]) == (0o600, 0o600, 0o600, 0o604)
            assert sees(made.mountpoint, *names) == expected
            change("SETPERMISSION", "/shared/open", permission="600")
            change("SETPERMISSION", "/shared/closed", permission="755")
            until = time.monotonic() + 30
            while sees(made.mountpoint, "open", "closed/f") != [denied, "content"]:
                assert time.monotonic() < until
                time.sleep(0.2)
            change("SETPERMISSION", "/shared", permission="700")
            while sees(made.mountpoint, "mine") != [denied]:
                assert time.monotonic() < until
                time.sleep(0.2)
        finally:
            made.unmount()
        made = fsmount.start(f"{fs.url}/closed", Path(folder, "mnt"), config=config)  # a private folder is above it
        try:
            assert (made.mountpoint / "f").read_bytes() == b"content"
            assert sees(made.mountpoint, "f") == [denied]
        finally:
            made.unmount()


def test_block_tokens_come_with_the_blocks(cluster, node):
    assert node.way() == "neither authentication nor wire encryption"
    found = node.blocks("/kept")
    assert len(found.blocks) == 3
    for block in found.blocks:
        assert block.token.identifier
        assert block.token.password
        assert block.token.kind == "HDFS_BLOCK_TOKEN"
    file_id = node.create("/tokens", replication=1).file_id
    assert node.add_block("/tokens", file_id).token.identifier
    assert node.delete("/tokens")


def test_bytes_are_read_and_written_with_tokens(node):
    with FileOutput(node, "/written", replication=1, block_size=1 << 20) as out:
        out.write(DATA)
    for path, verify in itertools.product(("/kept", "/written"), (True, False)):
        data = bytearray()
        for block in node.blocks(path).blocks:
            part = bytearray(block.block.length)
            datanode.read(block.nodes[0], block, 0, [memoryview(part)], deadline=20.0, verify=verify)
            data += part
        assert data == DATA
    assert node.delete("/written")


def test_a_listing_of_many_pages_is_whole(node):
    for i in range(23):
        node.mkdirs(f"/pages/{i:02}")
    assert [entry.path for entry in node.list("/pages")] == [f"/pages/{i:02}" for i in range(23)]
    assert len(node.list("/pages/03")) == 0
    assert node.delete("/pages", recursive=True)


def test_who_may_not_is_told(cluster, node, monkeypatch):
    node.mkdirs("/roots")
    monkeypatch.setenv("HADOOP_USER_NAME", "bob")
    bob = NameNode.connect(cluster.url)
    assert bob is not node
    for attempt in (lambda: bob.create("/roots/a"), lambda: bob.delete("/kept"), lambda: bob.rename("/kept", "/k")):
        with pytest.raises(NotWritableError, match=r"Permission denied: user=bob.*; check the owner and mode"):
            attempt()
    assert bob.info("/kept").owner == node.user
    monkeypatch.setenv("HADOOP_PROXY_USER", "eve")
    with pytest.raises(NotWritableError, match="not allowed to impersonate"):
        NameNode.connect(cluster.url).info("/")


def test_a_quota_is_full(cluster, node):
    node.mkdirs("/small")
    cluster.web.change("SETQUOTA", "/small", namespacequota="2", storagespacequota=str(1 << 20))
    file_id = node.create("/small/a", replication=1, block_size=2 << 20).file_id
    with pytest.raises(FullError, match="raise the quota"):
        node.add_block("/small/a", file_id)
    with pytest.raises(FullError, match="raise the quota"):
        node.create("/small/b")


def test_safe_mode_is_waited_out(node):
    safe_mode(node, True)
    timer = threading.Timer(1.0, safe_mode, (node, False))
    try:
        assert node.info("/kept").size == len(DATA)
        with pytest.raises(UnavailableError, match="safe mode"):
            node.mkdirs("/safe", deadline=0.3)
        timer.start()
        node.mkdirs("/safe", deadline=30.0)
        assert node.info("/safe").is_dir
    finally:
        timer.join()


def test_a_frozen_namenode_holds_calls_no_longer_than_they_say(cluster, node):
    done: list[bool] = []
    with cluster.frozen_namenode():
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"cannot look up /kept on hdfs://.*(time|timed out)"):
            node.info("/kept", deadline=0.5)
        assert time.monotonic() - began < 5
        waiting = threading.Thread(target=lambda: done.append(node.delete("/none", deadline=60.0)))
        waiting.start()
        time.sleep(0.3)
        assert not done
    waiting.join(60)
    assert done == [False]
    assert node.info("/kept").size == len(DATA)


def test_calls_go_on_over_a_restart(cluster, node):
    """Each call that changes something has its own outcome once, also when its answer was lost with the NameNode."""
    stop, wrong, counts = threading.Event(), [], [0, 0, 0]

    def work(number: int) -> None:
        try:
            for i in itertools.count():
                path = f"/restart/{number}/{i}"
                file_id = node.create(path, replication=1, deadline=90.0).file_id
                node.rename(path, f"{path}.r", deadline=90.0)
                assert node.complete(f"{path}.r", file_id, None, deadline=90.0)
                if i % 2:
                    assert node.delete(f"{path}.r", deadline=90.0)
                counts[number] = i + 1
                if stop.is_set():
                    return
        except BaseException as exc:
            wrong.append(exc)

    node.mkdirs("/restart")
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    cluster.kill_namenode()
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="connection refused"):
        node.info("/kept", deadline=0.5)
    assert time.monotonic() - began < 5
    before = list(counts)
    cluster.restart_namenode()
    until = time.monotonic() + 60
    while min(now - then for now, then in zip(counts, before, strict=True)) < 3 and not wrong:
        assert time.monotonic() < until
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(90)
    assert wrong == []
    for number in range(3):
        kept = {f"/restart/{number}/{i}.r" for i in range(0, counts[number], 2)}
        assert {entry.path for entry in node.list(f"/restart/{number}")} == kept


def test_encrypted_transfer_is_read_and_written_directly(cluster, root):
    """Red before: it went through hdfs-native. The last one: it ends the cluster, and starts one on the same data."""
    cluster.stop()
    settings = {**SETTINGS, "dfs.encrypt.data.transfer": "true"}
    with HadoopCluster(root, 1, settings=settings) as encrypted:
        assert NameNode.connect(encrypted.url).way() == "no authentication, encrypted transfers"
        with open_fs(f"{encrypted.url}/striped").create("f") as file:
            file.write(DATA)
        out = bytearray(len(DATA))
        open_fs(f"{encrypted.url}/striped").open("f").readinto(0, memoryview(out))
        assert out == DATA
        assert hdfs.connect(encrypted.url).read("/kept") == DATA
        assert NameNode.connect(encrypted.url).info("/kept").size == len(DATA)
