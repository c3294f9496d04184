"""The part of bench/stripefs without limits: loopback, where the client's own work is what is measured.

And the DataNodes', on the same cores. One that has just started compiles its Java while it is read from, which one of
a real cluster has done long ago. So each way of reading but Hadoop's client goes a few times before it counts; what
DataNodes have compiled serves that too.
"""

from __future__ import annotations

from pathlib import Path

from bench.common.invocation import say
from bench.common.report import Report
from bench.stripes.runner import Runner
from bootseer.errors import BootseerError
from support.hadoop import HadoopCluster

_WARM = 2
"""Reads of each kind, before those that count, for each of these."""


def run(work: Path, report: Report, content: Path, *, rounds: int) -> None:
    with HadoopCluster(work / "hdfs", settings={"dfs.replication": "2"}) as cluster:
        runner = Runner(report, "free", cluster, content)
        runner.record("write-striped", lambda: runner.client(runner.written("striped", "/f", "striped")))
        runner.record(
            "write-hdfs-native", lambda: runner.client(runner.written("native", "/f", "plain", replication=2))
        )
        reads = [
            (variant, runner.task(way, "/f", path))
            for variant, way, path in (
                ("hdfs-native", "native", "plain"),
                ("hdfs-native-4-stripes", "stripes-native", "striped"),
                ("striped", "striped", "striped"),
            )
        ]
        for _ in range(_WARM * rounds):
            for variant, task in reads:
                try:
                    runner.client(task)
                except (BootseerError, OSError) as exc:
                    say(f"free:{variant}: failed before the runs that count: {exc}")
        again = runner.written("striped", "/f", "again")
        for _ in range(rounds):
            runner.record("write-striped", lambda: runner.client(again))
            runner.record("hadoop-client", lambda: runner.stock_read("/f/plain"))
            for variant, task in reads:
                runner.record(variant, lambda task=task: runner.client(task))  # type: ignore[misc]
