"""Two NameNodes of one name service, one of them active: failovers while calls are made."""

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs import nameservice
from bootseer.hdfs.namenode import NameNode, login_user
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.rpc import RpcClient
from bootseer.stripefs import open_fs
from support.hadoopsite import Daemon, Site, free_ports
from support.kerberos import Realm

pytestmark = pytest.mark.hdfs
DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"


class _Request:
    """Who asks for a change of state: a user."""

    def SerializeToString(self, deterministic: bool | None = None) -> bytes:
        return b"\x0a\x02\x08\x00"


class Pair:
    """NameNodes ``a`` and ``b`` that share their edit log in a folder, and two DataNodes, which `start_datanodes`
    starts. Both begin in standby."""

    def __init__(self, root: Path, realm: Realm | None) -> None:
        ports = dict(zip(("a", "b"), free_ports("127.0.0.1", 2), strict=True))
        http = dict(zip(("a", "b"), free_ports("127.0.0.1", 2), strict=True))
        settings = {
            "dfs.nameservices": "pair",
            "dfs.ha.namenodes.pair": "a,b",
            "dfs.namenode.shared.edits.dir": f"file://{root}/shared",
            "dfs.client.failover.proxy.provider.pair": (
                "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
            ),
            "dfs.ha.fencing.methods": "shell(/bin/true)",
            "dfs.namenode.state.context.enabled": "true",  # as a site with observers sets it
            **{f"dfs.namenode.rpc-address.pair.{name}": f"127.0.0.1:{port}" for name, port in ports.items()},
            **{f"dfs.namenode.http-address.pair.{name}": f"127.0.0.1:{port}" for name, port in http.items()},
        }
        self.realm = realm
        site = Site(root, "hdfs://pair", settings, {}, realm)
        self._site, self._root = site, root
        (root / "shared").mkdir()
        self.daemons: dict[str, Daemon] = {}
        self.datanodes: list[Daemon] = []
        self._admins: dict[str, RpcClient] = {}
        for name, port in ports.items():
            site.configure(name, {"dfs.ha.namenode.id": name, "dfs.namenode.name.dir": f"file://{root}/nn-{name}"})
            self.daemons[name] = Daemon(name, site.argv(name, NAMENODE, heap_mb=256), root / "logs")
            protocol = "org.apache.hadoop.ha.HAServiceProtocol"
            self._admins[name] = RpcClient([("127.0.0.1", port)], protocol, user=login_user()[0])
        self.conf = root / "conf/a"
        format_ = site.argv("a", NAMENODE, heap_mb=256, args=["-format", "-force", "-nonInteractive"])
        subprocess.run(format_, check=True, capture_output=True, timeout=60)
        shutil.copytree(root / "nn-a", root / "nn-b")

    def change(self, name: str, state: str, *, deadline: float = 60.0) -> None:
        """``state``: Active or Standby. A NameNode that starts does not answer yet, or says that it cannot."""
        until = time.monotonic() + deadline
        while True:
            try:
                admin = self._admins[name]
                admin.call(f"transitionTo{state}", _Request(), wire.Empty, f"make {name} {state}", deadline=10.0)
                return
            except BootseerError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def start_datanodes(self) -> None:
        for i, port in enumerate(free_ports("127.0.0.1", 2)):
            own = {key: "127.0.0.1:0" for key in ("dfs.datanode.ipc.address", "dfs.datanode.http.address")}
            name, own["dfs.datanode.data.dir"] = f"datanode-{i}", f"file://{self._root}/dn{i}"
            self._site.configure(
                name, {**own, "dfs.datanode.address": f"127.0.0.1:{port}", "dfs.datanode.hostname": "127.0.0.1"}
            )
            self.datanodes.append(Daemon(name, self._site.argv(name, DATANODE, heap_mb=128), self._root / "logs"))
            self.datanodes[-1].start()

    def stop(self) -> None:
        for daemon in (*self.daemons.values(), *self.datanodes):
            daemon.kill()
        for admin in self._admins.values():
            admin.close()


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.kerberos)], ids=["open", "kerberos"]
)
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("ha")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        realm = Realm() if request.param else None
        if realm:
            stack.callback(realm.stop)
            realm.start(root / "realm", root / "conf/a")
            stack.enter_context(realm.login("hdfs"))
        made = Pair(root, realm)
        stack.callback(made.stop)
        for daemon in made.daemons.values():
            daemon.start()
        yield made


@pytest.fixture
def node(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> NameNode:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(pair.conf))
    return NameNode.connect("hdfs://pair/a")


def during(change: Callable[[], None], node: NameNode, folder: str) -> None:
    """Files are made, renamed and removed while ``change`` runs in another thread, and each has its outcome once."""
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            change()
        except BaseException as exc:
            wrong.append(exc)

    thread = threading.Thread(target=work)
    kept, after = set(), 0
    for i in itertools.count():
        path = f"{folder}/{i}"
        file_id = node.create(path, replication=1, deadline=60.0).file_id
        node.rename(path, f"{path}.r", deadline=60.0)
        assert node.complete(f"{path}.r", file_id, None, deadline=60.0)
        if i % 2:
            assert node.delete(f"{path}.r", deadline=60.0)
        else:
            kept.add(f"{path}.r")
        if i == 5:
            thread.start()
        after += i > 5 and not thread.is_alive()
        if after > 5:
            break
    thread.join(60)
    assert wrong == []
    assert {entry.path for entry in node.list(folder)} == kept


def test_failovers_are_not_seen(pair, node):
    for name in pair.daemons:
        pair.change(name, "Standby")  # waits for its start
    until = time.monotonic() + 60
    while True:
        with pytest.raises(UnavailableError) as caught:
            node.info("/", deadline=1.0)
        if "no active NameNode" in str(caught.value):  # else a busy machine: neither has answered in this second
            break
        assert time.monotonic() < until
    assert "hdfs://pair: StandbyException" in str(caught.value)
    pair.change("b", "Active")  # the second of the list
    node.mkdirs("/polite")

    def polite() -> None:
        pair.change("b", "Standby")
        time.sleep(0.5)
        pair.change("a", "Active")

    during(polite, node, "/polite")
    if pair.realm is None:  # hdfs-native finds it too; with Kerberos it gets no answer within 30 s
        assert not hdfs.connect("hdfs://pair").delete("/nothing")

    def death() -> None:
        pair.daemons["a"].kill()
        time.sleep(0.5)
        pair.change("b", "Active")

    node.mkdirs("/death")
    during(death, node, "/death")
    assert len(node.list("/polite")) >= 3


def test_bytes_are_right_over_failovers(pair, node):
    """Files are written and read while the other NameNode becomes the active one, politely and by death."""
    pair.daemons["a"].kill()
    pair.daemons["a"].start()
    pair.change("a", "Standby")
    pair.change("b", "Active")
    pair.start_datanodes()
    fs, data = open_fs("hdfs://pair/bytes"), os.urandom(5 << 20)
    node.mkdirs("/bytes", deadline=60.0)

    def save(name: str) -> None:
        with fs.create(name) as out:
            for at in range(0, len(data), 1 << 20):
                out.write(data[at : at + (1 << 20)])
                time.sleep(0.05)

    def right(name: str) -> None:
        back = bytearray(len(data))
        open_fs("hdfs://pair/bytes").open(name).readinto(0, memoryview(back))
        assert back == data

    until = time.monotonic() + 60
    while True:  # the DataNodes register
        try:
            save("first")
            break
        except BootseerError:
            assert time.monotonic() < until
            time.sleep(0.5)

    def polite() -> None:
        pair.change("b", "Standby")
        pair.change("a", "Active")

    def death() -> None:
        pair.daemons["a"].kill()
        pair.change("b", "Active")

    for change in (polite, death):
        thread = threading.Thread(target=change)
        for i in itertools.count():
            if i == 1:
                thread.start()
            save(f"{change.__name__}-{i}")
            right("first")
            right(f"{change.__name__}-{i}")
            if i > 1 and not thread.is_alive():
                break
        thread.join()


def test_an_observer_is_passed_over(pair, node):
    """It may be behind: what is read is what the active NameNode has, whichever is asked first."""
    pair.daemons["a"].start()
    for name, state in (("a", "Standby"), ("b", "Active"), ("a", "Observer")):
        pair.change(name, state)
    for i in range(3):
        node.mkdirs(f"/observed/{i}", deadline=60.0)
        fresh = NameNode(nameservice.addresses("pair"), login_user()[0], name="hdfs://pair")  # begins with the first
        assert len(fresh.list("/observed")) == i + 1
        assert fresh.info(f"/observed/{i}").is_dir
        fresh.close()
