"""The part of bench/stripefs with Kerberos, on loopback: the same reads and writes on a cluster without it, with
authentication and with privacy (AES), in turns; and with authentication while a DataNode is frozen. The buffers of the
DataNodes are as large as docs/howto/hdfs.md tells a site to make them: with Hadoop's 4 KiB packets after a login are
as small."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.common.report import Report
from bench.stripes.runner import Runner
from support.hadoop import HadoopCluster
from support.kerberos import Realm

_REALMS: dict[str, Callable[[], Realm | None]] = {
    "unsecured": lambda: None,
    "authentication": Realm,
    "privacy": lambda: Realm(protection="privacy", rpc="privacy", aes=True),
}
_SETTINGS = {"dfs.replication": "2", "io.file.buffer.size": "131072"}
_FOLDER = "/user/alice"


def run(work: Path, report: Report, content: Path, *, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        runners: dict[str, tuple[Runner, dict[str, str]]] = {}
        for name, realm in _REALMS.items():
            known = realm()
            cluster = stack.enter_context(HadoopCluster(work / f"hdfs-{name}", 3, settings=_SETTINGS, kerberos=known))
            environ = known.environment("alice") if known else {}
            runners[name] = Runner(report, "secured", cluster, content), environ
        for number in range(-1, rounds):  # before the first that counts, DataNodes compile their Java
            for name, (runner, environ) in runners.items():
                _round(runner, environ, name if number >= 0 else f"warm-{name}", number)
            if number >= 0:  # beside the healthy round whose file it reads, not minutes later
                runner, environ = runners["authentication"]
                with _frozen(runner.cluster, number % 3):
                    _round(runner, environ, "frozen", number)


def _round(runner: Runner, environ: dict[str, str], name: str, number: int) -> None:
    """One write, then a read of it; with a frozen DataNode of what the healthy one of its round wrote."""
    path = f"{name}-{number}"
    written = runner.written("striped", _FOLDER, path)
    runner.record(f"write-{name}", lambda: runner.client(written, environ=environ))
    first = runner.task("striped", _FOLDER, f"authentication-{number}" if name == "frozen" else path)
    runner.record(f"read-{name}", lambda: runner.client(first, environ=environ))


@contextlib.contextmanager
def _frozen(cluster: HadoopCluster, index: int) -> Iterator[None]:
    cluster.datanodes[index].signal(signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.datanodes[index].signal(signal.SIGCONT)
        cluster.wait_live(3)
