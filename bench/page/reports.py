"""The recorded reports by scenario. Of a figure that two reports of a scenario have, the first one answers."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.common.report import Figure, Report, Run
from bench.every import COMMANDS, JOINED
from bootseer.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
BEFORE = "_vs_before"
"""Ends figures that compare two versions of bootseer: they stand in their report alone."""


class Scenario(NamedTuple):
    """One page: its name in links, its title, and its reports, those that answer first at the front."""

    slug: str
    title: str
    reports: tuple[str, ...]


SCENARIOS = (
    Scenario("one-node", "One job on one node", ("demo",)),
    Scenario("many-nodes", "One job on many nodes", ("cluster", "cluster-known", "cluster-slow-node", "cluster-size")),
    Scenario("images", "Container images",
             ("image-written", "image", "image-first", "image-rebuilt", "image-hdfs", "kubernetes")),
    Scenario("environments", "Environments and package caches", ("env", "env-renewed", "packages")),
    Scenario("compile-caches", "Compile caches", ("caches",)),
    Scenario(
        "checkpoints",
        "Checkpoints",
        ("checkpoint-many", "checkpoint-quick", "checkpoint", "checkpoint-sharing", "checkpoint-tensors",
         "checkpoint-names", "checkpoint-frozen"),
    ),
    Scenario(
        "striped-files",
        "Striped files in HDFS",
        ("stripefs-writes", "stripefs-secured", "stripefs-placement", "stripefs"),
    ),
    Scenario("profiler", "Profiler and daemons", ("emit", "fleet", "daemons", "account")),
    Scenario(
        "ablations",
        "What single parts are worth",
        ("ablate", "ablate-reach", "ablate-elsewhere", "ablate-hung-range", "scheduler", "turn", "start-quick"),
    ),
)  # fmt: skip


def load() -> dict[str, Report]:
    """Every report by the name of its file. Raises `DataError` where scenarios and files do not name the same ones."""
    found = {path.stem: msgspec.json.decode(path.read_bytes(), type=Report) for path in RESULTS.glob("*.json")}
    named = {name for scenario in SCENARIOS for name in scenario.reports}
    for table, names in (("bench/page/reports.py", named), ("bench/every.py", {*COMMANDS, *JOINED})):
        if odd := sorted(names ^ set(found)):
            raise DataError(f"reports without a place in {table}, or the other way round: {', '.join(odd)}")
    return found


def figures(scenario: Scenario, reports: dict[str, Report]) -> Iterator[tuple[str, Figure]]:
    """Each figure of the scenario once, with the report that answers."""
    told: set[str] = set()
    for name in scenario.reports:
        for figure in reports[name].figures:
            if figure.name not in told and not figure.name.endswith(BEFORE):
                told.add(figure.name)
                yield name, figure


def misses(reports: dict[str, Report]) -> list[tuple[Scenario, Figure, str]]:
    """Each figure that missed its target, and why. Raises `DataError` where one has no reason or a reason none."""
    why = tomllib.loads((Path(__file__).parent / "misses.toml").read_text())
    found = [(one, figure) for one in SCENARIOS for _, figure in figures(one, reports) if not figure.met]
    missed = {(one.slug, figure.name) for one, figure in found}
    if odd := sorted(missed ^ {(slug, name) for slug, reasons in why.items() for name in reasons}):
        listed = ", ".join(f"{slug}.{name}" for slug, name in odd)
        raise DataError(
            f"missed targets without a sentence in bench/page/misses.toml, or sentences without one: {listed}"
        )
    return [(one, figure, why[one.slug][figure.name]) for one, figure in found]


def good(report: Report, variant: str) -> list[Run]:
    """The runs of ``variant`` that did not fail."""
    return [run for run in report.runs if run.variant == variant and not run.failed]


def median(report: Report, variant: str) -> float | None:
    """The median seconds of ``variant``; None where it did not run."""
    seconds = [run.seconds for run in good(report, variant) if run.seconds is not None]
    return statistics.median(seconds) if seconds else None
