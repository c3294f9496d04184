"""What Hadoop's daemons read before they start: a folder of configuration for each, and a class path."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from bootseer.errors import UnavailableError
from bootseer.testing._jvm import jars, java_argv

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

    ``racks``: rack of an address (``{"10.0.0.1": "/a"}``), others are in ``/default-rack``.
    """

    def __init__(self, root: Path, url: str, settings: Mapping[str, str], racks: Mapping[str, str]) -> None:
        self.root, self.url, self._jars = root, url, str(jars())
        self._settings = {**_SETTINGS, **settings}
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
        core = {**self._core, "hadoop.tmp.dir": f"{folder}/tmp"}
        for file, values in (("core-site.xml", core), ("hdfs-site.xml", {**self._settings, **settings})):
            rows = "".join(
                f"<property><name>{escape(key)}</name><value>{escape(value)}</value></property>\n"
                for key, value in values.items()
            )
            (folder / file).write_text(f"<configuration>\n{rows}</configuration>\n")

    def argv(self, name: str, main: str, *, heap_mb: int, args: Sequence[str] = ()) -> list[str]:
        """The command line of the class ``main`` with the configuration of ``name``."""
        classpath = [str(self.root / "conf" / name), str(self.root), f"{self._jars}/*"]
        return [*java_argv(heap_mb, classpath), main, *args]
