"""The figures of bench/checkpoint, computed from the runs of a report."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial

from bench.common import figures
from bench.common.figures import Medians, Missing, paired
from bootseer.demo.report import Report

ONCE = "bench.checkpoint.once"
"""Module of the part ``once``; it has ``run(site, report, path, made, rounds=)`` and ``makers(report)`` of figures."""
_MIB_PER_GB = 1e9 / 2**20


def compute(report: Report, say: Callable[[str], None]) -> None:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    ratio = partial(figures.ratio, report)
    runs = Medians(report.runs)

    def sequential() -> None:
        value, n = runs.of("local:mount", figures.SPEED) / _MIB_PER_GB, runs.count("local:mount")
        report.figure("mount_sequential_gbs", value, unit="GB/s", target=">= 4", n=n, of="median")

    def second(name: str, variant: str) -> None:
        """By rounds, as both are of one node."""
        if not (found := paired(report.runs, variant, f"{variant}-second")):
            raise Missing(f"no round with {variant} and {variant}-second")
        value = statistics.median(found)
        report.figure(name, value, unit="ratio", target=">= 10", n=len(found), of="median")

    def of_figures(name: str, target: str, ours: str, *others: str) -> Callable[[], None]:
        return lambda: ratio(name, target, ours, others)

    torch = ("capped:torch-hdfs-native", "capped:torch-mount-hdfs-native")
    save = "capped:save-hdfs-native"
    makers: list[Callable[[], None]] = [
        sequential,
        of_figures("mount_vs_pyfuse3", ">= 2", "local:mount", "local:pyfuse3"),
        of_figures("mount_vs_mfusepy", ">= 2", "local:mount", "local:mfusepy"),
        of_figures("mount_vs_vanilla", ">= 3", "capped:mount", "capped:mount-hdfs-native"),
        of_figures("torch_resume_vs_vanilla", ">= 3", "capped:torch-load", *torch),
        of_figures("torch_mount_vs_vanilla", ">= 3", "capped:torch-mount", *torch),
        lambda: second("second_resume_vs_first", "capped:torch-mount"),
        lambda: second("second_resume_vs_first_mmap", "capped:torch-mount-mmap"),
        lambda: ratio(
            "second_resume_vs_local_file", "<= 1.2", "capped:torch-mount-second", ("capped:torch-local",), "seconds"
        ),
        *(
            of_figures(f"save_{how}_vs_vanilla", ">= 2.5", f"capped:save-{how}", save)
            for how in ("torch", "mount", "dcp")
        ),
        lambda: ratio("frozen_write_vs_healthy", "<= 2", "capped:save-frozen", ("capped:save-replicated",), "seconds"),
        of_figures("read_vs_hdfs_native", ">= 2", "free:striped", "free:hdfs-native"),
        of_figures("read_vs_hdfs_native_4_streams", ">= 1", "free:striped", "free:hdfs-native-4-stripes"),
    ]
    if importlib.util.find_spec(ONCE) is not None:
        makers += importlib.import_module(ONCE).makers(report)
    figures.make(report, makers, say)
