"""Starts of one job on many nodes of an emulated cluster: ordinary, with the strongest other tools, with bootseer.

    scripts/bench cluster [--nodes 8] [--scenario NAME|FILE]... [--rate MBIT] [--runs 3] [--quick] [--out report.json]

Each node is a network and a mount namespace with a link of its own rate, a node cache, state and a containerd;
registry, package index and four DataNodes have such links, too. A start is over when the last node has ended its first
step; its overhead is the seconds until then minus those of ``local``, the same start on the same nodes with image,
environment and checkpoint already on them. The bound of a start is the larger of ``local`` and what the links need.
``cpu_seconds`` are of the whole machine: where they come near cores x seconds, the cores and not the links decide.

``ordinary``: containerd pulls, pip installs, Hadoop's client copies. ``strongest``: nydus with a prefetch table (or
containerd where it is not built), uv with a full cache that all nodes share at no cost, hdfs-native. ``first`` and
``again``: bootseer, knowing nothing of the job and after it has started before; ``first-uv``: the former with uv as
``strongest`` has it. Scenarios are files of bench/cluster/scenarios.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import msgspec
import numpy

from bench.cluster import started
from bench.cluster.figures import compute
from bench.cluster.scenario import Scenario, load, names, of_sizes
from bench.cluster.site import DATANODES, WORKLOAD, Cluster, cache
from bench.common import invocation, ordinary
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bench.demo import strongest
from bench.demo.full import forget_image, forget_starts
from bench.demo.ingredients import Ingredients
from bench.demo.strongest import USES_UV
from bootseer.demo import starts, workplace
from bootseer.demo.ingredients import SETTINGS
from bootseer.demo.programs import BOOTSEER
from bootseer.demo.starts import Measured
from bootseer.errors import BootseerError, ConfigError, DataError

PROGRAMS = {
    "ordinary": ordinary.PROGRAM,
    "local": ordinary.PROGRAM,
    "strongest": strongest.PROGRAM,
    "strict": (*started.STARTED, started.STRICT),
}
"""What is run as bootseer by starts that are not ours, or not with all of it."""
STAGES = ("image", "env", "init")
_SETTLE_SECONDS = 300.0
_LOOK_SECONDS = 0.02
_OWN_MOUNTS = ("unshare", "--mount", "--propagation", "private", "--")
"""Begins the command line of a node: what it mounts is not in the containers of others, which would keep it in use."""
_BEFORE = Scenario(about="A start that is not measured")


class Fleet:
    """The starts of one bench with one kind of store; `scenario` adds its runs to the report."""

    def __init__(self, cluster: Cluster, work: Path, report: Report, rounds: int, way: str) -> None:
        self.cluster, self.work, self.report, self.rounds, self.way = cluster, work, report, rounds, way
        self.site = msgspec.structs.replace(cluster.site, store=cluster.store(way))
        self._known = False
        self._there: set[str] = set()
        """Whose nodes have what their start before has left on them."""

    def scenario(self, scenario: Scenario) -> None:
        for number in range(1, self.rounds + 1):
            for variant in scenario.variants if number % 2 else reversed(scenario.variants):
                self._note(variant, scenario, number)
                if variant == "ordinary":  # containerd has the image now
                    self._note("local", scenario, number)

    def _note(self, variant: str, scenario: Scenario, number: int) -> None:
        try:
            self._prepare(variant, scenario)
            made = self._fleet(variant, scenario)
        except BootseerError as exc:
            made = Run(variant=variant, n=number, failed=str(exc))
        made.variant, made.n = f"{scenario.name}:{variant}", number
        self.report.runs.append(made)
        took = made.failed or f"{made.seconds} s, {made.details['cpu_seconds']} CPU seconds"
        say(f"{made.variant} {number}: {took}")

    def _prepare(self, variant: str, scenario: Scenario) -> None:
        """The starts that come before: one that makes the job known, and one whose nodes keep what it leaves there."""
        if variant in ("again", "strict") and not self._known:
            self._fleet("first", msgspec.structs.replace(_BEFORE, nodes=scenario.nodes))
        if variant == "local" and "ordinary" not in self._there:  # its image is containerd's
            self._fleet("ordinary", _BEFORE)
        if variant != "local" and scenario.kept and _way(variant) not in self._there:
            self._fleet(variant, _BEFORE)

    def _fleet(self, variant: str, scenario: Scenario) -> Run:
        """One start on all nodes at once."""
        if variant in ("first", "first-uv"):
            self._known = False
            forget_starts(self.site.store)
        nodes = range(scenario.nodes or len(self.cluster.nodes))
        for node in nodes if variant != "local" and not scenario.kept else ():
            self._clean(variant, node)
        os.sync()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.cluster.slow_node(scenario.slow_node))
            pool = stack.enter_context(ThreadPoolExecutor(len(nodes)))
            before, load = self.cluster.moved(), stack.enter_context(_Load())
            done = list(pool.map(lambda node: self._start(variant, scenario, node), nodes))
            moved = {name: count - before[name] for name, count in self.cluster.moved().items()}
        workplace.await_end(self.work / self.way / _way(variant), _SETTLE_SECONDS)
        self._there.add(_way(variant))
        self._known |= variant == "first"
        wanted = self.cluster.parts.reference_losses
        if not all(starts.same_losses(wanted, one.losses) for one in done):
            raise DataError(f"{variant}: a node's losses are not those of the run that wrote the checkpoint")
        return self._run(scenario, done, moved, load)

    def _start(self, variant: str, scenario: Scenario, number: int) -> Measured:
        node = self.cluster.nodes[number]
        site = msgspec.structs.replace(self.site, containerd=self.cluster.containerds[number])
        job = site.job(plain=_way(variant) != "bootseer", local=self.cluster.parts if variant == "local" else None)
        mix = self.cluster.mix if variant == "strongest" else None
        if variant in USES_UV:
            job = self.cluster.mix.job(job)
        environ = {
            **SETTINGS,
            **site.variables(),
            "BOOTSEER_REGISTRY_MIRRORS": self.cluster.mirrors(self.way),
            "BOOTSEER_NODES": str(scenario.nodes or len(self.cluster.nodes)),
            "BOOTSEER_NODE_RANK": str(number),
            "BOOTSEER_CYCLE": "1" if scenario.cycle == "hot" else "0",
            **(mix.variables() if mix else {}),
        }
        return starts.run(
            "start",
            job,
            self._place(variant, number),
            environ=environ,
            received=node.bytes_received,
            without="" if _way(variant) == "bootseer" else "all",
            node=node.name,
            prefix=node.argv(_OWN_MOUNTS),
            program=PROGRAMS.get(variant, BOOTSEER),
        )

    def _run(self, scenario: Scenario, done: list[Measured], moved: dict[str, int], load: _Load) -> Run:
        hot = scenario.cycle == "hot"
        seconds = [one.seconds - (one.record.stages["image"] if hot else 0.0) for one in done]
        ran = sum(str(one.record.env.get("how", "")).startswith("ran") for one in done)
        ready = [one.bytes_ready for one in done]
        hot_bytes = max(int(str(one.record.image.get("bytes_hot", 0))) for one in done)
        return Run(
            variant="",
            n=0,
            seconds=round(max(seconds), 3),
            bytes={name: moved[name] for name in ("registry", "mirror", "index", "datanodes")},
            stages={name: round(max(one.record.stages.get(name, 0.0) for one in done), 3) for name in STAGES},
            details={
                "nodes": [round(one, 3) for one in seconds],
                "cpu_seconds": round(load.cpu[-1] - load.cpu[0], 1),
                "stage_cpu": load.by_stage(done[0]) if len(done) == 1 else {},
                "links_seconds": round(self.cluster.bound(moved, ready), 3),
                "node_bytes": max(ready),
                "ready_bytes": ready,
                "checkpoint_bytes": median(_whole(one.record.checkpoint, "prefetch_done") for one in done),
                "image_bytes": median(_whole(one.record.image, "bytes_hot", "bytes_demand") for one in done),
                "median_stages": {
                    name: round(median(one.record.stages.get(name, 0.0) for one in done), 3) for name in STAGES
                },
                "rate_mbit": self.cluster.rate,
                "datanode_count": DATANODES,
                "hot_bytes": hot_bytes,
                "setup_runs": ran,
                "index_requests": moved["index_requests"],
                "strongest": self.cluster.strongest,
            },
        )

    def _place(self, variant: str, node: int) -> Path:
        return self.work / self.way / _way(variant) / f"n{node}"

    def _clean(self, variant: str, node: int) -> None:
        """The node has nothing of an earlier start of ``variant``."""
        shutil.rmtree(self._place(variant, node), ignore_errors=True)
        mix = self.cluster.mix if variant == "strongest" else None
        if variant == "ordinary" or (mix and mix.needs_containerd):
            forget_image(msgspec.structs.replace(self.cluster.site, containerd=self.cluster.containerds[node]))


def _way(variant: str) -> str:
    """Starts of these share what is on the nodes."""
    return "bootseer" if variant in ("first", "first-uv", "again", "strict") else variant


def _whole(told: Mapping[str, object], *names: str) -> int:
    return sum(int(str(told.get(name, 0))) for name in names)


class _Load(threading.Thread):
    """Processor seconds of the whole machine, looked at all the time until it is left."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.times, self.cpu = list[float](), list[float]()

    def __enter__(self) -> _Load:
        self._note()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()
        self._note()

    def run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._note()

    def _note(self) -> None:
        user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
        self.times.append(time.time())
        self.cpu.append((user + nice + system) / os.sysconf("SC_CLK_TCK"))

    def by_stage(self, alone: Measured) -> dict[str, float]:
        """What was used before the first stage and in each, of a start that had the machine for itself."""
        marks = [self.times[0], alone.report.started_ns / 1e9]
        for name in STAGES:
            marks.append(marks[-1] + alone.record.stages.get(name, 0.0))
        used = numpy.diff(numpy.interp(marks, self.times, self.cpu))
        return {name: round(float(one), 3) for name, one in zip(("before", *STAGES), used, strict=True)}


def _run(options: Options, report: Report) -> None:
    if not 2 <= (nodes := options.nodes or (3 if options.quick else 8)) <= 64:
        raise ConfigError("--nodes is none of 2 to 64")
    rate = options.rate or (100.0 if options.quick else 50.0)
    wanted = options.scenario or (["cold"] if options.quick else names())
    scenarios = [one for name in wanted for one in of_sizes(load(name), nodes)]
    place = cache()
    place.mkdir(parents=True, exist_ok=True)
    parts = Ingredients(WORKLOAD, place)
    with (
        workplace.session(place, lambda: parts.prepare(say)) as work,
        Cluster(
            parts,
            work,
            workplace.prefix(place),
            options.subnet,
            nodes=nodes,
            rate=rate,
            compared={variant for one in scenarios for variant in one.variants},
            say=say,
        ) as cluster,
    ):
        say(f"{nodes} nodes, {rate:g} Mbit/s each; strongest: {cluster.strongest}")
        fleets = {
            way: Fleet(cluster, work, report, options.runs, way)
            for way in dict.fromkeys(scenario.store for scenario in scenarios)
        }
        for scenario in scenarios:
            say(f"{scenario.name}: {scenario.about}")
            fleets[scenario.store].scenario(scenario)
            if options.out:
                report.write(options.out)  # what is measured stays, whatever comes


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    parser = invocation.parser("cluster", __doc__, quick="cold only, on three nodes, once", runs=(3, 1), append=True)
    parser.add_argument("--nodes", type=int, help="of the job (default 8, quick 3)")
    parser.add_argument("--scenario", action="append", metavar="NAME|FILE", help="default: all, quick: cold")
    parser.add_argument("--rate", type=float, help="of each link, Mbit/s (default 50, quick 100)")
    parser.add_argument("--subnet", default="10.86.0.0/24", help="a /24 network that is free on this machine")
    sys.exit(invocation.carry_out(parser, _run, compute))
