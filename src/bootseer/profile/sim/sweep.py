"""The model over many sizes: what a start takes in each way, what it asks of the servers, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from bootseer.errors import ConfigError
from bootseer.profile import analysis, chart, events
from bootseer.profile.card import add, new_table
from bootseer.profile.sim.measured import from_registry, jobs, spread_of, ways
from bootseer.profile.sim.model import Outcome, Site, Way, simulate
from bootseer.profile.sim.recorded import recorded
from bootseer.units import count_text
from bootseer.wiretypes import in_words, known

MOST = 100_000
"""Nodes of a start, which the model would take minutes for."""
DEFAULT = "torch"
"""The job of `measured.jobs` whose starts are told of without events."""
_REPLICAS = (3, 10, 30, 100, 300)
_RACK = 32
"""Nodes of a rack, for what a cache there is worth."""
_WITHIN = 1.05
"""What is at most this much slower than the best is as good."""
ASSUMED = (
    "All nodes begin at the same moment, empty, and nobody else uses links or servers.",
    "A link gives its rate always and serves pieces in the order in which they were asked for; that of a node first "
    "what a stage waits for, then what is fetched ahead.",
    "Every node reads the same bytes of image, environment and checkpoint.",
    "A node does its work on cores of its own; by how much nodes differ is drawn from those that were measured.",
    "What a stage of one node takes beyond its bytes is work, and work does not grow with the size of the job.",
    "A checkpoint is one file of so many stripes, read whole by each node; image and environment are a hot pack each.",
    "Replicas lie on DataNodes drawn at random; a node asks the least busy of three that it compares.",
    "NameNode, and disks of DataNodes and of the registry, answer at once: no report has their service times.",
    "Nothing fails. Collective operations (dist_init) take what they took on few nodes.",
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way at one size. Seconds until the last node and the median one are ready; overheads are these beyond a start
    with everything local, of the job and of a node. ``busy``: share of the time in which the busiest link of a kind
    carried bytes. ``stages``: seconds of the median node."""

    way: str
    nodes: int
    seconds: float
    median: float
    max_over_median: float
    job_overhead: float | None
    node_overhead: float | None
    stages: dict[str, float]
    gigabytes: dict[str, float]
    busy: dict[str, float]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """``hot_replicas``: by size, the fewest replicas of hot packs with which a start is at most 5 % slower than with
    more. ``rack_from``: the smallest size at which a cache in each rack saves 5 % of a start from the registry."""

    about: str
    site: Site
    assumed: list[str]
    rows: list[Row]
    hot_replicas: dict[int, int]
    rack_from: int | None
    rack: int


def sweep(
    ways: Iterable[Way],
    site: Site,
    sizes: Sequence[int],
    *,
    about: str,
    spread: Sequence[float] = (1.0,),
) -> Sweep:
    """``ways``: the first is ``local`` where overheads are wanted."""
    rows, replicas, rack_from = list[Row](), dict[int, int](), None
    racked = msgspec.structs.replace(site, rack=site.rack or _RACK)
    for nodes in sorted(set(sizes)):
        local: Outcome | None = None
        for way in ways:
            made = simulate(way, site, nodes, spread=spread)
            local = made if way.name == "local" else local
            rows.append(_row(way.name, nodes, made, local))
            if way.name not in ("bootseer", "as recorded"):
                continue
            replicas[nodes] = _enough(way, site, nodes, spread, max(made.ready))
            other = from_registry(way)
            pulled, cached = (simulate(other, place, nodes, spread=spread) for place in (site, racked))
            rows.append(_row(other.name, nodes, pulled, local))
            rows.append(_row(f"{other.name}, rack caches", nodes, cached, local))
            if rack_from is None and max(cached.ready) * _WITHIN <= max(pulled.ready):
                rack_from = nodes
    return Sweep(
        about=about, site=site, assumed=list(ASSUMED), rows=rows, hot_replicas=replicas, rack_from=rack_from,
        rack=racked.rack,
    )  # fmt: skip


def of(paths: Sequence[Path] | None, sizes: Sequence[int], given: Sequence[str]) -> Sweep:
    """The model of the last start-up in the events of ``paths``, or, without any, of the job that was measured.
    ``given``: `NAME=VALUE` of the site. Raises `ConfigError` and `NotFoundError`."""
    named = _site(given)
    if not paths:
        job = jobs()[DEFAULT]
        return sweep(ways(job).values(), Site(**named), sizes, about=job.about, spread=spread_of(job))
    report = analysis.analyse(events.read(list(paths)))
    found = recorded(report, named)
    nodes = count_text(found.nodes, "node", "nodes")
    about = f"{events.identity_text(report.job, report.attempt, report.cycle)}, as recorded on {nodes}"
    return sweep([found.way], found.site, sizes, about=about, spread=found.spread)


def _site(given: Sequence[str]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in Site.__struct_fields__:
            raise ConfigError(f"--site {text!r}: no such figure", hint=f"there are {', '.join(Site.__struct_fields__)}")
        named[name] = value
    try:
        return {name: getattr(msgspec.convert(named, known(Site), strict=False), name) for name in named}
    except (msgspec.ValidationError, ValueError) as exc:
        why = in_words(exc) if isinstance(exc, msgspec.ValidationError) else exc
        raise ConfigError(f"--site {' '.join(given)}: {why}", hint="name each as NAME=NUMBER") from None


def _enough(way: Way, site: Site, nodes: int, spread: Sequence[float], usual: float) -> int:
    """The fewest replicas of hot packs to which the next larger number adds little. ``usual``: what the site's take."""
    before: tuple[int, float] | None = None
    for count in sorted({min(count, site.datanodes) for count in _REPLICAS}):
        other = msgspec.structs.replace(site, hot_replicas=count)
        took = usual if other == site else max(simulate(way, other, nodes, spread=spread).ready)
        if before is not None and before[1] <= _WITHIN * took:
            break
        before = (count, took)
    assert before is not None
    return before[0]


def _row(way: str, nodes: int, made: Outcome, local: Outcome | None) -> Row:
    last, usual = max(made.ready), median(made.ready)
    return Row(
        way=way, nodes=nodes, seconds=last, median=usual, max_over_median=last / usual if usual else 1.0,
        job_overhead=last - max(local.ready) if local else None,
        node_overhead=usual - median(local.ready) if local else None,
        stages={name: median(took) for name, took in made.stages.items()},
        gigabytes={kind: count / 1e9 for kind, count in made.moved.items()}, busy=made.busy,
    )  # fmt: skip


def render(found: Sweep) -> RenderableType:
    """For the terminal: a line for each way and size, what would help, what is assumed."""
    table = new_table()
    table.add_column("nodes", justify="right")
    table.add_column("way", no_wrap=True)
    for name in ("last node", "median", "max/median", "image", "env", "init", "registry", "HDFS"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        times = (row.seconds, row.median)
        stages = (row.stages.get(name) for name in ("image", "env", "init"))
        add(
            table, f"{row.nodes:,}",
            (row.way, *(f"{one:,.1f} s" for one in times), f"{row.max_over_median:.2f}",
             *("-" if one is None else f"{one:,.1f} s" for one in stages),
             *(f"{row.gigabytes[kind]:,.1f} GB {100 * row.busy[kind]:3.0f} %" for kind in ("registry", "datanodes"))),
        )  # fmt: skip
    site = " ".join(f"{name}={getattr(found.site, name):g}" for name in found.site.__struct_fields__)
    lines: list[RenderableType] = [Text(found.about), Text(f"site: {site}"), Text(""), table, Text("")]
    if found.hot_replicas:
        told = ", ".join(f"{count} for {nodes:,}" for nodes, count in found.hot_replicas.items())
        lines.append(Text(f"replicas of hot packs that suffice, by nodes: {told}"))
        where = "at none of these sizes" if found.rack_from is None else f"from {found.rack_from:,} nodes on"
        lines.append(Text(f"a cache of the registry for each {found.rack} nodes pays {where}"))
    lines += [Text(""), Text("Assumed:"), *(Text(f"- {line}") for line in found.assumed)]
    return Lines(*lines)


def picture(found: Sweep) -> str:
    """An SVG file: a bar for each row, until the median node is ready and then until the last one."""
    return chart.picture(
        [chart.Bar(f"{row.nodes:,} {row.way}", row.median, row.seconds - row.median, 0.0) for row in found.rows],
        "seconds",
        ("until the median node is ready", "more until the last one is"),
    )
