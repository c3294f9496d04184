"""A way to start, from the events of a start-up: the user's own job."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import msgspec

from bootseer.errors import NotFoundError
from bootseer.profile.report import JobReport, NodeReport
from bootseer.profile.sim.measured import LAST
from bootseer.profile.sim.model import Site, Stage, Way, simulate

_MBIT = 1e6 / 8
_BEFORE = ("queue", "alloc")
"""Stages in which the job has no nodes, or does nothing on them."""


class Recorded(NamedTuple):
    """``spread``: what each node took by what the median one took. ``link_mbit``: the best that a node's link gave; 0
    where no event says it."""

    way: Way
    nodes: int
    spread: list[float]
    link_mbit: float


def recorded(report: JobReport, site: Site) -> Recorded:
    """The start-up of ``report`` as a way: image, environment, and all that comes after as one stage. Raises
    `NotFoundError` where it has not ended."""
    took = {node.node: _own(node) for node in report.nodes}
    usual = median(took.values()) if took else 0.0
    if not report.complete or usual <= 0:
        why = "took no time" if report.complete else "has come to no first step"
        raise NotFoundError(f"the last start-up in these events {why}", hint="name a folder or file of another one")
    rate = max((node.number("image", "link_rate") for node in report.nodes), default=0.0)
    size = median(node.number("image", "bytes_hot") + node.number("image", "bytes_demand") for node in report.nodes)
    fetched = median(
        max((node.number(stage, "fetched") for stage in node.stages), default=0.0) for node in report.nodes
    )
    image, env = (median(_seconds(node, stage) for node in report.nodes) for stage in ("image", "env"))
    way = Way(
        name="as recorded",
        stages=(
            Stage(name="image", seconds=image, size=size, source="hot", later=True),
            Stage(name="env", seconds=env),
            Stage(name=LAST, size=fetched, source="stripes"),
        ),
    )
    if rate:
        site = msgspec.structs.replace(site, node_mbit=rate / _MBIT)
    missing = usual - median(simulate(way, site, len(took)).ready)
    last = Stage(name=LAST, size=fetched, source="stripes", seconds=max(0.0, missing))
    way = Way(name=way.name, stages=(*way.stages[:2], last))
    return Recorded(way, len(took), sorted(one / usual for one in took.values() if one > 0), rate / _MBIT)


def _own(node: NodeReport) -> float:
    """Its stages, and what lies outside of any."""
    return node.gap + sum(_seconds(node, stage) for stage in node.stages if stage not in _BEFORE)


def _seconds(node: NodeReport, stage: str) -> float:
    cell = node.stages.get(stage)
    return (cell.own or 0.0) if cell else 0.0
