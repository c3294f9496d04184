"""The parts of bench/stripefs with Kerberos, on loopback: the same reads and writes on a cluster without it, with
authentication and with privacy (AES), in turns; and with authentication while a DataNode is frozen, beside the same
without. The buffers of the DataNodes are as large as docs/howto/hdfs.md tells a site to make them: with Hadoop's 4 KiB
packets after a login are as small."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
                _round(runner, environ, name if number >= 0 else f"warm-{name}", f"{name}-{number}")


def frozen(work: Path, report: Report, content: Path, *, rounds: int) -> None:
    """Of so many bytes that the seconds until a DataNode counts as frozen are a small part."""
    with HadoopCluster(work / "hdfs-frozen", 3, settings=_SETTINGS, kerberos=Realm()) as cluster:
        runner, environ = Runner(report, "secured", cluster, content), cluster.realm.environment("alice")
        for number in range(-1, rounds):
            _round(runner, environ, "healthy" if number >= 0 else "warm-healthy", "healthy")
            if number >= 0:
                with cluster.frozen(number % 3):
                    _round(runner, environ, "frozen", "frozen", read="healthy")
            with cluster.realm.login("alice"):
                for path in ("healthy", "frozen"):
                    runner.remove(f"{_FOLDER}/{path}")


def _round(runner: Runner, environ: dict[str, str], name: str, path: str, *, read: str = "") -> None:
    """One write of the file ``path``, then a read of it, or of another one: what lies on a frozen DataNode, too."""
    written = runner.written("striped", f"{_FOLDER}/{path}", "file")
    runner.record(f"write-{name}", lambda: runner.client(written, environ=environ))
    first = runner.task("striped", f"{_FOLDER}/{read or path}", "file")
    runner.record(f"read-{name}", lambda: runner.client(first, environ=environ))
