"""``bootseer profile fleet``, ``growth`` and ``check``: the start-ups of weeks."""

from __future__ import annotations

import enum
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli._shared import AsJson, Limit, age_value, print_json, print_table, print_whole
from bootseer.errors import ConfigError, NotFoundError
from bootseer.units import one_line


class Period(enum.StrEnum):
    """What typer shows as choices."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


_KINDS = "Event files, Parquet files of `profile export`, or folders of both; default: $BOOTSEER_EVENTS"
Paths = Annotated[list[Path] | None, typer.Argument(metavar="[PATH]...", help=_KINDS)]


Since = Annotated[
    float | None,
    typer.Option("--since", metavar="AGE", parser=age_value, help="Only start-ups that began so long ago: 30d"),
]
Team = Annotated[str | None, typer.Option("--team", help="Only this team (attribute `team` of the events)")]


def fleet(
    paths: Paths = None,
    period: Annotated[Period, typer.Option("--period", help="Put starts together by day, week or month")] = Period.WEEK,
    since: Since = None,
    team: Team = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Show what start-ups cost by time, stage, team and job, and which nodes are slow again and again.

    Example: bootseer profile fleet /shared/starts --period day --since 14d
    """
    from bootseer.profile import fleet as analysis
    from bootseer.profile import fleet_text, starts

    since_us = 0 if since is None else int((time.time() - since) * 1e6)
    table = starts.load(given_paths(paths))
    report = analysis.analyse(table, period=period.value, since_us=since_us, team=team, limit=limit)
    if as_json:
        print_json(report)
    else:
        print_whole(fleet_text.render(report, limit=limit))


def growth(
    paths: Paths = None,
    at: Annotated[
        int, typer.Option("--at", metavar="GPUS", min=0, help="Say it of this size; default: the largest")
    ] = 0,
    since: Since = None,
    team: Team = None,
    limit: Limit = 20,
    sim: Annotated[
        str,
        typer.Option(
            "--sim",
            metavar="NODES,...",
            help="By a model, what a start takes on so many nodes: the last one in PATH, or that of a measured job",
        ),
    ] = "",
    sites: Annotated[
        list[str] | None,
        typer.Option("--site", metavar="NAME=N", help="With --sim: datanodes, registry_mbit, ... of the site"),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="With --sim: also draw it")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how start-ups grow with the size of jobs, and which share of the GPU time that the jobs held they cost.

    How long a job held its GPUs comes from `bootseer run` or from `bootseer profile import --sacct`.

    Example: bootseer profile growth /shared/starts --at 1024

    Example: bootseer profile growth --sim 8,512,10000 --site datanodes=100
    """
    from bootseer.profile import fleet_text, starts

    if sim:
        if at or since is not None or team is not None:
            raise typer.BadParameter("--at, --since and --team are not for --sim")
        _simulate(paths, sim, sites or [], svg, as_json)
        return
    if sites or svg:
        raise typer.BadParameter("--site and --svg are for --sim")
    from bootseer.profile import growth as analysis

    oldest = 0 if since is None else (time.time() - since) * 1e6
    rows = [one for one in starts.rows(given_paths(paths)) if one.began_us >= oldest and team in (None, one.team)]
    report = analysis.analyse(rows, at=at)
    if as_json:
        print_json(report)
    else:
        print_whole(fleet_text.growth(report, limit=limit))


def _simulate(paths: list[Path] | None, sizes: str, sites: list[str], svg: Path | None, as_json: bool) -> None:
    from bootseer.cli._shared import write_out
    from bootseer.profile.sim import sweep

    found = sweep.of(paths, _counts(sizes, sweep.MOST), sites)
    if svg is not None:
        write_out([sweep.picture(found).encode()], svg)
    if as_json:
        print_json(found)
    else:
        print_whole(sweep.render(found))


def _counts(text: str, most: int) -> list[int]:
    parts = [one.strip() for one in text.split(",")]
    if not all(one.isdecimal() and one.isascii() and 0 < len(one) < 8 and 0 < int(one) <= most for one in parts):
        raise typer.BadParameter(f"--sim {text!r}: name numbers of nodes from 1 to {most:,}, such as 8,512,10000")
    return [int(one) for one in parts]


def check(
    paths: Paths = None,
    baseline: Annotated[
        list[Path] | None, typer.Option("--baseline", metavar="PATH", help="Earlier start-ups, in the same forms")
    ] = None,
    job: Annotated[str | None, typer.Option("--job", help="This job; default: the one that began last")] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="Share by which a part may be slower")] = 0.2,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Seconds by which a part may be slower")] = 2.0,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the last start-up with earlier ones of its job; exit with 1 when it, or one of its stages, is slower.

    Slower is what takes more than the tolerance and more than so many seconds over the median of the baseline.

    Example: bootseer profile check events/ --baseline /shared/starts --junit start-up.xml
    """
    from bootseer.profile import regression, starts

    if not baseline:
        raise typer.BadParameter("name the earlier start-ups", param_hint="--baseline")
    given = [one for one in starts.rows(given_paths(paths)) if job in (None, one.job)]
    if not given:
        raise NotFoundError(f"no start-up of job {job}")
    verdict = regression.check(given[-1], starts.rows(baseline), tolerance=tolerance, seconds=seconds)
    if junit is not None:
        regression.junit(verdict, junit)
    if as_json:
        print_json(verdict)
    else:
        told = [
            (one_line(row.stage), f"{row.seconds:.1f}", f"{row.baseline:.1f}", str(row.starts), f"{row.most:.1f}",
             "slower" if row.slower else "ok")
            for row in verdict.rows
        ]  # fmt: skip
        print_table("", ("stage", "seconds", "median", "of", "at most", "verdict"), told, left=("stage", "verdict"))
    if verdict.slower:
        raise typer.Exit(1)


def given_paths(paths: list[Path] | None) -> list[Path]:
    """The paths, or what BOOTSEER_EVENTS names. Raises `ConfigError` without either."""
    if paths:
        return list(paths)
    held = os.environ.get("BOOTSEER_EVENTS")
    if not held:
        raise ConfigError("no start-ups given", hint="name event files or a folder of them, or set BOOTSEER_EVENTS")
    return [Path(held)]
