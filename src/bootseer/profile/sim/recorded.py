"""A way to start, from the events of a start-up: the user's own job."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bootseer.errors import NotFoundError
from bootseer.profile.report import JobReport, NodeReport
from bootseer.profile.sim.measured import LAST
from bootseer.profile.sim.model import Site, Stage, Way, simulate

_MBIT = 1e6 / 8
_BEFORE = ("queue", "alloc")
"""Stages in which the job has no nodes, or does nothing on them."""
_ROUNDS, _CLOSE = 6, 0.01
_MOST_MBIT = 1e11


class Recorded(NamedTuple):
    """``spread``: what each node took by what the median one took. ``site``: links of nodes carry the best that was
    seen, and links of DataNodes at least what brought the bytes to so many nodes in that time, but for what is
    named."""

    way: Way
    nodes: int
    spread: list[float]
    site: Site


def recorded(report: JobReport, named: Mapping[str, Any]) -> Recorded:
    """The start-up of ``report`` as a way: image, environment, and all that comes after as one stage, whose bytes come
    in the stage that says so; all else of it is work on any number of nodes. ``named``: what is known of the site.
    Raises `NotFoundError` where the start-up has not ended."""
    nodes = [node for node in report.nodes if any(stage not in _BEFORE for stage in node.stages)]  # else only of sacct
    alloc = max((_seconds(node, "alloc") for node in report.nodes), default=0.0)
    took = [_own(node, alloc) for node in nodes]
    usual = median(took) if took else 0.0
    if not report.complete or usual <= 0:
        why = "took no time" if report.complete else "has come to no first step"
        raise NotFoundError(f"the last start-up in these events {why}", hint="name a folder or file of another one")
    size = median(node.number("image", "bytes_hot") + node.number("image", "bytes_demand") for node in nodes)
    loads = [_load(node) for node in nodes]
    fetched, load = median(count for count, _ in loads), median(seconds if count else 0.0 for count, seconds in loads)
    image, env = (median(_seconds(node, stage) for node in nodes) for stage in ("image", "env"))
    rate = max((node.number("image", "link_rate") for node in report.nodes), default=0.0)
    rest = max(0.0, usual - image - env - load)
    if rate:
        within = ((size + fetched, usual - image), (fetched, load + rest))  # bytes, and the time in which they came
        needed = max((count / seconds for count, seconds in within if seconds > 0), default=0.0)
        named = {"node_mbit": min(_MOST_MBIT, max(rate, needed) / _MBIT), **named}
    site = Site(**named)

    def told(beside: float, after: float) -> Way:
        last = Stage(name=LAST, size=fetched, source="stripes", seconds=after)
        first = Stage(name="image", seconds=image, size=size, source="hot", later=True)
        return Way(name="as recorded", beside=beside, stages=(first, Stage(name="env", seconds=env), last))

    def missing(way: Way) -> float:
        return usual - median(simulate(way, site, len(report.nodes)).ready)

    beside = min(rest, max(0.0, fetched / (site.node_mbit * _MBIT) - load))  # the link takes longer than the load did
    way = told(beside, rest - beside)
    lacks = missing(way)
    for _ in range(_ROUNDS):
        if lacks > -_CLOSE * usual or "datanode_mbit" in named or not (most := load + beside):
            break
        faster = site.datanode_mbit * (most - lacks) / most
        site = msgspec.structs.replace(site, datanode_mbit=min(_MOST_MBIT, faster))
        lacks = missing(way)
    if lacks < 0:  # what still takes too long came beside work
        beside = min(rest, beside - lacks)
        way = told(beside, rest - beside)
        lacks = missing(way)
    way = told(beside, max(0.0, rest - beside + lacks))
    return Recorded(way, len(report.nodes), sorted(one / usual for one in took if one > 0), site)


def _load(node: NodeReport) -> tuple[float, float]:
    """Bytes of the checkpoint, and seconds of the stage that says so."""
    found = ((node.number(stage, "fetched"), _seconds(node, stage)) for stage in node.stages)
    return max(found, key=lambda one: one[0], default=(0.0, 0.0))


def _own(node: NodeReport, alloc: float) -> float:
    """Its stages, and what lies outside of any. ``alloc``: seconds of that stage, which not every node may name."""
    gap = node.gap if "alloc" in node.stages else max(0.0, node.gap - alloc)
    return gap + sum(_seconds(node, stage) for stage in node.stages if stage not in _BEFORE)


def _seconds(node: NodeReport, stage: str) -> float:
    cell = node.stages.get(stage)
    return (cell.own or 0.0) if cell else 0.0
