"""A job that starts on many nodes at once: what they wait for, and what leaves registry and package index.

    scripts/bench cluster [--quick] [--nodes 8] [--scenario bench/scenarios/cold.toml] [--rounds 3] [--out report.json]

An emulated cluster (`_cluster_site`) with real servers: a registry, a package index, HDFS. A scenario names the ways in
which the job is started in each round: ``local`` (image, environment and checkpoint are on every node), ``ordinary``
(containerd pulls, pip installs, Hadoop's client copies), ``first`` (bootseer, and nobody has started the job before),
``again`` (new nodes), ``restart`` (the same nodes) and ``replaced`` (the same nodes but one). A start has ended when
its last node is ready. **Overhead** is the seconds until then beyond those of the local start of the same round, which
has the same processors to share. The bound of a start is the larger of the local seconds and what the slowest of its
links needs for the bytes that it moved: a node's, or those of all DataNodes. Figures are medians over the rounds. --quick: 4 nodes, one round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

import _figures
import _rounds
from _cluster_site import DATANODES, Cluster, Fleet, Scenario, Way
from bootseer import report
from bootseer.demo import workplace
from bootseer.demo.ingredients import Ingredients
from bootseer.errors import ConfigError, PrivilegeError

SCENARIOS = Path(__file__).with_name("scenarios")


def _run(fleet: Fleet, variant: str, n: int) -> report.Run:
    seconds = [round(done.seconds, 3) for done in fleet.nodes]
    return report.Run(
        variant=variant,
        n=n,
        seconds=max(seconds),
        bytes={"node_max": max(done.bytes_ready for done in fleet.nodes), "host_sent": fleet.egress},
        stages=max(fleet.nodes, key=lambda done: done.seconds).record.stages,
        details={
            "nodes": seconds,
            "cpu_seconds": round(fleet.cpu, 1),
            "setup_runs": fleet.setup_runs,
            "index_requests": fleet.index_requests,
            "hot_bytes": max(int(str(done.record.image.get("bytes_hot", 0))) for done in fleet.nodes),
            "how": sorted({str(done.record.env.get("how", "")) for done in fleet.nodes}),
        },
    )


def _figures_of(document: report.Report, given: Scenario, nodes: int) -> None:
    by_way: dict[str, list[report.Run]] = {}
    for run in document.runs:
        by_way.setdefault(run.variant, []).append(run)

    def figure(name: str, target: str, ways: tuple[Way, ...], value: Callable[..., float]) -> None:
        if all(way in by_way for way in ways):
            values = [value(*runs) for runs in zip(*(by_way[way] for way in ways), strict=True)]
            document.figure(name, statistics.median(values), unit="ratio", target=target, n=len(values), of="median")

    def overhead(ours: report.Run, others: report.Run, local: report.Run) -> float:
        return (ours.seconds - local.seconds) / (others.seconds - local.seconds)

    def bound(run: report.Run, local: report.Run) -> float:
        moved = run.bytes["node_max"] * 8 / 1e6
        links = max(moved / given.node_mbit, nodes * moved / (DATANODES * given.datanode_mbit))
        return run.seconds / max(local.seconds, links)

    def spread(run: report.Run) -> float:
        healthy = run.details["nodes"][1 if given.slow_node < 1 else 0 :]
        return max(healthy) / statistics.median(healthy)

    figure("overhead_vs_ordinary", "<= 0.1", ("again", "ordinary", "local"), overhead)
    figure("first_overhead_vs_ordinary", "<= 0.5", ("first", "ordinary", "local"), overhead)
    figure("restart_overhead_vs_again", "<= 0.5", ("restart", "again", "local"), overhead)
    figure("replaced_vs_again", "<= 1.1", ("replaced", "again"), lambda one, other: one.seconds / other.seconds)
    figure("again_vs_bound", "<= 1.25", ("again", "local"), bound)
    figure("healthy_max_over_median", "<= 1.3", ("again",), spread)
    figure("setup_runs", "== 1", ("first",), lambda run: run.details["setup_runs"])
    figure(
        "index_requests_vs_one_node", "<= 1.1", ("first", "ordinary"),
        lambda first, ordinary: first.details["index_requests"] * nodes / ordinary.details["index_requests"],
    )  # fmt: skip
    figure(
        "host_bytes_vs_hot_set", "<= 2", ("again",),
        lambda run: run.bytes["host_sent"] / max(run.details["hot_bytes"], 1),
    )  # fmt: skip


def _measure(options: argparse.Namespace) -> None:
    if os.geteuid():
        raise PrivilegeError("the bench mounts file systems and makes network namespaces", hint="run it with sudo")
    try:
        given = msgspec.toml.decode(options.scenario.read_bytes(), type=Scenario)
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"cannot use the scenario {options.scenario}: {exc}") from None
    document = report.new(f"cluster-{options.scenario.stem}")
    parts = Ingredients(options.cache)
    with workplace.only_one(workplace.claim(options.cache)):
        workplace.sweep(options.cache)
        parts.prepare(_rounds.say)
        work = workplace.make(options.cache)
        try:
            cluster = Cluster(work, parts, given, options.nodes)
            _rounds.say(f"{options.nodes} nodes, a registry, a package index and HDFS")
            with cluster.started():
                for n in range(1, options.rounds + 1):
                    for way in _order(given.ways, n):
                        run = _run(cluster.start(way), way, n)
                        document.runs.append(run)
                        _rounds.say(f"{way} {n}: {run.seconds:.1f} s, {run.bytes} {run.details}")
        finally:
            workplace.remove(work)
    _figures_of(document, given, options.nodes)
    _figures.show(document)
    if options.out:
        document.write(options.out)


def _order(ways: list[Way], n: int) -> list[Way]:
    """In every other round the ways that are not ours come last."""
    theirs = [way for way in ways if way in ("local", "ordinary")]
    ours = [way for way in ways if way not in theirs]
    return [*theirs, *ours] if n % 2 else [*ours, *theirs]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 nodes, one round")
    parser.add_argument("--nodes", type=int, help="default 8")
    parser.add_argument("--rounds", type=int, help="default 3")
    parser.add_argument("--scenario", type=Path, default=SCENARIOS / "cold.toml", metavar="FILE")
    default = Path(os.environ.get("BOOTSEER_DEV_CACHE", Path.home() / ".cache/bootseer-dev")) / "bench/cluster"
    parser.add_argument("--cache", type=Path, default=default, metavar="DIR", help="where its ingredients are kept")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.nodes = options.nodes or (4 if options.quick else 8)
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


if __name__ == "__main__":
    sys.exit(_rounds.main(_measure, _options()))
