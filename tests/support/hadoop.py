"""A stock Hadoop HDFS on one machine: one NameNode and several DataNodes, each a JVM of its own.

Because every DataNode is a process, it can be frozen, killed, restarted, and put in its own network namespace. The jars
come from ``scripts/hadoop-jars``. Ready means that every DataNode has registered and a replicated write has succeeded.

The JVMs run in sessions of their own, so that Ctrl-C reaches only their owner, which stops them; and they die with
their owner (``PR_SET_PDEATHSIG``), so that not even SIGKILL leaves one behind.

    python -m support.hadoop start --root DIR [--bind ADDRESS] [--kerberos]
    python -m support.hadoop archive
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bootseer.errors import BootseerError, NotFoundError, UnavailableError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs.namenode import NameNode
from support.hadoopsite import Daemon, Site, archive, free_ports, jars
from support.kerberos import USERS, Realm
from support.waits import until
from support.webhdfs import WebHdfs

__all__ = ["Daemon", "HadoopCluster", "jars", "shared"]

_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_FETCH = "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_SHELL = "org.apache.hadoop.fs.FsShell"
_CRYPTO = "org.apache.hadoop.hdfs.tools.CryptoAdmin"
_INCOMPLETE = ("UnderReplicatedBlocks", "PendingReplicationBlocks", "CorruptBlocks")


class HadoopCluster:
    """Context manager: a running HDFS below the folder ``root``; stops it, and removes what it made there, at the end.

    ``bind``: the address NameNode and DataNodes listen on and advertise. ``datanode_hosts``: one address per DataNode
    instead; ``wrap(i)``: a command prefix for DataNode ``i`` (``nsenter ...``). ``settings``: more ``hdfs-site.xml``
    properties. ``racks``: the rack of an address, also of a client's. ``later``: DataNodes that only `restart` starts.
    ``keep``: leave the files at the end; a later cluster at the same root then has the same content. ``deadline``:
    seconds from start to ready. ``kerberos``: who uses it needs a ticket of this realm, which starts and stops with it.

    DataNodes are numbered from 0; ``addresses`` has ``host:port`` of the data transfers of each. ``web`` is the
    NameNode over HTTP.
    """

    namenode: Daemon
    web: WebHdfs
    addresses: list[str]
    _site: Site

    def __init__(
        self,
        root: Path,
        datanodes: int = 4,
        bind: str = "127.0.0.1",
        *,
        datanode_hosts: Sequence[str] | None = None,
        wrap: Callable[[int], Sequence[str]] | None = None,
        settings: Mapping[str, str] | None = None,
        racks: Mapping[str, str] | None = None,
        later: Collection[int] = (),
        keep: bool = False,
        deadline: float = 90.0,
        kerberos: Realm | None = None,
    ) -> None:
        jars()  # says what is missing before anything is made
        self.root = root.absolute()
        self.bind, self.keep, self.deadline = bind, keep, deadline
        self._hosts = list(datanode_hosts or [bind] * datanodes)
        self._wrap, self._later = wrap, set(later)
        self._settings, self._racks = dict(settings or {}), dict(racks or {})
        self._made_root, self._realm = False, kerberos
        self.datanodes: list[Daemon] = []

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> HadoopCluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Format (unless there is a file system already), start, and wait until ready.

        Raises `UnavailableError` with each daemon's last log line when that takes longer than the deadline.
        """
        end = time.monotonic() + self.deadline
        try:
            self._prepare()
            self._format(end)
            for daemon in self._wanted():
                daemon.start()
            self._wait_ready(end)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill every JVM, wait for it, remove the files (unless ``keep``). May be called twice."""
        for daemon in (*self.datanodes, *([self.namenode] if hasattr(self, "namenode") else [])):
            daemon.kill()
        if self._realm:
            self._realm.stop()
        if not self.keep and self._made_root:
            for name in ("conf", "webapps", "logs", "nn", "realm", *(f"dn{i}" for i in range(len(self._hosts)))):
                shutil.rmtree(self.root / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.root.rmdir()

    def _wanted(self) -> list[Daemon]:
        return [self.namenode, *(daemon for i, daemon in enumerate(self.datanodes) if i not in self._later)]

    def _prepare(self) -> None:
        self._made_root = True
        rpc, http = free_ports(self.bind, 2)
        # the name that its ticket is for; by its address it is found just as well
        self.url = f"hdfs://{'localhost' if self._realm else self.bind}:{rpc}"
        self.web = WebHdfs(f"http://{self.bind}:{http}")
        self._site = site = Site(self.root, self.url, self._settings, self._racks, self._realm)
        if self._realm:
            self._realm.start(self.root / "realm", self.root / "conf/client")
        logs = self.root / "logs"
        self._namenode_settings = namenode = {
            "dfs.namenode.rpc-address": f"{self.bind}:{rpc}",
            "dfs.namenode.http-address": f"{self.bind}:{http}",
            "dfs.namenode.name.dir": f"file://{self.root}/nn",
        }
        site.configure("namenode", namenode)
        site.configure("client", {}, level="WARN")
        self.namenode = Daemon("namenode", site.argv("namenode", _NAMENODE, heap_mb=256), logs)
        self.datanodes = []
        count = len(self._hosts)
        # fixed: a restarted DataNode must be found where it was; on a host of its own the usual port is free
        ports = free_ports(self.bind, count) if set(self._hosts) == {self.bind} else [9866] * count
        self.addresses = [f"{host}:{port}" for host, port in zip(self._hosts, ports, strict=True)]
        for i, host in enumerate(self._hosts):
            name = f"datanode-{i}"
            own = {
                "dfs.datanode.data.dir": f"file://{self.root}/dn{i}",
                "dfs.datanode.address": self.addresses[i],
                "dfs.datanode.ipc.address": f"{host}:0",
                "dfs.datanode.http.address": f"{host}:0",
                "dfs.datanode.hostname": host,
            }
            site.configure(name, {**namenode, **own})
            prefix = list(self._wrap(i)) if self._wrap else []
            self.datanodes.append(Daemon(name, [*prefix, *site.argv(name, _DATANODE, heap_mb=128)], logs))

    def _format(self, end: float) -> None:
        # once for each owner of its root folder, and copied since: a JVM less for each cluster
        files, made = self.root / "nn", jars() / f"formatted-by-{USERS[0] if self._realm else getpass.getuser()}"
        if (files / "current" / "VERSION").exists():
            return
        if made.exists():
            shutil.copytree(made, files)
            return
        argv = [*self.namenode.argv, "-format", "-force", "-nonInteractive"]
        with open(self.namenode.log, "ab") as log:
            try:
                done = subprocess.run(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=max(end - time.monotonic(), 1)
                )
            except subprocess.TimeoutExpired:
                raise UnavailableError(f"formatting the NameNode took longer than {self.deadline:.0f} s") from None
        if done.returncode:
            raise BootseerError(f"the NameNode could not be formatted: {self.namenode.last_line()}")
        with tempfile.TemporaryDirectory(dir=made.parent) as folder, contextlib.suppress(OSError):  # another made it
            shutil.copytree(files, Path(folder, "nn")).rename(made)

    def _wait_ready(self, end: float) -> None:
        problem = "not started"
        while time.monotonic() < end:
            for daemon in (wanted := self._wanted()):
                if not daemon.alive():
                    raise BootseerError(f"{daemon.name} ended: {daemon.last_line()}")
            try:
                if (live := self.web.live_datanodes()) < len(wanted) - 1:
                    problem = f"{live} of {len(wanted) - 1} DataNodes registered"
                else:
                    self._write_probe()
                    return
            except (BootseerError, OSError, ValueError) as exc:
                problem = str(exc)
            time.sleep(0.2)
        last = "; ".join(f"{daemon.name}: {daemon.last_line()}" for daemon in self._wanted())
        raise UnavailableError(f"HDFS was not ready within {self.deadline:.0f} s ({problem}); last log lines: {last}")

    @property
    def realm(self) -> Realm:
        assert self._realm is not None, "a cluster without Kerberos"
        return self._realm

    def _write_probe(self) -> None:
        if self._realm:
            with self._realm.login("hdfs"):
                self._write()
                namenode = NameNode.connect(self.url)
                for user in USERS[1:]:
                    namenode.mkdirs(f"/user/{user}")
                    namenode.set_owner(f"/user/{user}", user, None)
                    namenode.set_permission(f"/user/{user}", 0o700)
        else:
            self._write()

    def _write(self) -> None:
        client = hdfs.HdfsClient(self.url)
        with client.create("/.ready", overwrite=True, replication=min(3, len(self._wanted()) - 1)) as out:
            out.write(b"ready")
        client.delete("/.ready")

    # -- faults ---------------------------------------------------------------------------------------------------

    def wait_live(self, count: int, *, deadline: float = 60.0) -> None:
        """Wait until exactly ``count`` DataNodes are alive in the NameNode's eyes."""
        until(lambda: self.web.live_datanodes() == count, deadline, f"the life of {count} DataNodes", step=0.2)

    def wait_whole(self, *, deadline: float = 60.0) -> None:
        """Wait until every block of a finished file has its replicas, and none is known to be damaged.

        What comes before a second fault: HDFS copies in its own time what the first one took.
        """

        def whole() -> bool:
            state = self.web.bean("FSNamesystem")
            return not any(state.get(name, 1) for name in _INCOMPLETE)

        until(whole, deadline, "the last copy of a block", step=0.1)

    def index_of(self, address: str) -> int:
        """Which DataNode listens at ``address`` (``host:port`` of its data transfers)."""
        return self.addresses.index(address)

    def pause(self, index: int) -> None:
        """Freeze DataNode ``index``: it keeps its connections and answers nothing."""
        self.datanodes[index].signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        self.datanodes[index].signal(signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self, *indices: int) -> Iterator[None]:
        """These DataNodes answer nothing inside; afterwards all are alive in the NameNode's eyes again."""
        try:
            for index in indices:
                self.pause(index)
            yield
        finally:
            for index in indices:
                self.resume(index)
            self.wait_live(sum(daemon.alive() for daemon in self.datanodes))

    def kill(self, index: int) -> None:
        self.datanodes[index].kill()

    def restart(self, index: int) -> None:
        """Kill DataNode ``index``, start it on the same data and port, wait until it has reported its blocks."""
        daemon = self.datanodes[index]
        daemon.kill()
        self._later.discard(index)
        seen = daemon.log.stat().st_size if daemon.log.exists() else 0
        daemon.start()

        # the NameNode's count says nothing: it takes 14 s to see that a DataNode is gone
        def reported() -> bool:
            return b"Successfully sent block report" in daemon.log.read_bytes()[seen:]

        self._wait_back(daemon, reported)

    @contextlib.contextmanager
    def frozen_namenode(self) -> Iterator[None]:
        """The NameNode keeps its connections and answers nothing inside; afterwards it knows its DataNodes again."""
        self.namenode.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.namenode.signal(signal.SIGCONT)
            self.wait_live(sum(daemon.alive() for daemon in self.datanodes))

    def kill_namenode(self) -> None:
        self.namenode.kill()

    def restart_namenode(self, *, settings: Mapping[str, str] | None = None) -> None:
        """Kill the NameNode, start it at the same port, wait until its DataNodes have reported and it takes writes.

        ``settings``: more properties for the NameNode alone, such as another ``dfs.replication``.
        """
        self.namenode.kill()
        if settings:
            self._namenode_settings = {**self._namenode_settings, **settings}
            self._site.configure("namenode", self._namenode_settings)
        self.namenode.start()
        running = sum(daemon.alive() for daemon in self.datanodes)

        # alive is who has registered; room on it is known, and blocks go there, since its first heartbeat
        def ready() -> bool:
            return self.web.datanodes_with_room() >= running and not self.web.safe_mode()

        self._wait_back(self.namenode, ready)

    def _wait_back(self, daemon: Daemon, ready: Callable[[], bool]) -> None:
        def back() -> bool:
            if not daemon.alive():
                raise BootseerError(f"{daemon.name} did not come back: {daemon.last_line()}")
            return ready()

        until(back, 60.0, f"the return of {daemon.name}", step=0.1)

    def token(self, file: Path, user: str = "alice") -> Path:
        """A delegation token of ``user`` in ``file``, as Hadoop's own program fetches it."""
        self._fetcher(user, "--renewer", user, f"file://{file}")
        return file

    def cancel(self, file: Path, user: str = "alice") -> None:
        """The token in ``file`` counts no longer."""
        self._fetcher(user, "--cancel", f"file://{file}")

    def _fetcher(self, user: str, *args: str) -> None:
        with self.realm.login(user):
            argv = self._site.argv("client", _FETCH, heap_mb=256, args=args)
            subprocess.run(argv, check=True, capture_output=True, timeout=60)

    def make_encrypted(self, folder: str, key: str) -> None:
        """The empty ``folder`` is an encryption zone with the ``key`` of the cluster's key server."""
        args = ["-createZone", "-keyName", key, "-path", folder]
        self._run(self._site.argv("client", _CRYPTO, heap_mb=256, args=args), f"crypto {' '.join(args)}")

    # -- the stock client -----------------------------------------------------------------------------------------

    def shell_argv(self, args: Sequence[str]) -> list[str]:
        """The command line of Hadoop's own client: ``shell_argv(["-get", "/a", "b"])`` is ``hdfs dfs -get /a b``."""
        return self._site.argv("client", _SHELL, heap_mb=256, args=args)

    def fs_shell(self, args: Sequence[str]) -> str:
        """Run Hadoop's own client and return what it prints.

        Raises `NotFoundError` for a missing path, `BootseerError` for other failures.
        """
        return self._run(self.shell_argv(args), f"dfs {' '.join(args)}")

    def _run(self, argv: Sequence[str], what: str) -> str:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            kind = NotFoundError if "No such file" in last else BootseerError
            raise kind(f"hdfs {what} failed: {last}")
        return done.stdout


class _Archived(HadoopCluster):
    """One that leaves an `archive` of each kind of daemon."""

    def _prepare(self) -> None:
        super()._prepare()
        for daemon, main in ((self.namenode, _NAMENODE), (self.datanodes[0], _DATANODE)):
            daemon.argv = [word for word in daemon.argv if "SharedArchiveFile" not in word]
            daemon.argv.insert(1, f"-XX:ArchiveClassesAtExit={archive(main)}.new")

    def keep_classes(self) -> None:
        for daemon, main in ((self.datanodes[0], _DATANODE), (self.namenode, _NAMENODE)):
            daemon.end()
            Path(f"{archive(main)}.new").replace(archive(main))


EVEN = {"dfs.namenode.redundancy.considerLoad": "false"}
"""For tests of where blocks lie: else they pass over a DataNode that a busy machine has made late."""

_shared: list[HadoopCluster] = []


def shared() -> HadoopCluster:
    """One cluster of 4 DataNodes for the whole process, started at the first call and stopped when the process ends.

    For test suites: who freezes or kills a DataNode brings it back.
    """
    if not _shared:
        cluster = HadoopCluster(Path(tempfile.mkdtemp(prefix="bootseer-hdfs-", dir="/var/tmp")), settings=EVEN)
        atexit.register(cluster.stop)
        cluster.start()
        _shared.append(cluster)
    return _shared[0]


def _main(argv: Sequence[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m support.hadoop", description="A stock HDFS for trying")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("archive", help="make each later start of a daemon quicker")
    verb = verbs.add_parser("start", help="run until Ctrl-C or SIGTERM")
    verb.add_argument("--root", type=Path, required=True, help="folder for its data and logs")
    verb.add_argument("--bind", default="127.0.0.1", help="address to listen on and to advertise")
    verb.add_argument("--datanodes", type=int, default=4)
    verb.add_argument("--keep", action="store_true", help="leave the data at the end")
    verb.add_argument("--kerberos", action="store_true", help="who uses it needs a ticket")
    levels = ["authentication", "integrity", "privacy"]
    verb.add_argument("--protection", choices=[*levels, ""], default=levels[0], help="dfs.data.transfer.protection")
    verb.add_argument("--rpc", choices=levels, default=levels[0], help="hadoop.rpc.protection")
    verb.add_argument("--encrypt", action="store_true", help="dfs.encrypt.data.transfer")
    verb.add_argument("--aes", action="store_true", help="privacy and encryption with AES")
    options = parser.parse_args(argv)
    if options.verb == "archive":
        with tempfile.TemporaryDirectory() as folder, (made := _Archived(Path(folder, "root"), 1)):
            made.keep_classes()
        return 0
    realm = None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if options.kerberos:
            known = {name: getattr(options, name) for name in ("protection", "rpc", "encrypt", "aes")}
            realm = Realm(**known)
        with HadoopCluster(options.root, options.datanodes, options.bind, keep=options.keep, kerberos=realm) as cluster:
            told = {"url": cluster.url, "shell": cluster.shell_argv([])}
            if realm:
                (cluster.root / "realm/env.sh").write_text(realm.shell() + f"export HDFS={cluster.url}\n")
                told["env"] = f"{cluster.root}/realm/env.sh"
            print(json.dumps(told), flush=True)
            while all(daemon.alive() for daemon in (cluster.namenode, *cluster.datanodes)):
                time.sleep(0.5)
            print("a daemon ended; stopping", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        return 130
    except BootseerError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
