"""The same start-up with something changed: estimates, from nothing but the start-up itself."""

from __future__ import annotations

import math
from statistics import median

from bootseer.profile.report import JobReport, WhatIf

_BEFORE_READS = ("queue", "alloc", "image")
"""Stages that have ended when the image is read."""

_NODES = 4
"""Fewer say nothing of what is usual."""


def estimates(report: JobReport) -> list[WhatIf]:
    """None before start-up has ended. A stage saves what its slowest node's own work shrinks by, at most its share."""
    if report.startup_seconds is None:
        return []
    found = (
        ("slowest 1 % of nodes at the median", _slowest_at_median(report)),
        *((f"a usual node for {node}", saved) for node, saved in _one_replaced(report)),
        ("every node restores its environment", _all_restored(report)),
        ("the image's hot blocks are prefetched", _image_prefetched(report)),
    )
    return [
        WhatIf(
            name=name,
            startup_seconds=report.startup_seconds - saved,
            saved_seconds=saved,
            saved_hours=saved * (report.gpus or len(report.nodes)) / 3600,
        )
        for name, saved in found
        if saved is not None
    ]


def _slowest_at_median(report: JobReport) -> float | None:
    """With the slowest 1 % of the nodes of each stage (at least one) at its median."""
    if len(report.nodes) < _NODES:
        return None
    saved = 0.0
    for stage in report.stages:
        own = sorted(c.own for node in report.nodes if (c := node.stages.get(stage.stage)) and c.own is not None)
        if len(own) < _NODES:
            continue
        kept = own[: -math.ceil(len(own) / 100)]
        saved += min(stage.seconds, own[-1] - max(kept[-1], median(own)))
    return saved


def _one_replaced(report: JobReport) -> list[tuple[str, float]]:
    """The straggler whose replacement saves most: a node at the median of each stage in its place."""
    flagged = {node for stage in report.stages for node in stage.stragglers}
    saved: dict[str, float] = {}
    for stage in report.stages:
        if stage.slowest in flagged and stage.median is not None and stage.max is not None:
            cells = [(node.node, node.stages.get(stage.stage)) for node in report.nodes if node.node != stage.slowest]
            others = max((cell.own for _, cell in cells if cell and cell.own is not None), default=0.0)
            less = min(stage.seconds, stage.max - max(others, stage.median))
            saved[stage.slowest] = saved.get(stage.slowest, 0.0) + less
    return [max(saved.items(), key=lambda one: one[1])] if saved else []


def _all_restored(report: JobReport) -> float | None:
    """With those that ran the set-up command (``how`` of ``env``) taking as long as the slowest of those that
    restored it."""
    stage = report.stage("env")
    cells = [c for node in report.nodes if (c := node.stages.get("env")) and c.own is not None]
    restored = [c.own for c in cells if str(c.attrs.get("how", "")).startswith("restored") and c.own is not None]
    ran = [c.own for c in cells if str(c.attrs.get("how", "")).startswith("ran") and c.own is not None]
    if stage is None or not restored or not ran:
        return None
    return max(0.0, min(stage.seconds, max(ran) - max(restored)))


def _image_prefetched(report: JobReport) -> float | None:
    """With all bytes that a node's readers of the image needed coming as one stream, at the best rate of its link: they
    wait no longer than that takes, and not one by one. Start-up ends with the slowest node, by its own work in the
    stages after ``image``. None where no node fetched on demand."""
    before, after, demanded = [0.0], [0.0], False
    for node in report.nodes:
        own = sum(cell.own or 0.0 for stage, cell in node.stages.items() if stage not in _BEFORE_READS)
        said = ("bytes_demand", "bytes_hot", "waited_seconds", "link_rate")
        demand, hot, waited, rate = (node.number("image", name) for name in said)
        saved = 0.0
        if demand > 0 and rate > 0:
            demanded = True
            saved = max(0.0, waited - (demand + hot) / rate)
        before.append(own)
        after.append(own - saved)
    share = sum(stage.seconds for stage in report.stages if stage.stage not in _BEFORE_READS)
    return min(share, max(before) - max(after)) if demanded else None
