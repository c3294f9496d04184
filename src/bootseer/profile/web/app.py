"""Jobs, Job, Compare, Fleet and Growth as pages, JSON and CSV, rendered here; and the door for events that are sent.
Names of jobs, nodes and stages are input: templates escape all, and the content security policy allows this server's
own script and nothing else. Who may read is decided by `bootseer.profile.web.access`."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from bootseer.errors import BootseerError, ConfigError, NotFoundError, UnavailableError
from bootseer.profile import card, chart, compare, fleet, growth, page, prometheus
from bootseer.profile.events import identity_text
from bootseer.profile.index import Index, State, goes_on, key
from bootseer.profile.starts import Start
from bootseer.profile.web import figures, inbox
from bootseer.profile.web.access import Access
from bootseer.units import one_line, parse_age

_HERE = Path(__file__).parent
_ROWS = 100
"""Start-ups on one page of Jobs."""
_STREAMS = 64
"""Pages of one visitor, who is an address, that are kept up to date at once."""
_OFTEN = 10
"""Seconds after which the page of a start that goes on is made anew."""
_BEAT = 15
"""Seconds after which a line says that nothing has changed, and shows whether anybody still listens."""


def make(index: Index, access: Access, received: Path | None = None) -> Starlette:
    """The application. ``received``: the folder for events that are sent here; None takes none."""
    pages = _Pages(index)
    routes = [
        Route("/", pages.jobs),
        Route("/jobs.{form:str}", pages.jobs),
        Route("/job/{key:str}", pages.job),
        Route("/compare/{one:str}/{other:str}", pages.compare),
        Route("/compare", pages.chosen),
        Route("/fleet", pages.fleet),
        Route("/fleet.{form:str}", pages.fleet),
        Route("/growth", pages.growth),
        Route("/growth.{form:str}", pages.growth),
        Route("/metrics", pages.metrics),
        Route("/live", pages.live),
        Route("/login", access.login, methods=["POST"]),
        Mount("/static", StaticFiles(directory=_HERE / "static")),
    ]
    if received is not None:
        routes.append(Route("/events", inbox.Inbox(received).take, methods=["POST"]))

    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        stop = threading.Event()
        watcher = threading.Thread(target=index.watch, args=(stop,), name="bootseer-index", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()

    return Starlette(
        routes=routes,
        lifespan=life,
        middleware=[Middleware(access.guard, page=pages.login)],
        exception_handlers={BootseerError: pages.failed, 404: pages.unknown},
    )


class _Pages:
    """Functions that are not ``async`` run in a thread of their own each: analysis may take seconds."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._streams: Counter[str] = Counter()
        loader = jinja2.FileSystemLoader(_HERE / "templates")
        self._templates = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        self._templates.filters |= {
            "line": lambda value: page.short(str(value)),
            "short": page.short,
            "when": _when,
            "ago": _ago,
            "standing": _standing,
            "number": _number,
            "percent": lambda value, digits=2: "-" if value is None else f"{100 * value:.{digits}f} %",
        }
        self._templates.globals |= {
            "style": Markup(page.STYLE),
            "key": _key,
            "figures": lambda given: Markup(page.figures(given)),
            "identity_text": identity_text,
        }

    def jobs(self, request: Request) -> Response:
        """All start-ups: ``q`` is part of a job's or team's name, ``show`` one of `_SHOWS`, ``sort`` one of `_SORTS`,
        ``page`` counts from 1."""
        state, query = self._index.state, request.query_params.get("q", "")
        show, sort = request.query_params.get("show", "all"), request.query_params.get("sort", "latest")
        for name, one, known in (("show", show, _SHOWS), ("sort", sort, _SORTS)):
            if one not in known:
                raise ConfigError(f"{name} {one_line(one)!r} is not known", hint=f"use {', '.join(known)}")
        shown_as = _SHOWS[show]
        found = [row for row in state.rows.values() if (query in row.job or query in row.team) and shown_as(row)]
        if sort != "latest":
            found.sort(key=_SORTS[sort], reverse=True)
        form = request.path_params.get("form")
        _only_whole(form, state)
        if form == "json":
            return _json(found)
        if form == "csv":
            return _csv(_FLAT, ([getattr(row, name) for name in _FLAT] for row in found))
        _only_html(form)
        number = min(max(_whole(request, "page", 1), 1), max(-(-len(found) // _ROWS), 1))
        shown = found[(number - 1) * _ROWS : number * _ROWS]
        return self._page(
            "jobs.html", request, title="Start-ups", rows=shown, query=query, count=len(found), page=number,
            sort=sort, show=show, shows=tuple(_SHOWS), stats=figures.of_starts(found),
            pages=-(-len(found) // _ROWS), problems=state.problems, whole=state.whole, mark=state.version,
        )  # fmt: skip

    def job(self, request: Request) -> Response:
        name, dot, form = request.path_params["key"].partition(".")
        row = self._index.row(name)
        look = self._index.look(name)
        if form == "json":
            return _json(look.report if look else row)
        if form == "csv":
            return _csv(*_cells(row, look))
        _only_html(form if dot else None)
        title = identity_text(row.job, row.attempt, row.cycle)
        others = [one for one in self._index.state.rows.values() if one.job == row.job and one is not row][:_ROWS]
        body = Markup(look.body) if look else None  # `page` escapes
        return self._page("job.html", request, title=title, row=row, body=body, others=others, mark=_mark(row))

    def chosen(self, request: Request) -> Response:
        """The form's two start-ups, as an address of their own."""
        one, other = request.query_params.get("one", ""), request.query_params.get("other", "")
        self._index.row(one), self._index.row(other)
        return RedirectResponse(f"/compare/{one}/{other}", 303)

    def compare(self, request: Request) -> Response:
        name, dot, form = request.path_params["other"].partition(".")
        before, after = self._index.row(request.path_params["one"]), self._index.row(name)
        found = compare.rows(before, after)
        if form == "json":
            return _json({"before": before, "after": after, "rows": found})
        if form == "csv":
            return _csv(("stage", "before", "after", "change"), ((r.name, r.before, r.after, r.change) for r in found))
        _only_html(form if dot else None)
        return self._page(
            "compare.html", request, title="Two start-ups", before=before, after=after, rows=found, whole=found[-1],
            mark=_mark(before) + _mark(after),
        )  # fmt: skip

    def fleet(self, request: Request) -> Response:
        """``period``: day, week or month; ``since``: an age such as 30d; ``team``."""
        query, state = request.query_params, self._index.state
        form = request.path_params.get("form")
        _only_whole(form, state)
        period = query.get("period", "week")
        if period not in ("day", "week", "month"):
            raise ConfigError(f"period {one_line(period)!r} is not known", hint="use day, week or month")
        since, team = _since(request), query.get("team") or None
        report = fleet.analyse(self._index.table(), period=period, since_us=since, team=team)  # type: ignore[arg-type]
        if form == "json":
            return _json(report)
        if form == "csv":
            names = fleet.Group.__struct_fields__
            return _csv(names, ([getattr(group, name) for name in names] for group in report.periods))
        _only_html(form)
        rows = (row for row in state.rows.values() if row.began_us >= since and team in (None, row.team))
        lost = growth.lost_by(rows, fleet.NAMES[period])
        trend = chart.stages([(one.name, {s: 100 * part for s, part in one.stages.items()}) for one in lost])
        return self._page(
            "fleet.html", request, title="Fleet", report=report, query=query, problems=state.problems,
            lost={one.name: one for one in lost}, stats=figures.of_fleet(report, lost),
            trend=Markup(trend), bars=Markup(_bars(report.periods)), whole=state.whole, mark=state.version,
        )  # fmt: skip

    def growth(self, request: Request) -> Response:
        """``at``: GPUs; ``since``; ``team``; ``figure``: one of `figures.OF_STAGES`, of each stage."""
        query, state, since = request.query_params, self._index.state, _since(request)
        form = request.path_params.get("form")
        _only_whole(form, state)
        rows = [
            row for row in state.rows.values() if row.began_us >= since and query.get("team") in (None, "", row.team)
        ]
        report = growth.analyse(rows, at=_whole(request, "at", 0))
        if form == "json":
            return _json(report)
        if form == "csv":
            names = growth.StageGrowth.__struct_fields__
            return _csv(
                ("size", "unit", *names),
                (
                    [size.name, size.unit, *(getattr(s, name) for name in names)]
                    for size in report.sizes
                    for s in size.stages
                ),
            )
        _only_html(form)
        unit, sizes = figures.main(report.sizes)
        bars = [chart.Bar(one.name, one.own_seconds, one.wait_seconds, one.gap_seconds) for one in sizes]
        shares = [
            (one.name, {s.stage: 100 * ((s.own_share or 0) + (s.wait_share or 0)) for s in one.stages})
            for one in sizes
            if one.share
        ]
        figure = query.get("figure", "") if query.get("figure") in figures.OF_STAGES else next(iter(figures.OF_STAGES))
        matrix = figures.matrix(sizes, figures.OF_STAGES[figure])
        return self._page(
            "growth.html", request, title="Growth", report=report, query=query, problems=state.problems,
            bars=Markup(chart.bars(bars, "seconds")), whole=state.whole, mark=state.version,  # `chart` escapes
            lost=Markup(chart.stages(shares)), figure=figure, known=tuple(figures.OF_STAGES), matrix=matrix,
            most=max((cell or 0.0 for _, cells in matrix for cell in cells), default=0.0),
            chosen=report.chosen, unit=unit, main=sizes, stats=figures.of_growth(report),
        )  # fmt: skip

    def metrics(self, _: Request) -> Response:
        """For a Prometheus that asks here."""
        state = self._index.state
        _only_whole("text", state)
        text = prometheus.text(state.rows.values())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def live(self, request: Request) -> Response:
        """Server-sent events: one whenever what the page shows has another mark than ``mark``."""
        visitor = request.client.host if request.client else ""
        if self._streams[visitor] >= _STREAMS:
            return PlainTextResponse("too many pages are open\n", 503, {"Retry-After": "60"})
        names = [name for name in request.query_params.get("keys", "").split(",") if name][:2]
        return StreamingResponse(
            self._changes(visitor, names, request.query_params.get("mark", "")),
            media_type="text/event-stream", headers={"Cache-Control": "no-store"},
        )  # fmt: skip

    async def _changes(self, visitor: str, names: Sequence[str], last: str) -> AsyncIterator[str]:
        self._streams[visitor] += 1
        try:
            yield "retry: 5000\n\n"
            quiet = 0
            while True:
                state = self._index.state
                now = "".join(_mark(state.rows.get(name)) for name in names) if names else str(state.version)
                if now != last:
                    last, quiet = now, 0
                    yield f"data: {now}\n\n"
                elif quiet >= _BEAT:
                    quiet = 0
                    yield ": nothing new\n\n"
                await asyncio.sleep(1)
                quiet += 1
        finally:
            self._streams[visitor] -= 1
            self._streams += Counter()  # without visitors that have none

    def login(self, request: Request, why: str = "") -> Response:
        return self._page("login.html", request, 401, title="A token is needed", why=why)

    async def failed(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, BootseerError)
        status = next((status for kind, status in _STATUS.items() if isinstance(exc, kind)), 500)
        answer = self._page("message.html", request, status, title=str(exc), hint=exc.hint or "")
        if status == 503:
            answer.headers["Retry-After"] = "2"
        return answer

    async def unknown(self, request: Request, exc: Exception) -> Response:
        return self._page("message.html", request, 404, title="There is no such page", hint="")

    def _page(self, template: str, request: Request, status: int = 200, **values: Any) -> Response:
        query = request.scope["query_string"].decode("latin-1")
        held = {"path": request.scope["path"], "query_text": query, "mark": "", **values}
        text = self._templates.get_template(template).render(held)
        return Response(text, status, media_type="text/html; charset=utf-8")


_STATUS: dict[type[BootseerError], int] = {NotFoundError: 404, ConfigError: 400, UnavailableError: 503}
_SHOWS: dict[str, Callable[[Start], bool]] = {
    "all": lambda row: True,
    "going on": goes_on,
    "no first step": lambda row: row.startup_seconds is None and not goes_on(row),
    "with stragglers": lambda row: any(stage.stragglers for stage in row.stages),
}
"""Which rows of Jobs are shown."""
_SORTS: dict[str, Callable[[Start], float]] = {
    "latest": lambda row: row.began_us,
    "longest": lambda row: row.elapsed_seconds if row.startup_seconds is None else row.startup_seconds,
    "lost": lambda row: row.hours,
    "waiting": lambda row: row.wait_hours,
}
"""What the rows of Jobs may be sorted by; they are kept with the latest first."""
_FLAT = tuple(name for name in Start.__struct_fields__ if name != "stages")


def _key(row: Start) -> str:
    return key((row.job, row.attempt, row.cycle))


def _mark(row: Start | None) -> str:
    """Another text whenever the row is another one."""
    if row is None:
        return ""
    said = f"{row.elapsed_seconds:.3f}.{row.nodes}.{row.own_hours:.6f}.{row.startup_seconds}"
    return f"{said}.{int(time.time() // _OFTEN)}" if goes_on(row) else said


def _ago(us: int) -> str:
    return f"{card.ago_text(max(time.time() - us / 1e6, 0))} ago"


def _standing(row: Start) -> str:
    """How far a start-up has come, in a few words."""
    if row.startup_seconds is not None:
        return f"{row.startup_seconds:.1f}"
    if not goes_on(row):
        return f"no first step: {page.short(row.ended, 40) or 'silent'}"
    now = time.time()
    heard = card.ago_text(max(now - row.heard_us / 1e6, 0))
    return f"goes on, {card.ago_text(max(now - row.began_us / 1e6, 0))}; heard {heard} ago"


def _cells(row: Start, look: Any) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    """Node by stage, or the stages where only the row is known."""
    if look is None:
        names = (
            tuple(name for name in type(row.stages[0]).__struct_fields__ if name != "stragglers") if row.stages else ()
        )
        return names, ([getattr(stage, name) for name in names] for stage in row.stages)
    return ("node", "stage", "own_seconds", "wait_seconds", "state", "slowest_rank"), (
        (node.node, stage, cell.own, cell.wait, cell.state, cell.slowest_rank)
        for node in look.report.nodes
        for stage, cell in node.stages.items()
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value) + b"\n", media_type="application/json")


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Response:
    """A cell that a spreadsheet would take for a formula is text."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(head)
    for row in rows:
        writer.writerow(
            [f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" and cell else cell for cell in row]
        )
    return Response(out.getvalue(), media_type="text/csv; charset=utf-8")


def _only_html(form: str | None) -> None:
    if form is not None:
        raise NotFoundError("there is no page in this form", hint="use .json or .csv")


def _only_whole(form: str | None, state: State) -> None:
    """Pages show what is known so far; a program is told to wait, as it would take that for all there is."""
    if form is not None and not state.whole:
        raise UnavailableError("the events are still being read", hint="ask again in some seconds")


def _whole(request: Request, name: str, otherwise: int) -> int:
    given = request.query_params.get(name, "")
    return int(given) if given.isdecimal() and given.isascii() and len(given) < 8 else otherwise


def _since(request: Request) -> int:
    age = request.query_params.get("since")
    return int((time.time() - parse_age(age)) * 1e6) if age else 0


def _bars(groups: Sequence[fleet.Group]) -> str:
    return chart.bars([chart.Bar(g.name, g.own_hours, g.wait_hours, g.gap_hours) for g in groups], "hours")


def _when(us: int) -> str:
    try:
        return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a file may say anything
        return "-"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
