"""The part of bench/stripefs with limited links: 4 DataNodes, and a fifth from the moment erasure coding needs it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec import structs

from bench.common.report import Report
from bench.stripes.client import Answer
from bench.stripes.faults import Faults
from bench.stripes.runner import Runner
from bootseer.errors import BootseerError
from bootseer.hdfs.namenode import NameNode
from support.replicas import Replicas
from support.shapedhdfs import ShapedHadoop

CAP = 60.0
"""MiB/s of each DataNode's link, in each direction."""
POLICY = "RS-3-2-1024k"
FIFTH = 4
SLOWED = "/slowed"
PARTS = ("writes", "faulty-writes", "scan", "reads", "placement")


class Capped:
    """``small`` and ``large``: what the scan and faulty writes are of, else ``content``. ``rounds``: how often each
    variant runs; ``scan``: widths and units (bytes) to try, and reads of each.

    ``brief``: Hadoop's client only where no other client is the baseline.
    """

    def __init__(
        self,
        work: Path,
        report: Report,
        content: Path,
        small: Path,
        large: Path,
        *,
        rounds: int,
        scan: tuple[list[int], list[int], int],
        brief: bool = False,
    ) -> None:
        self._site = ShapedHadoop(
            work / "hdfs",
            "bsfs",
            "10.78.0.0/24",
            datanodes=5,
            mib_per_s=CAP,
            clients=1,
            settings={"dfs.replication": "2"},
            later={FIFTH},
        )
        self._report, self._content, self._small, self._large = report, content, small, large
        self._rounds, self._scan_of, self._brief = rounds, scan, brief
        self._place = self._site.network.clients[0].argv([])

    def run(self, parts: Collection[str]) -> None:
        """``parts``: those of `PARTS` to run."""
        with self._site:
            self._runner = Runner(self._report, "capped", self._site.cluster, self._content, self._place)
            if "writes" in parts or "reads" in parts:
                self._writes(2, self._rounds if "writes" in parts else 1)
            if "faulty-writes" in parts:
                self._faulty_writes()
            if "scan" in parts:
                self._scan()
            if "placement" in parts:
                self._placement()
            if "writes" in parts:
                self._site.cluster.restart_namenode(settings={"dfs.replication": "1"})
                self._writes(1, self._rounds)
            if "reads" in parts:
                self._reads()

    # -- writes ---------------------------------------------------------------------------------------------------

    def _writes(self, replication: int, rounds: int) -> None:
        """Every way writes the content, round by round; the last files of replication 2 stay, to be read."""
        run, folder = self._runner, f"/r{replication}"
        suffix = "" if replication == 1 else "-replicated"
        stock = replication == 1 or not self._brief
        for _ in range(rounds):
            run.record(f"write-hdfs-native{suffix}", lambda: self._write("native", folder, "plain", replication))
            if stock:
                run.record(f"write-hadoop-client{suffix}", lambda: run.stock_write(f"{folder}/stock", replication))
            run.record(f"write-striped{suffix}", lambda: self._write("striped", folder, "striped", replication))
        for path in (f"{folder}/plain", *([f"{folder}/stock"] if stock else []), *self._stripes(folder)):
            self._expect_replication(path, replication)
        run.check(run.task("striped", folder, "striped"))
        run.remove(folder if replication == 1 else f"{folder}/stock")

    def _faulty_writes(self) -> None:
        """Round by round a write without a fault, with a slow DataNode and with a frozen one. With replication 2: one
        that has the only replica of a block must be waited for."""
        run = Runner(self._report, "capped", self._site.cluster, self._large, self._place)
        task = run.written("striped", SLOWED, "striped", replication=2)
        faults, healthy = Faults(self._site, run, task), list[float]()
        for n in range(self._rounds):
            took = run.record("write-healthy", lambda: run.client(task))
            run.remove(SLOWED)
            healthy += [] if took is None else [took]
            for name, disturbed in (("write-slow", faults.slowed), ("write-frozen", faults.frozen)):
                if disturbed(name, n % FIFTH, statistics.median(healthy) / 3) is not None:
                    run.check(run.task("striped", SLOWED, "striped"))
                run.remove(SLOWED)
            self._site.cluster.wait_live(FIFTH)

    def _placement(self) -> None:
        """Writes of replication 2 with and without what a client says of DataNodes, by turns; see `WITHOUT`."""
        run, folder = self._runner, "/placement"
        task = run.written("striped", folder, "striped", replication=2)
        healthy: list[float] = []
        for n in range(self._rounds):
            for without in ("", "choose") if n % 2 else ("choose", ""):
                name = f"write-without-{without}" if without else "write-with-choose"
                took = run.record(name, lambda without=without: run.client(structs.replace(task, without=without)))  # type: ignore[misc]
                healthy += [] if took is None else [took]
            after = statistics.median(healthy or [2.0]) / 3
            for fault, parts in (("slow", ("slow", "spare")), ("frozen", ("soon",))):
                for without in (parts[0], "", *parts[1:]) if n % 2 else ("", *parts):
                    name = f"{fault}-write-without-{without}" if without else f"{fault}-write-with-{parts[0]}"
                    faults = Faults(self._site, run, structs.replace(task, without=without))
                    (faults.slowed if fault == "slow" else faults.frozen)(name, n % FIFTH, after)
            self._site.cluster.wait_live(FIFTH)
        run.check(run.task("striped", folder, "striped"))
        run.remove(folder)

    def _write(self, way: str, folder: str, path: str, replication: int) -> Answer:
        return self._runner.client(self._runner.written(way, folder, path, replication=replication))

    def _stripes(self, folder: str) -> list[str]:
        return [entry.path for entry in NameNode.connect(self._site.cluster.url).list(f"{folder}/.bsx")]

    def _expect_replication(self, path: str, replication: int) -> None:
        for block in Replicas(self._site.cluster).blocks(path, replicas=replication):
            if len(block.holders) != replication:
                raise BootseerError(f"{path} has {len(block.holders)} replicas of a block, not {replication}")

    # -- reads ----------------------------------------------------------------------------------------------------

    def _reads(self) -> None:
        cluster, run = self._site.cluster, self._runner
        cluster.restart(FIFTH)
        cluster.wait_live(5)
        cluster.web.make_erasure_coded("/coded", POLICY)
        run.stock_write("/coded/plain", 1)
        healthy: list[float] = []
        faults = Faults(self._site, run, run.task("striped", "/r2", "striped"))
        plain: dict[str, Callable[[], Answer]] = {
            "hadoop-client": lambda: run.stock_read("/r2/plain"),
            "hdfs-native": lambda: run.client(run.task("native", "/r2", "plain")),
            "erasure-coded-hadoop-client": lambda: run.stock_read("/coded/plain"),
            "erasure-coded-hdfs-native": lambda: run.client(run.task("native", "/coded", "plain")),
        }
        if self._brief:
            del plain["erasure-coded-hadoop-client"]
        for n in range(self._rounds):
            for variant, measure in plain.items():
                run.record(variant, measure)
            for _ in range(2):
                took = run.record("striped", lambda: run.client(run.task("striped", "/r2", "striped")))
                healthy += [] if took is None else [took]
            faults.round(n, statistics.median(healthy) if healthy else 2.0)

    def _scan(self) -> None:
        """Widths and units, each written anew and read some times, while replication is 2."""
        widths, units, reads = self._scan_of
        run = Runner(self._report, "capped", self._site.cluster, self._small, self._place)
        for unit in units:
            for width in widths:
                name, shape = f"scan-{width}x{unit >> 10}KiB", {"width": width, "unit": unit}
                task = run.written("striped", "/scan", "striped", **shape)
                run.record(f"{name}-write", lambda task=task: run.client(task), **shape)  # type: ignore[misc]
                for _ in range(reads):
                    run.record(name, lambda: run.client(run.task("striped", "/scan", "striped")), **shape)
                run.remove("/scan")
