"""Many start-ups at once: hours lost by time, stage and team, starts per job, nodes that are slow again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Period = Literal["day", "week", "month"]


class Group(msgspec.Struct, frozen=True):
    """Start-ups that have something in common. Percentiles are of start-up seconds, None where none is known.
    The hours of those that did not come to a first step are ``unfinished_hours``, and in no other sum."""

    name: str
    starts: int
    unfinished: int
    unfinished_hours: float
    hours: float
    own_hours: float
    wait_hours: float
    gap_hours: float
    p50: float | None
    p90: float | None
    p99: float | None


class StageGroup(msgspec.Struct, frozen=True):
    """One stage over all start-ups that came to a first step: its cost, its share of a start, stragglers."""

    stage: str
    starts: int
    own_hours: float
    wait_hours: float
    p50: float | None
    p90: float | None
    p99: float | None
    max_over_median: float | None
    """Median over the start-ups of two nodes or more."""
    straggler_starts: int


class JobGroup(msgspec.Struct, frozen=True):
    """One job: how often it started, and what that cost."""

    job: str
    starts: int
    hot: int
    hours: float


class Offender(msgspec.Struct, frozen=True):
    """A node that was a straggler in more than one start-up, and in which stages."""

    node: str
    starts: int
    stages: list[str]


class FleetReport(msgspec.Struct, frozen=True):
    """``total`` is over everything. Periods are of UTC. Hours: GPU-hours, node-hours for starts that name no GPUs."""

    period: Period
    total: Group
    jobs: int
    without_gpus: int
    """Start-ups whose hours are node-hours."""
    starts_per_job: dict[str, float]
    """``p50``, ``p90`` and ``max``."""
    periods: list[Group]
    stages: list[StageGroup]
    teams: list[Group]
    top_jobs: list[JobGroup]
    offenders: list[Offender]


_PERCENTILES = "quantile_cont({0}, 0.5), quantile_cont({0}, 0.9), quantile_cont({0}, 0.99)"
_DONE = "FILTER (startup_seconds IS NOT NULL)"
_GROUP = (
    "count(*), count(*) FILTER (startup_seconds IS NULL),"
    " coalesce(sum(hours) FILTER (startup_seconds IS NULL), 0.0),"
    + "".join(f" coalesce(sum({name}) {_DONE}, 0.0)," for name in ("hours", "own_hours", "wait_hours", "gap_hours"))
    + _PERCENTILES.format("startup_seconds")
)
NAMES = {"day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m"}
"""How periods are named, as for `time.strftime`."""


def analyse(
    connection: DuckDBPyConnection, *, period: Period = "week", since_us: int = 0, team: str | None = None,
    limit: int = 20,
) -> FleetReport:  # fmt: skip
    """Look at the table ``starts`` of ``connection`` (`starts.load`), which keeps its rows. ``since_us``: only starts
    that began then or later (us since 1970). At most ``limit`` jobs and nodes are named (0: all)."""
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE chosen AS SELECT * FROM starts WHERE began_us >= ? AND (? IS NULL OR team = ?)",
        [max(since_us, 0), team, team],  # an age may be longer than the database counts
    )
    most = limit or 1 << 62

    def groups(by: str, order: str) -> list[Group]:
        rows = connection.execute(
            f"SELECT {by} AS name, {_GROUP} FROM chosen GROUP BY name ORDER BY {order}"
        ).fetchall()
        return [Group(*row) for row in rows]

    jobs = connection.execute(
        f"SELECT job, count(*), count(*) FILTER (hot), coalesce(sum(hours) {_DONE}, 0.0) FROM chosen"
        " GROUP BY job ORDER BY 4 DESC, job LIMIT ?",
        [most],
    ).fetchall()
    stages = connection.execute(
        f"SELECT s.stage, count(*), sum(s.own_hours), sum(s.wait_hours), {_PERCENTILES.format('s.seconds')},"
        " median(s.max / nullif(s.median, 0)) FILTER (nodes > 1), count(*) FILTER (len(s.stragglers) > 0)"
        " FROM (SELECT nodes, unnest(stages) AS s FROM chosen"
        " WHERE startup_seconds IS NOT NULL) GROUP BY s.stage ORDER BY 3 DESC, 1"
    ).fetchall()
    offenders = connection.execute(
        "SELECT node, count(DISTINCT start), list_sort(list_distinct(list(stage))) FROM"
        " (SELECT start, s.stage AS stage, unnest(s.stragglers) AS node FROM"
        " (SELECT rowid AS start, unnest(stages) AS s FROM chosen)) GROUP BY node HAVING count(DISTINCT start) > 1"
        " ORDER BY 2 DESC, 1 LIMIT ?",
        [most],
    ).fetchall()
    per_job = connection.execute(
        "SELECT count(*), quantile_disc(n, 0.5), quantile_disc(n, 0.9), max(n) FROM"
        " (SELECT count(*) AS n FROM chosen GROUP BY job)"
    ).fetchone()
    without = connection.execute("SELECT count(*) FROM chosen WHERE gpus = 0").fetchone()
    total = groups("''", "name") or [Group("", 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None, None)]
    teams = groups("team", "5 DESC, name")
    assert per_job is not None
    assert without is not None
    return FleetReport(
        period=period,
        total=total[0],
        jobs=per_job[0],
        without_gpus=without[0],
        starts_per_job={} if not per_job[0] else dict(zip(("p50", "p90", "max"), per_job[1:], strict=True)),
        periods=groups(f"strftime(make_timestamp(began_us), '{NAMES[period]}')", "name"),
        stages=[StageGroup(*row) for row in stages],
        teams=teams if any(group.name for group in teams) else [],
        top_jobs=[JobGroup(*row) for row in jobs],
        offenders=[Offender(*row) for row in offenders],
    )
