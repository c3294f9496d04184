"""The figures of bench/stripefs, computed from the runs of a report."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from bench.common import figures
from bench.common.figures import SPEED, Medians, Missing, paired
from bench.stripes.capped import CAP
from bootseer.demo.report import Report

FAULTS = ("frozen", "killed", "slow")
FAULTS_OF_WRITES = ("slow", "frozen")


def compute(report: Report, say: Callable[[str], None]) -> None:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    runs = Medians(report.runs)
    ratio = partial(figures.ratio, report)

    def caps() -> None:
        n = runs.count("capped:striped")
        value = runs.of("capped:striped", SPEED) / (4 * CAP)
        report.figure("read_vs_caps", value, unit="ratio", target=">= 0.85", n=n, of="median")

    def failed() -> None:
        faults = (*FAULTS, *(f"write-{fault}" for fault in FAULTS_OF_WRITES))
        of_faults = [run for run in report.runs if run.variant in {f"capped:{name}" for name in faults}]
        if not of_faults:
            raise Missing("no run with a fault")
        count = sum(bool(run.failed) for run in of_faults)
        report.figure("failed_with_faults", float(count), unit="runs", target="<= 0", n=len(of_faults), of="max")

    def gain(part: str, made: str) -> None:
        """The percentage of the time of a write that ``part`` of the placement saves; by rounds."""
        having, without = f"capped:{made}-with-{part}", f"capped:{made}-without-{part}"
        if not (gains := [100 * (1 - ratio) for ratio in paired(report.runs, having, without)]):
            raise Missing(f"no runs of {without}")
        value = round(statistics.median(gains), 1)
        report.figure(f"gain_placement_{part}", value, unit="%", target=">= 5", n=len(gains), of="median")

    vanilla = ("capped:hdfs-native", "capped:hadoop-client")
    replicated = ("capped:write-hdfs-native-replicated", "capped:write-hadoop-client-replicated")
    coded = ("capped:erasure-coded-hdfs-native", "capped:erasure-coded-hadoop-client")
    striped, collided = "capped:striped", "capped:colliding-striped"
    makers: list[Callable[[], None]] = [
        lambda: ratio("read_vs_vanilla", ">= 3.5", striped, vanilla),
        lambda: ratio(
            "read_vs_vanilla_colliding", ">= 3.5", collided, (*vanilla, "capped:colliding-hdfs-native")
        ),
        caps,
        lambda: ratio(
            "write_vs_vanilla", ">= 2.5", "capped:write-striped",
            ("capped:write-hdfs-native", "capped:write-hadoop-client"),
        ),
        # with both directions limited, two replicas use the links of 4 DataNodes twice: nobody can have more than 2
        lambda: ratio("write_vs_vanilla_replicated", ">= 1", "capped:write-striped-replicated", replicated),
        lambda: ratio(
            "uncapped_vs_hdfs_native", ">= 2", "free:striped", ("free:hdfs-native", "free:hdfs-native-4-stripes")
        ),
        *(
            (lambda fault=fault: ratio(f"{fault}_vs_healthy", "<= 1.5", f"capped:{fault}", (striped,), "seconds"))
            for fault in FAULTS
        ),
        *(
            (lambda fault=fault, target=target: ratio(
                f"{fault}_write_vs_healthy", target, f"capped:write-{fault}", ("capped:write-striped-replicated",),
                "seconds",
            ))
            for fault, target in zip(FAULTS_OF_WRITES, ("<= 1.5", "<= 2"), strict=True)
        ),
        failed,
        lambda: gain("wish", "write"),
        lambda: gain("slow", "slow-write"),
        lambda: ratio("read_vs_erasure_coding", ">= 1", striped, coded),
    ]  # fmt: skip
    figures.make(report, makers, say)
