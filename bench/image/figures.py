"""The figures of bench/image, whose runs may be of several invocations."""

from __future__ import annotations

import statistics

from bench.common.figures import Figures, Say, paired
from bench.common.report import Report
from bench.image.checkout import BEFORE


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    found = Figures(report, say)
    found.ratio("readiness_vs_local", "<= 1.3", "hot", "local")
    found.ratio("readiness_vs_full_pull", "<= 0.0667", "hot", "containerd")
    found.ratio("readiness_vs_nydus", "<= 0.4", "hot", "nydus")
    found.ratio("readiness_vs_nydus_10ms", "<= 0.4", "hot-10ms", "nydus-10ms")
    found.ratio("on_demand_vs_nydus", "<= 1", "on-demand", "nydus")
    found.ratio("on_demand_vs_nydus_10ms", "<= 1", "on-demand-10ms", "nydus-10ms")
    found.ratio("rebuilt_vs_hot", "<= 1.15", "rebuilt", "hot")
    found.median("rebuilt_warm_bytes_vs_changed", "<= 2", "rebuilt-warm", "bytes_vs_changed")
    found.ratio("rebased_vs_hot", "<= 1.5", "rebased", "hot")
    found.median("predicted_waste", "<= 0.2", "rebuilt", "waste")
    found.ratio("hdfs_hot_vs_registry_hot", "<= 1.1", "hdfs", "hot")
    found.ratio("hdfs_frozen_vs_healthy", "<= 1.5", "hdfs-frozen", "hdfs")
    found.ratio("hdfs_slow_vs_healthy", "<= 1.5", "hdfs-slow", "hdfs")
    # until the tree may be read
    found.median("mounted_s", "<= 0.1", "hot", "mounted", unit="s")
    found.ratio("stall_vs_on_demand", "<= 0.02", "hot", "on-demand", field="stall_seconds")
    # of the reads that a start makes where nothing was read ahead of it
    found.ratio("slow_faults", "<= 0.01", "hot", "record", field="slow_faults", of="reads")
    found.median("waste", "<= 0.2", "record", "waste")
    # read ahead, and touched by no start
    found.median("readahead_waste", "<= 0.2", "page-list", "unused")
    found.add("complete_vs_erofs", ">= 0.97", _complete(found))
    found.ratio("filled_vs_erofs", ">= 0.6", "read-filled", "read-filled-plain", field="sequential_mb_per_s")
    found.median("filled_random_us", "<= 30", "read-filled", "us_per_4k", unit="us")
    found.ratio("recording_overhead", "<= 1.02", "warm", "warm-norecord")
    found.ratio("unpack_vs_full_pull", "<= 0.55", "unpack", "containerd")
    found.ratio("extract_vs_unpack", "<= 0.8", "extract", "unpack")
    found.ratio("conversion_vs_tools", "<= 0.25", "convert", "convert-tools")
    for variant in dict.fromkeys(run.variant for run in report.runs):
        ours = variant.removesuffix(BEFORE)
        if ours not in (variant, "record"):  # recordings are no pairs
            ratios = paired(report.runs, ours, variant)
            say(f"{ours}_vs_before: {' '.join(f'{one:.3f}' for one in ratios)}")
            found.add(f"{ours}_vs_before", "<= 1.03", ratios)
    return found


def _complete(found: Figures) -> list[float]:
    """The worse of two ratios to plain EROFS: of sequential reads and of small ones, as often as there are runs."""
    ours, plain = "read-complete", "read-complete-plain"
    rate, other = found.values(ours, "sequential_mb_per_s"), found.values(plain, "sequential_mb_per_s")
    each, others = found.values(ours, "us_per_4k"), found.values(plain, "us_per_4k")
    if not (rate and other and each and others):
        return []
    median = statistics.median
    return [min(median(rate) / median(other), median(others) / median(each))] * min(len(rate), len(other))
