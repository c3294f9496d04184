"""The same job with something changed. Estimates: each stage ends with its slowest node, the order of stages stays."""

from __future__ import annotations

import math
from statistics import median

import msgspec

from bootseer.profile.report import JobReport, WhatIf

SHARE = 0.01


def slowest_at_median(report: JobReport, share: float = SHARE) -> JobReport:
    """``report`` with a what-if added: the slowest ``share`` of nodes of each stage (at least one) at its median.

    A stage saves what its slowest node's own work shrinks by, but no more than its share of start-up. Nothing is added
    below 4 nodes or before start-up has ended.
    """
    if report.startup_seconds is None or len(report.nodes) < 4:
        return report
    saved = 0.0
    for stage in report.stages:
        own = sorted(c.own for node in report.nodes if (c := node.stages.get(stage.stage)) and c.own is not None)
        if len(own) < 4:
            continue
        kept = own[: len(own) - max(1, math.ceil(len(own) * share))]
        saved += min(stage.seconds, own[-1] - max(kept[-1], median(own)))
    hours = saved * (report.gpus or len(report.nodes)) / 3600
    entry = WhatIf(
        name=f"slowest {share:.0%} of nodes at the median".replace("%", " %"),
        startup_seconds=report.startup_seconds - saved,
        saved_seconds=saved,
        saved_hours=hours,
    )
    return msgspec.structs.replace(report, what_if=[*report.what_if, entry])
