"""One row for each start-up, in Parquet: what is kept of its events when a fleet's weeks are looked at. Format 3, the
columns of `Start`; the file's metadata have the key ``bootseer_starts``. Read and written by DuckDB (extra ``fleet``).
Hours are GPU-hours, or node-hours of a start-up whose events name no GPUs (``gpus`` is 0 then)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bootseer.errors import BootseerError, DataError, UnsupportedError, doing
from bootseer.kernel import beneath
from bootseer.profile import analysis, events
from bootseer.profile import files as there
from bootseer.profile.files import Found
from bootseer.wiretypes import known

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from bootseer.profile.report import JobReport

VERSION = "3"
_KEY = "bootseer_starts"
_MEMORY = "500MB"
_BYTES, _ROWS = 1 << 30, 1_000_000
"""Most of one Parquet file; a file of a few kB can say that it has billions of rows."""
_LARGEST = 1e15
"""Seconds, hours and counts of one row, whatever the sign."""
_LIMITS = {"began_us": 1 << 62, "heard_us": 1 << 62}


class StageRow(msgspec.Struct, frozen=True):
    """One stage of a start-up: its share of the start in seconds, its cost, the slowest node, the stragglers."""

    stage: str
    seconds: float
    own_hours: float
    wait_hours: float
    median: float | None
    max: float | None
    slowest: str | None
    stragglers: list[str]


class Start(msgspec.Struct, frozen=True):
    """One start-up. ``startup_seconds`` is None when its first step was not seen to end; the hours are then up to the
    last event, ``heard_us``. ``ended``: how it ended before its first step, or nothing. ``run_seconds``: from its
    beginning to the end of its run, where the run's own end or sacct says that."""

    job: str
    attempt: str
    cycle: int
    hot: bool
    team: str
    began_us: int
    queue_seconds: float | None
    startup_seconds: float | None
    elapsed_seconds: float
    gpus: int
    nodes: int
    nodes_missing: int
    hours: float
    own_hours: float
    wait_hours: float
    gap_hours: float
    heard_us: int
    ended: str
    run_seconds: float | None
    stages: list[StageRow]


_STAGE = (
    "STRUCT(stage VARCHAR, seconds DOUBLE, own_hours DOUBLE, wait_hours DOUBLE, median DOUBLE, max DOUBLE,"
    " slowest VARCHAR,"
    " stragglers VARCHAR[])[]"
)
_COLUMNS = {
    "job": "VARCHAR", "attempt": "VARCHAR", "cycle": "BIGINT", "hot": "BOOLEAN", "team": "VARCHAR",
    "began_us": "BIGINT", "queue_seconds": "DOUBLE", "startup_seconds": "DOUBLE", "elapsed_seconds": "DOUBLE",
    "gpus": "BIGINT", "nodes": "BIGINT", "nodes_missing": "BIGINT", "hours": "DOUBLE", "own_hours": "DOUBLE",
    "wait_hours": "DOUBLE", "gap_hours": "DOUBLE", "heard_us": "BIGINT", "ended": "VARCHAR",
    "run_seconds": "DOUBLE", "stages": _STAGE,
}  # fmt: skip


def of(log: events.EventLog, identity: events.Identity | None = None) -> Iterator[Start]:
    """A row for each start-up in the events, or for that one."""
    parts = log.by_identity()
    for one in parts if identity is None else [identity]:
        yield row(analysis.analyse(parts.get(one, log), one), parts.get(one, log))


def row(report: JobReport, log: events.EventLog) -> Start:
    """The row of the start-up that is all of ``log``. ``team`` is any span's attribute of that name."""
    teams = (attrs.get("team") for attrs in log.spans.attrs)
    return Start(
        job=report.job,
        attempt=report.attempt,
        cycle=report.cycle,
        hot=report.hot,
        team=next((team for team in teams if isinstance(team, str)), ""),
        began_us=report.started_ns // 1000,
        queue_seconds=report.queue_seconds,
        startup_seconds=report.startup_seconds,
        elapsed_seconds=report.elapsed_seconds,
        gpus=report.gpus,
        nodes=len(report.nodes),
        nodes_missing=report.nodes_missing,
        hours=report.cost.total,
        own_hours=report.cost.own,
        wait_hours=report.cost.wait,
        gap_hours=report.cost.gap,
        heard_us=report.heard_ns // 1000,
        ended="; ".join(one.how for one in report.ended[:3])[:200] if not report.goes_on else "",
        run_seconds=_run_seconds(log.spans, report.started_ns),
        stages=[msgspec.convert(stage, known(StageRow), from_attributes=True) for stage in report.stages],
    )


def _run_seconds(spans: events.Spans, began_ns: int) -> float | None:
    """How long the run held its nodes: the last end that a span of its nodes or of its command was told of."""
    ends = [
        spans.begin.wall[place] / 1e9 + ran
        for place, attrs in enumerate(spans.attrs)
        if isinstance(ran := attrs.get("run_seconds"), int | float) and 0 < ran < _LARGEST
        if spans.begin.wall[place] >= 0
    ]
    return max(max(ends) - began_ns / 1e9, 0.0) if ends else None


def connect() -> DuckDBPyConnection:
    """A database in memory that loads nothing from a network. Raises `UnsupportedError` without DuckDB."""
    try:
        import duckdb
    except ImportError:
        raise UnsupportedError(
            "views of many start-ups need the package duckdb", hint="pip install 'bootseer[fleet]'"
        ) from None
    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false", "autoload_known_extensions": "false", "memory_limit": _MEMORY,
        "temp_directory": "",
    }  # fmt: skip
    return duckdb.connect(config=config)


def compact(paths: Sequence[Path]) -> tuple[bytes, int]:
    """What `load` reads as the content of one Parquet file, and the number of start-ups."""
    connection = load(paths)
    with doing("make a Parquet file"), tempfile.TemporaryDirectory(prefix="bootseer-") as folder:
        made = Path(folder) / "starts.parquet"
        with _said("cannot make a Parquet file"):
            connection.execute(
                f"COPY (SELECT * FROM starts ORDER BY began_us) TO {_quoted(str(made))}"
                f" (FORMAT parquet, COMPRESSION zstd, KV_METADATA {{{_KEY}: '{VERSION}'}})"
            )
        return made.read_bytes(), _count(connection)


def load(paths: Sequence[Path | Found]) -> DuckDBPyConnection:
    """A database with the table ``starts``: of Parquet files, event files and folders of both; each start-up once: of
    two rows the complete one counts, then the one that saw more. Raises `NotFoundError` for a path that does not exist,
    `DataError` for a file that is neither and when there is no start-up at all."""
    made: list[Start] = []
    written: list[Found] = []
    for path in paths:
        found = files(path)
        written += found[0]
        if found[1]:
            made += of(events.read(found[1]))
    connection = table(made)
    for file in written:
        _take_parquet(connection, file)
    connection.execute(
        "DELETE FROM starts WHERE rowid NOT IN"
        " (SELECT first(rowid ORDER BY startup_seconds IS NULL, elapsed_seconds DESC)"
        " FROM starts GROUP BY job, attempt, cycle)"
    )
    if not _count(connection):
        raise DataError(
            "no start-up in " + (", ".join(map(str, paths)) or "no file"),
            hint="name event files (*.jsonl), files of `bootseer profile export --format parquet`, or folders of them",
        )
    return connection


def table(made: Sequence[Start]) -> DuckDBPyConnection:
    """A database with these rows in the table ``starts``."""
    connection = connect()
    with tempfile.NamedTemporaryFile() as lines:
        lines.writelines(msgspec.json.encode(row) + b"\n" for row in made)
        lines.flush()
        _take_lines(connection, lines.name)
    return connection


def rows(paths: Sequence[Path | Found]) -> list[Start]:
    """Every start-up in what `load` reads, the oldest first. Raises what it does, and `DataError` for a row that is no
    start-up."""
    found = load(paths).execute(f"SELECT {', '.join(_COLUMNS)} FROM starts ORDER BY began_us").fetchall()
    try:
        return [_sane(msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), known(Start))) for row in found]
    except (msgspec.ValidationError, ValueError) as exc:
        where = ", ".join(map(str, paths))
        raise DataError(
            f"a row of {where} is no start-up: {exc}", hint="write the file again from the events"
        ) from None


def fuller(one: Start, other: Start) -> bool:
    """Whether ``one`` says more of the same start-up: it is complete and the other is not, or it saw more."""
    return (one.startup_seconds is None, -one.elapsed_seconds) < (other.startup_seconds is None, -other.elapsed_seconds)


def _count(connection: DuckDBPyConnection) -> int:
    row = connection.execute("SELECT count(*) FROM starts").fetchone()
    return int(row[0]) if row else 0


def files(path: Path | Found) -> tuple[list[Found], list[Found]]:
    """Parquet files and event files that a path names. Raises `NotFoundError` when it does not exist."""
    found = [path] if isinstance(path, Found) else list(there.find(path, (".parquet", ".jsonl")))
    parquet = [file for file in found if file.ending == ".parquet"]
    return parquet, [file for file in found if file.ending != ".parquet"]


def _sane(row: Start) -> Start:
    """The row, if its numbers can be added up and shown. Raises `ValueError`."""
    for one in (row, *row.stages):
        for name in one.__struct_fields__:
            value = getattr(one, name)
            if isinstance(value, int | float) and not abs(value) <= _LIMITS.get(name, _LARGEST):  # NaN
                raise ValueError(f"{name} is {value}")
            if isinstance(value, str) and len(value) > events.LONGEST_NAME:
                raise ValueError(f"{name} has {len(value)} characters")
    return row


def _take_lines(connection: DuckDBPyConnection, name: str) -> None:
    columns = ", ".join(f"{column} {kind}" for column, kind in _COLUMNS.items())
    shape = ", ".join(f"{column}: '{kind}'" for column, kind in _COLUMNS.items())
    connection.execute(f"CREATE TABLE starts ({columns})")
    connection.execute(
        f"INSERT INTO starts SELECT * FROM read_json({_quoted(name)}, format='newline_delimited', columns={{{shape}}})"
    )


def _take_parquet(connection: DuckDBPyConnection, file: Found) -> None:
    with doing(f"read {file}"):
        fd = file.open()
    try:
        if os.fstat(fd).st_size > _BYTES:
            raise DataError(f"{file} has more than {_BYTES} bytes", hint="write the start-ups into several files")
        name = beneath.shown(fd)
        with _said(f"cannot read {file}", DataError):
            told = connection.execute(
                "SELECT decode(value) FROM parquet_kv_metadata(?) WHERE decode(key) = ?", [name, _KEY]
            ).fetchall()
            if told != [(VERSION,)]:
                what = f"of version {told[0][0]!r}, this is {VERSION}" if told else "not of `bootseer profile export`"
                raise DataError(f"{file} is {what}", hint="write it again from the events")
            more = connection.execute(
                f"INSERT INTO starts SELECT {', '.join(_COLUMNS)} FROM read_parquet({_quoted(name)},"
                f" hive_partitioning=false) LIMIT {_ROWS + 1}"
            ).fetchone()
        if more is not None and more[0] > _ROWS:
            raise DataError(f"{file} has more than {_ROWS} rows", hint="write the start-ups into several files")
    finally:
        os.close(fd)


@contextlib.contextmanager
def _said(what: str, kind: type[BootseerError] = BootseerError) -> Iterator[None]:
    """What DuckDB has to say, as one line of ours."""
    import duckdb

    try:
        yield
    except duckdb.Error as exc:
        raise kind(f"{what}: {str(exc).splitlines()[0]}") from None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
