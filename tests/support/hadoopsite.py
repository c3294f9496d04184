"""Hadoop's jars, what its daemons read before they start, and one daemon as a process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from bootseer.errors import BootseerError, UnavailableError, UnsupportedError
from support import devcache
from support.waits import until

if TYPE_CHECKING:
    from support.kerberos import Realm

VERSION = "3.4.2"
# Hadoop's daemons and its client reflect on these packages, which Java 17 keeps closed
_OPENED = (
    "java.io java.lang java.lang.reflect java.math java.net java.text java.util java.util.concurrent java.util.zip "
    "sun.security.util sun.security.x509"
)


def jars() -> Path:
    """The folder of Hadoop's jars; `UnsupportedError` when ``scripts/hadoop-jars`` has not been run."""
    folder = devcache.folder(f"hadoop-{VERSION}")
    if not folder.is_dir():
        raise UnsupportedError(f"no Hadoop jars in {folder}", hint="run scripts/hadoop-jars")
    if not shutil.which("java"):
        raise UnsupportedError("java is not installed", hint="apt-get install openjdk-17-jre-headless")
    return folder


def archive(main: str) -> Path:
    """The classes that a daemon loads, as the JVM has them in memory: each start takes half the time with it. A JVM of
    another version passes it over."""
    return jars() / f"{main.rpartition('.')[2]}.jsa"


_LOG4J = """log4j.rootLogger={level},out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.target=System.err
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{{ISO8601}} %p %c{{1}}: %m%n
# says which replicas were reported as damaged
log4j.logger.BlockStateChange=DEBUG
"""
# quick to start, quick to notice a dead DataNode, small
_SETTINGS = {
    "dfs.namenode.safemode.extension": "0",
    "dfs.heartbeat.interval": "1",
    "dfs.namenode.heartbeat.recheck-interval": "2000",
    "dfs.namenode.redundancy.interval.seconds": "1s",
    "dfs.namenode.fs-limits.min-block-size": "4096",
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    "dfs.permissions.enabled": "false",
    # all DataNodes share one disk: do not hold back space on it for each
    "dfs.datanode.du.reserved": "0",
    "dfs.namenode.resource.du.reserved": "1048576",
    "dfs.client.use.datanode.hostname": "false",
    # a DataNode reads its own blocks in the background: it would find, and mend, what a test damages
    "dfs.block.scanner.volume.bytes.per.second": "0",
}


_PORTS = range(15_000, 32_000)
"""Below those that Linux gives to outgoing connections and to who asks for any port (ip_local_port_range): a JVM takes
its port seconds after it was chosen, and again at each restart."""


def free_ports(address: str, count: int) -> list[int]:
    """Ports that nobody listens on at ``address`` now. Raises `UnavailableError` when there are too few."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                return found
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind((address, port))
                found.append(port)
    raise UnavailableError(f"fewer than {count} ports from {_PORTS[0]} to {_PORTS[-1]} are free at {address}")


class Site:
    """The configuration below ``root`` of one cluster whose file system is ``url``; ``settings``: those of all daemons.

    ``racks``: rack of an address (``{"10.0.0.1": "/a"}``), others are in ``/default-rack``. ``realm``: who says who one
    is, None for nobody.
    """

    def __init__(
        self, root: Path, url: str, settings: Mapping[str, str], racks: Mapping[str, str], realm: Realm | None = None
    ) -> None:
        self.root, self.url, self._jars, self._realm = root, url, jars(), realm
        self._own = settings
        self._core = {"fs.defaultFS": url}
        # the daemons refuse to start without these folders, which Hadoop's jars lack
        for name in ("hdfs", "datanode", "static", "secondary"):
            (root / "webapps" / name).mkdir(parents=True, exist_ok=True)
        (root / "logs").mkdir(exist_ok=True)
        (root / "conf").mkdir(exist_ok=True)
        if racks:
            table = root / "conf/racks"
            table.write_text("".join(f"{address} {rack}\n" for address, rack in racks.items()))
            self._core |= {
                "net.topology.node.switch.mapping.impl": "org.apache.hadoop.net.TableMapping",
                "net.topology.table.file.name": str(table),
            }

    def configure(self, name: str, settings: Mapping[str, str], *, level: str = "INFO") -> None:
        """Write the folder of the daemon ``name``; its own ``settings`` go before those of all."""
        folder = self.root / "conf" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log4j.properties").write_text(_LOG4J.format(level=level))
        core = {**self._core, **(self._realm.core() if self._realm else {}), "hadoop.tmp.dir": f"{folder}/tmp"}
        secured = self._realm.settings() if self._realm else {}
        hdfs = {**_SETTINGS, **secured, **self._own, **settings}
        for file, values in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
            rows = "".join(
                f"<property><name>{escape(key)}</name><value>{escape(value)}</value></property>\n"
                for key, value in values.items()
            )
            (folder / file).write_text(f"<configuration>\n{rows}</configuration>\n")

    def argv(self, name: str, main: str, *, heap_mb: int, args: Sequence[str] = ()) -> list[str]:
        """The command line of the class ``main`` with the configuration of ``name``."""
        classpath = [f"{self._jars}/*", str(self.root / "conf" / name), str(self.root)]  # jars first, as in the archive
        tmp = self.root / "conf" / name / "tmp"  # what a web server unpacks stays behind when it is killed
        tmp.mkdir(parents=True, exist_ok=True)
        options = [f"-Djava.io.tmpdir={tmp}", "-XX:+UseSerialGC", f"-Xmx{heap_mb}m"]
        options += [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED.split()]
        options += self._realm.java() if self._realm else []
        # what is no daemon loads much of what a DataNode does
        if classes := next(filter(Path.exists, (archive(main), archive("DataNode"))), None):
            options.append(f"-XX:SharedArchiveFile={classes}")
        return ["java", *options, "-cp", ":".join(classpath), main, *args]


class Daemon:
    """One JVM. ``name`` is ``namenode`` or ``datanode-N``; its log is ``log``."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path) -> None:
        self.name, self.argv = name, list(argv)
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BootseerError(f"{self.name} is not running")
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.alive():
            return
        argv = self.argv
        # the signal comes when the starting *thread* ends, so only the main thread may ask for it
        if shutil.which("setpriv") and threading.current_thread() is threading.main_thread():
            argv = ["setpriv", "--pdeathsig", "KILL", *argv]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.log.parent
            )

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            os.killpg(self.pid, number)
            if number == signal.SIGSTOP:  # its threads run on until each has seen it
                until(self._stopped, 30, f"stop of {self.log.name}", step=0.005)

    def _stopped(self) -> bool:
        states = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError):  # a thread that ended
                states.append(path.read_text().rpartition(")")[2].split()[0])
        return all(state in "TZX" for state in states)

    def end(self) -> None:
        """SIGTERM, and wait until it is gone."""
        if self._process is not None and self.alive():
            self._process.terminate()
            self._process.wait(timeout=60)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
            self._process = None

    def last_line(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "(no output)"
