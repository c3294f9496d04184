"""The figures of bench/checkpoint, computed from the runs of a report."""

from __future__ import annotations

from bench.checkpoint import once
from bench.common.figures import SPEED, Figures, Say
from bench.common.report import Report

_GB_PER_MIB = 2**20 / 1e9


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    found = Figures(report, say)

    def faster(name: str, target: str, ours: str, *others: str) -> None:
        found.ratio(name, target, ours, *others, field=SPEED)

    torch = ("capped:torch-hdfs-native", "capped:torch-mount-hdfs-native")
    found.median("mount_sequential_gbs", ">= 4", "local:mount", SPEED, unit="GB/s", scale=_GB_PER_MIB)
    faster("mount_vs_pyfuse3", ">= 2", "local:mount", "local:pyfuse3")
    faster("mount_vs_vanilla", ">= 3", "capped:mount", "capped:mount-hdfs-native")
    faster("torch_resume_vs_vanilla", ">= 3", "capped:torch-load", *torch)
    faster("torch_mount_vs_vanilla", ">= 3", "capped:torch-mount", *torch)
    # by rounds, as both are of one node
    for suffix, variant in (("", "capped:torch-mount"), ("_mmap", "capped:torch-mount-mmap")):
        found.rounds(f"second_resume_vs_first{suffix}", ">= 10", variant, f"{variant}-second")
    found.ratio("second_resume_vs_local_file", "<= 1.1", "capped:torch-mount-second", "capped:torch-local")
    for how in ("torch", "mount", "dcp"):
        faster(f"save_{how}_vs_vanilla", ">= 2.5", f"capped:save-{how}", "capped:save-hdfs-native")
    found.ratio("frozen_save_vs_healthy", "<= 2", "capped:save-frozen", "capped:save-replicated")
    faster("read_vs_hdfs_native", ">= 2", "free:striped", "free:hdfs-native")
    faster("read_vs_hdfs_native_4_streams", ">= 1", "free:striped", "free:hdfs-native-4-stripes")
    found.ratio("many_put_vs_hadoop", "<= 0.5", "many:put", "many:hadoop-put")
    found.ratio("many_get_vs_hadoop", "<= 0.5", "many:get", "many:hadoop-get")
    found.median("names_listed_s", "<= 10", "many:ls", unit="s")
    for suffix in ("plain", "striped", "striped-64KiB"):
        found.median(f"random_fetched_{suffix}", "<= 20", f"many:random-{suffix}", "fetched_of_asked")
    for suffix in ("", "_shuffled", "_some"):  # of the bytes that are wanted
        way = f"capped:tensors{suffix.replace('_', '-')}"
        found.ratio(f"mapped_load{suffix}_vs_sequential", "<= 1.3", "capped:tensors-in-order", way, field=SPEED)
        found.median(f"mapped_load{suffix}_sent_vs_used", "<= 1.3", way, "sent_of_used")
    for what, target in (("save", "<= 1.2"), ("load", "<= 1")):
        ours = f"local:{what}-small"
        found.ratio(f"small_tensors_{what}_vs_torch", target, ours, f"{ours}-torch", field="cpu")
    once.compute(found)
    return found
