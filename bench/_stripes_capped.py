"""The part of bench/stripefs with limited links: 4 DataNodes, and a fifth from the moment erasure coding needs it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from pathlib import Path

from _stripes_client import Answer
from _stripes_faults import Faults
from _stripes_run import Runner, say
from bootseer import hdfs
from bootseer.errors import BootseerError
from bootseer.report import Report
from bootseer.testing.replicas import Replicas
from bootseer.testing.shapedhdfs import ShapedHadoop

CAP = 60.0
"""MiB/s of each DataNode's link, in each direction."""
POLICY = "RS-3-2-1024k"
FIFTH = 4
PARTS = ("writes", "scan", "reads")
NATIVE = {"BOOTSEER_HDFS_ACCESS": "native"}
AWAY, BESIDE = 0, 1
"""Clients: in a rack of its own, and in the rack of DataNode 0."""


class Capped:
    """``rounds``: how often each variant runs; ``scan``: widths and units (bytes) to try, and reads of each.

    ``brief``: Hadoop's client only where no other client is the baseline.
    """

    def __init__(
        self,
        work: Path,
        report: Report,
        content: Path,
        small: Path,
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
            clients=2,
            beside={BESIDE: 0},
            settings={"dfs.replication": "2"},
            later={FIFTH},
        )
        self._report, self._content, self._small = report, content, small
        self._rounds, self._scan_of, self._brief = rounds, scan, brief
        self._places = [node.argv([]) for node in self._site.network.clients]

    def run(self, parts: Collection[str]) -> None:
        """``parts``: those of `PARTS` to run."""
        with self._site:
            self._runner = Runner(self._report, "capped", self._site.cluster, self._content, self._places[AWAY])
            if "writes" in parts or "reads" in parts:
                self._writes(2, self._rounds if "writes" in parts else 1)
            if "scan" in parts:
                self._scan()
            if "reads" in parts:
                self._collide()
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

    def _write(self, way: str, folder: str, path: str, replication: int) -> Answer:
        return self._runner.client(self._runner.written(way, folder, path, replication=replication))

    def _stripes(self, folder: str) -> list[str]:
        return [entry.path for entry in hdfs.connect(self._site.cluster.url).list(f"{folder}/.bsx")]

    def _expect_replication(self, path: str, replication: int) -> None:
        for block in Replicas(self._site.cluster).blocks(path, replicas=replication):
            if len(block.holders) != replication:
                raise BootseerError(f"{path} has {len(block.holders)} replicas of a block, not {replication}")

    def _collide(self) -> None:
        """Files all of whose blocks have a replica on DataNode 0, which the NameNode names first to a client beside it.

        Such a client's own writes begin there, one after another, as it is the only DataNode in their rack. What went
        elsewhere nevertheless is moved there, as the balancer would.
        """
        run, place = self._runner, self._places[BESIDE]
        for way, path in (("native", "plain"), ("striped", "striped")):
            task = run.written(way, "/collide", path, replication=2)
            run.client(task, prefix=place, environ=NATIVE)

    def _gather(self) -> int:
        """Move to DataNode 0 what of the colliding files is not there. On how many DataNodes the stripes are then."""
        replicas, moved = Replicas(self._site.cluster), 0
        for path in ("/collide/plain", *self._stripes("/collide")):
            for block in replicas.blocks(path, replicas=2):
                if 0 not in (holders := replicas.holders(block)):
                    replicas.move(block, holders[0], 0)
                    moved += 1
        say(f"colliding files: every block has a replica on DataNode 0, {moved} were moved there")
        stripes = [block for path in self._stripes("/collide") for block in replicas.blocks(path, replicas=2)]
        return len({index for block in stripes for index in replicas.holders(block)})

    # -- reads ----------------------------------------------------------------------------------------------------

    def _reads(self) -> None:
        cluster, run = self._site.cluster, self._runner
        cluster.restart(FIFTH)
        cluster.wait_live(5)
        cluster.web.make_erasure_coded("/coded", POLICY)
        run.stock_write("/coded/plain", 1)
        spread = self._gather()
        beside = self._places[BESIDE]
        healthy: list[float] = []
        faults = Faults(self._site, run, run.task("striped", "/r2", "striped"))
        first = run.client(run.task("first-holders", "/collide", "striped"), prefix=beside).note
        plain: dict[str, Callable[[], Answer]] = {
            "hadoop-client": lambda: run.stock_read("/r2/plain"),
            "hdfs-native": lambda: run.client(run.task("native", "/r2", "plain")),
            "erasure-coded-hadoop-client": lambda: run.stock_read("/coded/plain"),
            "erasure-coded-hdfs-native": lambda: run.client(run.task("native", "/coded", "plain")),
            "colliding-hdfs-native": lambda: run.client(run.task("native", "/collide", "plain"), prefix=beside),
        }
        if self._brief:
            del plain["erasure-coded-hadoop-client"]
        for n in range(self._rounds):
            for variant, measure in plain.items():
                run.record(variant, measure)
            run.record(
                "colliding-striped",
                lambda: run.client(run.task("striped", "/collide", "striped"), prefix=beside),
                named_first=first,
                replicas_on=spread,
            )
            for _ in range(2):
                took = run.record("striped", lambda: run.client(run.task("striped", "/r2", "striped")))
                healthy += [] if took is None else [took]
            faults.round(n, statistics.median(healthy) if healthy else 2.0)

    def _scan(self) -> None:
        """Widths and units, each written anew and read some times, while replication is 2."""
        widths, units, reads = self._scan_of
        run = Runner(self._report, "capped", self._site.cluster, self._small, self._places[AWAY])
        for unit in units:
            for width in widths:
                name, shape = f"scan-{width}x{unit >> 10}KiB", {"width": width, "unit": unit}
                task = run.written("striped", "/scan", "striped", **shape)
                run.record(f"{name}-write", lambda task=task: run.client(task), **shape)  # type: ignore[misc]
                for _ in range(reads):
                    run.record(name, lambda: run.client(run.task("striped", "/scan", "striped")), **shape)
                run.remove("/scan")
