"""The figures of bench/stripefs, computed from the runs of a report."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from bench.common.figures import SPEED, Figures, Say
from bench.common.report import Report, Run
from bench.stripes.capped import CAP

FAULTS = ("frozen", "killed", "slow")
HEALTHY_WRITES = (
    "capped:write-healthy",
    "capped:write-striped",
    "capped:write-striped-replicated",
    "capped:write-with-choose",
    "free:write-striped",
)
FAULTS_OF_WRITES = ("slow", "frozen")


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    found = Figures(report, say)

    def faster(name: str, target: str, ours: str, *vanilla: str) -> None:
        found.ratio(name, target, ours, *vanilla, field=SPEED)

    striped, replicated = "capped:striped", "capped:write-striped-replicated"
    vanilla = ("capped:hdfs-native", "capped:hadoop-client")
    faster("read_vs_vanilla", ">= 3.5", striped, *vanilla)
    found.median("read_vs_caps", ">= 0.85", striped, SPEED, scale=1 / (4 * CAP))
    writes = ("capped:write-hdfs-native", "capped:write-hadoop-client")
    faster("write_vs_vanilla", ">= 2.5", "capped:write-striped", *writes)
    # with both directions limited, two replicas use the links of 4 DataNodes twice: nobody can have more than 2
    faster("write_vs_vanilla_replicated", ">= 1", replicated, *(f"{name}-replicated" for name in writes))
    faster("uncapped_vs_hdfs_native", ">= 2", "free:striped", "free:hdfs-native", "free:hdfs-native-4-stripes")
    for fault in FAULTS:
        found.ratio(f"{fault}_vs_healthy", "<= 1.5", f"capped:{fault}", striped)
    for fault in FAULTS_OF_WRITES:
        found.ratio(f"{fault}_write_vs_healthy", "<= 1.5", f"capped:write-{fault}", "capped:write-healthy")
    names = {f"capped:{name}" for name in (*FAULTS, *(f"write-{fault}" for fault in FAULTS_OF_WRITES))}
    if disturbed := [bool(run.failed) for run in report.runs if run.variant in names]:
        n, failed = len(disturbed), float(sum(disturbed))
        report.figure("failed_with_faults", failed, unit="runs", target="<= 0", n=n, of="max")
    found.gain("gain_placement_choose", "capped:write-with-choose", "capped:write-without-choose")
    found.gain("gain_placement_slow", "capped:slow-write-with-slow", "capped:slow-write-without-slow")
    found.gain("gain_spare", "capped:slow-write-with-slow", "capped:slow-write-without-spare")
    found.gain("gain_probe_soon", "capped:frozen-write-with-soon", "capped:frozen-write-without-soon")
    for name in ("left", "asked"):
        some = [value for write in HEALTHY_WRITES for value in found.values(write, name)]
        if some:
            report.figure(f"healthy_{name}", max(some), unit="DataNodes", target="<= 0", n=len(some), of="max")
    for name, target in (("authentication", ">= 0.9"), ("privacy", ">= 0.5")):
        for verb in ("read", "write"):
            figure = f"secured_{verb}_vs_unsecured" if name == "authentication" else f"private_{verb}_vs_unsecured"
            faster(figure, target, f"secured:{verb}-{name}", f"secured:{verb}-unsecured")
    for verb, target in (("read", "<= 1.3"), ("write", "<= 1.5")):
        found.ratio(f"secured_frozen_{verb}_vs_healthy", target, f"secured:{verb}-frozen", f"secured:{verb}-healthy")
    coded = ("capped:erasure-coded-hdfs-native", "capped:erasure-coded-hadoop-client")
    faster("read_vs_erasure_coding", ">= 1", striped, *coded)
    return found


def scan(runs: Sequence[Run]) -> Iterator[str]:
    """A table of the median speeds by width and unit, in Markdown; nothing where none were tried."""
    found: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for run in runs:
        if ":scan-" in run.variant and not run.failed:
            both = found.setdefault((int(run.details["unit"]) >> 10, int(run.details["width"])), ([], []))
            both[run.variant.endswith("-write")].append(float(run.details[SPEED]))
    if found:
        yield "| unit, KiB | width | read, MiB/s | write with 2 replicas, MiB/s |"
        yield "|---|---|---|---|"
    for (unit, width), both in sorted(found.items()):
        yield f"| {unit} | {width} | {' | '.join(f'{statistics.median(some):.0f}' for some in both)} |"
