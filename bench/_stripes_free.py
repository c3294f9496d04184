"""The part of bench/stripefs without limits: loopback, where the client's own work is what is measured."""

from __future__ import annotations

from pathlib import Path

from _stripes_run import Runner
from bootseer.report import Report
from bootseer.testing.hadoop import HadoopCluster


def run(work: Path, report: Report, content: Path, *, rounds: int) -> None:
    with HadoopCluster(work / "hdfs", settings={"dfs.replication": "2"}) as cluster:
        runner = Runner(report, "free", cluster, content)
        runner.record("write-striped", lambda: runner.client(runner.written("striped", "/f", "striped")))
        runner.record(
            "write-hdfs-native", lambda: runner.client(runner.written("native", "/f", "plain", replication=2))
        )
        for _ in range(rounds):
            runner.record("hadoop-client", lambda: runner.stock_read("/f/plain"))
            for variant, way, path in (
                ("hdfs-native", "native", "plain"),
                ("hdfs-native-4-stripes", "stripes-native", "striped"),
                ("striped", "striped", "striped"),
            ):
                task = runner.task(way, "/f", path)
                runner.record(variant, lambda task=task: runner.client(task))  # type: ignore[misc]
