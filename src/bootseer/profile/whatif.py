"""The same job with something changed. Estimates: each stage ends with its slowest node, the order of stages stays."""

from __future__ import annotations

import math
from statistics import median

from bootseer.profile.report import JobReport, WhatIf


def slowest_at_median(report: JobReport) -> list[WhatIf]:
    """The slowest 1 % of the nodes of each stage (at least one) at its median.

    A stage saves what its slowest node's own work shrinks by, but no more than its share of start-up. Nothing is said
    below 4 nodes or before start-up has ended.
    """
    if report.startup_seconds is None or len(report.nodes) < 4:
        return []
    saved = 0.0
    for stage in report.stages:
        own = sorted(c.own for node in report.nodes if (c := node.stages.get(stage.stage)) and c.own is not None)
        if len(own) < 4:
            continue
        kept = own[: -math.ceil(len(own) / 100)]
        saved += min(stage.seconds, own[-1] - max(kept[-1], median(own)))
    change = WhatIf(
        name="slowest 1 % of nodes at the median",
        startup_seconds=report.startup_seconds - saved,
        saved_seconds=saved,
        saved_hours=saved * (report.gpus or len(report.nodes)) / 3600,
    )
    return [change]
