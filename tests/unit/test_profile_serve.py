"""`bootseer profile serve` as a process: what its pages say, who may read them, what it takes in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from uvicorn.server import ServerState

from bootseer.errors import BootseerError
from bootseer.profile import analysis, compare, events, files, send, starts
from bootseer.profile import index as index_module
from bootseer.profile.files import Found
from bootseer.profile.index import Index, key
from bootseer.profile.web import app, connection, inbox
from bootseer.profile.web.access import Access
from support import forked
from support.pages import TOKEN, serving
from support.startups import StartUp

HOSTILE = "<script>alert(1)</script>/../../etc\"'" + "x" * 100


def start_up(
    job: str = "llama", cycle: int = 0, *, env: float = 30.0, complete: bool = True, zero: float = 0.0
) -> StartUp:
    made = StartUp(job, "7", cycle, zero=zero)
    for node in ("n1", "n2"):
        made.span(node, "image", 0, 20)
        made.span(node, "env", 20, 20 + env)
        made.span(node, "first_step", 20 + env, 30 + env if complete else None)
    return made


def looked(paths: list[Path]) -> Index:
    """An index that has read all there is."""
    index = Index(paths)
    index.refresh()
    return index


def refused(*args: str | Path) -> tuple[int, str]:
    done = forked.cli("profile", "serve", *args, env={**os.environ, "BOOTSEER_EVENTS": ""})
    return done.returncode, done.stderr


def wait_for(true: object, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < until, "it does not come true"
        time.sleep(0.1)


def test_every_page_and_its_other_forms(tmp_path: Path) -> None:
    first = start_up().write(tmp_path / "a.jsonl")
    start_up(cycle=1, env=10, zero=1000).write(tmp_path / "b.jsonl")
    one, other = key(("llama", "7", 0)), key(("llama", "7", 1))
    with serving(tmp_path) as server:
        jobs = server.page("/")
        assert jobs.index(f"/job/{other}") < jobs.index(f"/job/{one}")  # the latest first
        assert [row["cycle"] for row in json.loads(server.page("/jobs.json"))] == [1, 0]
        assert [row["cycle"] for row in json.loads(server.page("/jobs.json?sort=lost"))] == [0, 1]
        longest = server.page("/?sort=longest")
        assert longest.index(f"/job/{one}") < longest.index(f"/job/{other}")
        assert "<dd>2<small>of 2</small></dd>" in longest
        assert server.ask("/?sort=none")[0] == 400
        assert server.page("/jobs.csv").splitlines()[0].startswith("job,attempt,cycle,")
        job = server.page(f"/job/{one}")
        assert "Start-up of job llama, attempt 7, cycle 0" in job
        assert "<svg" in job
        assert f"/compare/{other}/{one}" in job
        assert json.loads(server.page(f"/job/{one}.json"))["startup_seconds"] == 60.0
        assert "n2,env,30.0,0.0,DONE," in server.page(f"/job/{one}.csv")
        rows = {row["name"]: row for row in json.loads(server.page(f"/compare/{one}/{other}.json"))["rows"]}
        assert (rows["env"]["before"], rows["env"]["after"]) == (30.0, 10.0)
        assert "-67 %" in server.page(f"/compare/{one}/{other}")
        assert server.ask(f"/compare?one={one}&other={other}")[1]["Location"] == f"/compare/{one}/{other}"
        fleet = json.loads(server.page("/fleet.json"))
        assert fleet["total"]["starts"] == 2
        assert fleet["total"]["hours"] == pytest.approx(2 * 8 * 100 / 3600)
        assert "Jobs that lost most" in server.page("/fleet?period=day")
        assert server.page("/fleet.csv").startswith("name,starts,")
        assert "Mean start-up by GPUs" in server.page("/growth")
        assert server.page("/growth.csv").startswith("size,unit,stage,")
        assert json.loads(server.page("/growth.json"))["starts"] == fleet["total"]["starts"]
        assert server.ask("/growth?at=1000000")[0] == 404
        assert "There is no start-up in this time" in server.page("/growth?team=nobody")
        assert 'bootseer_startups_total{kind="cold",complete="true"} 2' in server.page("/metrics")
        assert "EventSource" in server.ask("/static/live.js")[2]
        first.unlink()
        wait_for(lambda: len(json.loads(server.page("/jobs.json"))) == 1)


@pytest.mark.parametrize(
    "path", ["/job/nothing", "/job/nothing.json", "/compare/a/b", "/nothing", "/jobs.xml", "/static/../app.py"]
)
def test_what_is_not_there_is_said_in_one_line(path: str, tmp_path: Path) -> None:
    start_up().write(tmp_path / "a.jsonl")
    with serving(tmp_path) as server:
        status, _, text = server.ask(path)
        assert status == 404
        assert "Traceback" not in text
        assert server.ask("/fleet?period=hour")[0] == 400
        assert server.ask("/fleet?since=soon")[0] == 400


def test_start_ups_are_narrowed(tmp_path: Path) -> None:
    start_up("whole").write(tmp_path / "a.jsonl")
    start_up("crashed", complete=False).write(tmp_path / "b.jsonl")
    going = start_up("going", zero=time.time() - 1_750_000_060, complete=False)
    going.write(tmp_path / "c.jsonl")
    with serving(tmp_path) as server:
        for show, jobs in (
            ("all", {"whole", "crashed", "going"}), ("going+on", {"going"}), ("no+first+step", {"crashed"}),
            ("with+stragglers", set()),
        ):  # fmt: skip
            assert {row["job"] for row in json.loads(server.page(f"/jobs.json?show={show}"))} == jobs
        page = server.page("/?show=no+first+step&q=crash")
        assert "crashed" in page
        assert "whole" not in page
        assert 'href="/?q=crash&amp;show=no+first+step&amp;sort=lost"' in page
        assert server.ask("/?show=none")[0] == 400


def test_names_are_only_names(tmp_path: Path) -> None:
    made = StartUp(HOSTILE, "=1+1", 0)
    made.span(HOSTILE, HOSTILE, 0, 10, team="<b>team")
    made.write(tmp_path / "a.jsonl")
    name = key((HOSTILE, "=1+1", 0))
    with serving(tmp_path) as server:
        for path in (
            "/",
            f"/job/{name}",
            f"/compare/{name}/{name}",
            "/fleet",
            "/growth",
            f"/?q={urllib.parse.quote('<script>')}",
        ):
            text = server.page(path)
            assert "<script>alert" not in text
            assert "<b>team" not in text
        assert "&lt;script&gt;alert(1)" in server.page(f"/job/{name}")
        assert ",'=1+1," in server.page("/jobs.csv")


def test_an_empty_folder_and_what_cannot_be_read_are_shown_as_that(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "There is no start-up here yet" in server.page("/")
        assert "There is no start-up in this time" in server.page("/fleet")
        (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
        (tmp_path / "bad.parquet").write_text("no parquet")
        start_up().write(tmp_path / "good.jsonl")
        wait_for(lambda: "llama" in server.page("/"))
        text = server.page("/")
        assert "2 files or start-ups left out" in text
        assert "no events in" in text
        assert "cannot read" in text


def test_a_page_is_told_when_its_start_up_goes_on(tmp_path: Path) -> None:
    begun = start_up(complete=False)
    begun.write(tmp_path / "a.jsonl")
    start_up("other").write(tmp_path / "b.jsonl")
    name = key(("llama", "7", 0))
    with serving(tmp_path) as server:
        text = server.page(f"/job/{name}")
        assert "This start-up has not ended" in text
        mark = text.partition('data-mark="')[2].partition('"')[0]
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(f"GET /live?mark={mark}&keys={name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            said = b""
            while b"retry:" not in said:
                said += sock.recv(4096)
            assert b"content-type: text/event-stream" in said.lower()
            start_up("other", cycle=1).write(tmp_path / "c.jsonl")
            wait_for(lambda: len(json.loads(server.page("/jobs.json"))) == 3)
            time.sleep(1.5)  # it looks once a second
            assert not select.select([sock], [], [], 0)[0]
            start_up().write(tmp_path / "a.jsonl")
            while b"data:" not in said:
                said += sock.recv(4096)
        assert "This start-up has not ended" not in server.page(f"/job/{name}")


def test_with_a_token_only_who_knows_it_reads(tmp_path: Path) -> None:
    start_up().write(tmp_path / "a.jsonl")
    (tmp_path / "token").write_text(TOKEN + "\n")
    with serving(tmp_path, "--token-file", tmp_path / "token") as server:
        for path in ("/", "/jobs.json", "/fleet", "/live", "/job/" + key(("llama", "7", 0))):
            status, _, text = server.ask(path)
            assert status == 401
            assert "llama" not in text
        assert server.ask("/", Authorization="Bearer wrong")[0] == 401
        assert "llama" in server.ask("/", Authorization=f"Bearer {TOKEN}")[2]
        form = server.ask("/fleet?period=day", Accept="text/html")
        assert form[0] == 401
        assert 'name="then" value="/fleet?period=day"' in form[2]
        wrong = urllib.parse.urlencode({"token": "wrong", "then": "/"}).encode()
        assert server.ask("/login", "POST", wrong)[0] == 401
        right = urllib.parse.urlencode({"token": TOKEN, "then": "/fleet"}).encode()
        status, headers, _ = server.ask("/login", "POST", right)
        assert (status, headers["Location"]) == (303, "/fleet")
        cookie = headers["Set-Cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=lax" in cookie.lower()
        assert TOKEN not in cookie
        assert "llama" in server.ask("/", Cookie=cookie.partition(";")[0])[2]
        away = urllib.parse.urlencode({"token": TOKEN, "then": "//elsewhere.example/"}).encode()
        assert server.ask("/login", "POST", away)[1]["Location"] == "/"
        assert server.ask("/login", "POST", b"x" * 10_000)[0] == 413


@pytest.mark.parametrize("host", ["x/static/", "x/login?", "[", "127.0.0.1"])
def test_the_host_that_a_request_names_opens_no_page(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the oldest starlette that we allow, which makes a request's URL of that header."""
    monkeypatch.setattr(
        Request, "url", property(lambda self: urllib.parse.urlsplit(f"http://{host}{self.scope['path']}"))
    )
    start_up().write(tmp_path / "a.jsonl")
    index = looked([tmp_path])
    assert _status(app.make(index, Access(TOKEN)), "/jobs.json", host) == 401
    assert _status(app.make(index, Access(TOKEN)), "/static/live.js", host) == 200
    assert _status(app.make(index, Access("")), "/jobs.json", host) == (200 if host == "127.0.0.1" else 401)


async def _answer(
    made: Starlette, path: str, *, body: bytes = b"", ends: bool = True, said: list[int] | None = None, **scope: Any
) -> list[int]:
    """The status of the answer, in ``said``. ``ends``: there is no more than ``body``; else who asks hangs after it."""
    said, left = [] if said is None else said, [body]

    async def receive() -> MutableMapping[str, Any]:
        if not left and not ends:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": left.pop() if left else b"", "more_body": not ends}

    async def tell(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            said.append(int(message["status"]))

    asked = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http",
        "query_string": b"", "headers": [(b"host", b"localhost"), (b"accept", b"text/html")],
        "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 9), "app": made,
    }  # fmt: skip
    await made({**asked, **scope}, receive, tell)
    return said


def _status(application: Starlette, path: str, host: str, query: str = "") -> int:
    headers = [(b"host", host.encode()), (b"accept", b"text/html")]
    return asyncio.run(_answer(application, path, headers=headers, query_string=query.encode()))[0]


def test_a_page_that_several_ask_for_at_once_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_up().write(tmp_path / "a.jsonl")
    index = looked([tmp_path])
    real, made = analysis.look, []

    def slow(*args: Any, **more: Any) -> Any:
        made.append(args)
        time.sleep(0.2)
        return real(*args, **more)

    monkeypatch.setattr(analysis, "look", slow)
    with ThreadPoolExecutor(8) as pool:
        looks = list(pool.map(index.look, [key(("llama", "7", 0))] * 8))
    assert len(made) == 1
    assert all(look is looks[0] for look in looks)


def test_a_table_with_wrong_rows_keeps_no_others_away(tmp_path: Path) -> None:
    whole = start_up().write(tmp_path / "whole.jsonl")
    (tmp_path / "starts.parquet").write_bytes(starts.compact([whole])[0])
    for name, change in (("null", "NULL::VARCHAR AS attempt"), ("late", f"{10**18} AS began_us, 'late' AS job")):
        starts.connect().execute(
            f"COPY (SELECT * REPLACE ({change}) FROM read_parquet('{tmp_path}/starts.parquet'))"
            f" TO '{tmp_path}/{name}.parquet' (FORMAT parquet, KV_METADATA {{bootseer_starts: '3'}})"
        )
    index = looked([tmp_path])
    assert {row.job for row in index.state.rows.values()} == {"llama", "late"}
    (problem,) = index.state.problems
    assert f"a row of {tmp_path}/null.parquet is no start-up" in problem
    assert _status(app.make(index, Access("")), "/", "127.0.0.1") == 200


def test_a_file_that_goes_while_they_are_listed_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_up("a").write(tmp_path / "a.jsonl")
    start_up("z").write(tmp_path / "z.jsonl")
    real = files.find
    monkeypatch.setattr(files, "find", lambda path, endings: [Found(path, "b.jsonl"), *real(path, endings)])
    index = looked([tmp_path])
    assert {row.job for row in index.state.rows.values()} == {"a", "z"}
    assert not index.state.problems


def test_pages_of_other_sites_read_nothing_through_a_browser_here(tmp_path: Path) -> None:
    start_up().write(tmp_path / "a.jsonl")
    with serving(tmp_path) as server:
        assert server.ask("/jobs.json", Host="rebound.example")[0] == 401
        assert server.ask("/jobs.json", Sec_Fetch_Site="cross-site")[0] == 401
        assert server.ask("/events", "POST", b"", Sec_Fetch_Site="same-site")[0] == 401
        assert server.ask("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
        assert server.ask("/jobs.json", Host=f"localhost:{server.port}")[0] == 200


def test_events_that_are_sent_twice_count_once(tmp_path: Path) -> None:
    lines = b"".join(start_up().lines())
    (tmp_path / "token").write_text(TOKEN)
    known = {"Authorization": f"Bearer {TOKEN}"}
    with serving("--receive", tmp_path / "in", "--token-file", tmp_path / "token") as server:
        assert server.ask("/events", "POST", lines)[0] == 401
        assert server.ask("/events", "POST", lines, **known)[0] == 201
        status, _, text = server.ask("/events", "POST", lines, **known)
        assert (status, json.loads(text)["known"]) == (200, True)
        assert len(list((tmp_path / "in").rglob("*.jsonl"))) == 1
        assert (tmp_path / "in").stat().st_mode & 0o777 == 0o700
        wait_for(lambda: "llama" in server.ask("/", **known)[2])
        assert server.ask("/events", "POST", b"no event\n", **known)[0] == 400
        assert server.ask("/events", "GET", **known)[0] == 405
        assert len(list((tmp_path / "in").iterdir())) == 1


def sent(*args: str | Path) -> tuple[int, str]:
    done = forked.cli("profile", "export", *args)
    return done.returncode, done.stderr


def test_event_files_are_sent_whole_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = start_up().write(tmp_path / "a.jsonl")
    size = file.stat().st_size
    with file.open("ab") as torn:
        torn.write(b'{"bootseer":2,"ev":"begin"')
    (tmp_path / "token").write_text(TOKEN)
    with serving("--receive", tmp_path / "in", "--token-file", tmp_path / "token") as server:
        url = f"http://127.0.0.1:{server.port}/events"
        code, said = sent(file, "--to", url)
        assert code == 77
        assert "does not accept the token" in said
        assert sent(file, "--to", url, "--token-file", tmp_path / "token")[0] == 0
        monkeypatch.setattr(send, "PART", 1000)
        assert send.send([file], url, TOKEN) == size
        (tmp_path / "jobs/llm").mkdir(parents=True)
        start_up().write(tmp_path / "jobs/llm/n1.jsonl")
        assert send.send([tmp_path / "jobs"], url, TOKEN) == size  # red before: cannot read jobs: Is a directory
        (one,) = looked([tmp_path / "in"]).state.rows.values()
        assert one.startup_seconds == 60.0
        assert events.read(tmp_path / "in").torn == 0
        assert sent(file, "--to", url + "x", "--token-file", tmp_path / "token")[0] == 78
    with (tmp_path / "holes").open("wb") as holes:
        holes.truncate(1 << 41)
    with pytest.raises(BootseerError, match="it is no file of events"):  # red before: as much memory as it said
        send.send([tmp_path / "holes"], url, TOKEN)


def test_a_server_that_is_away_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = start_up().write(tmp_path / "a.jsonl")
    code, said = sent(file, "--to", "http://127.0.0.1:9/events", "--timeout", "1")
    assert code == 69
    assert said.count("\n") <= 2
    assert "send them again later" in said
    (tmp_path / "token").write_text(TOKEN)
    for url, refused in (("127.0.0.1", False), ("[::1]", False), ("192.0.2.1", True), ("192.0.2.2", False)):
        known = ("--timeout", "0.2", "--token-file", tmp_path / "token")
        monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", "192.0.2.2:9")
        code, said = sent(file, "--to", f"http://{url}:9/events", *known)
        assert "Traceback" not in said
        assert (code, "would go to" in said) == ((78, True) if refused else (69, False))
    assert sent(file, "--to", "nonsense")[0] == 78
    assert sent(tmp_path / "none", "--to", "http://127.0.0.1:9/events")[0] != 0


def test_senders_that_stop_half_way_keep_others_away_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_SECONDS", 0.2)
    application = app.make(Index([]), Access(""), tmp_path / "in")

    async def post(sender: str) -> int:
        request = _answer(application, "/events", body=b"half a", ends=False, method="POST", client=(sender, 9))
        return (await request)[0]

    async def all_of_them(*senders: str) -> list[int]:
        return await asyncio.gather(*(post(sender) for sender in senders))

    assert asyncio.run(all_of_them(*("10.0.0.1",) * 5, "10.0.0.2")) == [408, 408, 408, 408, 503, 408]
    assert list((tmp_path / "in").iterdir()) == []


def test_too_long_a_body_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with serving("--receive", tmp_path / "in", "--token-file", tmp_path / "token") as server:
        lines = b"".join(start_up().lines())
        many = lines * (65 * (1 << 20) // len(lines))
        status, _, _ = server.ask("/events", "POST", many, Authorization=f"Bearer {TOKEN}")
        assert status == 413
        assert list((tmp_path / "in").iterdir()) == []


def test_bad_calls_end_with_one_line(tmp_path: Path) -> None:
    code, said = refused(tmp_path, "--host", "0.0.0.0")
    assert code == 78
    assert "a token is needed" in said
    assert "to receive events a token is needed" in refused("--receive", tmp_path / "in")[1]
    (tmp_path / "token").write_text("short")
    assert "shorter than 16" in refused(tmp_path, "--token-file", tmp_path / "token")[1]
    assert "no file or folder" in refused(tmp_path / "nothing")[1]
    assert "no start-ups given" in refused()[1]
    with serving(tmp_path) as server:
        code, said = refused(tmp_path, "--port", str(server.port))
        assert code != 0
        assert "in use" in said
        assert "Traceback" not in said


def test_the_index_reads_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_up("a").write(tmp_path / "a.jsonl")
    start_up("b").write(tmp_path / "b.jsonl")
    index = looked([tmp_path])
    rows = index.state.rows
    analysed: list[str] = []
    real = analysis.look

    def noted(log: events.EventLog, identity: events.Identity) -> object:
        analysed.append(identity[0])
        return real(log, identity)

    monkeypatch.setattr(analysis, "look", noted)
    index.refresh()
    assert analysed == []
    start_up("b", env=50).write(tmp_path / "b.jsonl")
    index.refresh()
    assert analysed == ["b"]
    assert index.row(key(("a", "7", 0))) is rows[key(("a", "7", 0))]
    assert index.row(key(("b", "7", 0))).startup_seconds == 80.0


def test_the_page_of_a_large_start_up_is_ready_before_anybody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_LARGE", 7)
    large, small = start_up("large"), StartUp("small", "7", 0)
    large.span("n3", "first_step", 50, 60)
    small.span("n1", "first_step", 0, 5)
    (tmp_path / "a.jsonl").write_bytes(b"".join([*large.lines(), *small.lines()]))
    index = looked([tmp_path])

    def never(*_: object, **__: object) -> object:
        raise BootseerError("asked for the analysis")

    monkeypatch.setattr(analysis, "look", never)
    look = index.look(key(("large", "7", 0)))
    assert look is not None
    assert "n3" in look.body
    assert len(look.report.nodes) == 3
    with pytest.raises(BootseerError, match="asked for"):
        index.look(key(("small", "7", 0)))


def test_what_cannot_be_read_stays_told_and_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "begun.jsonl").touch()
    start_up().write(tmp_path / "good.jsonl")
    index = looked([tmp_path, tmp_path / "away"])
    first = index.state
    assert len(first.problems) == 3
    index.refresh()
    assert index.state is first
    (tmp_path / "other.jsonl").unlink()
    start_up("other").write(tmp_path / "begun.jsonl")
    index.refresh()
    assert len(index.state.problems) == 2
    assert {row.job for row in index.state.rows.values()} == {"llama", "other"}


def test_a_start_up_that_cannot_be_analysed_keeps_no_other_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = start_up("a").lines() + start_up("b").lines()
    (tmp_path / "both.jsonl").write_bytes(b"".join(lines))
    real = analysis.look

    def some(log: events.EventLog, identity: events.Identity) -> object:
        if identity[0] == "a":
            raise BootseerError("it does not add up")
        return real(log, identity)

    monkeypatch.setattr(analysis, "look", some)
    index = looked([tmp_path])
    assert [row.job for row in index.state.rows.values()] == ["b"]
    assert index.state.problems == ("job a, attempt 7, cycle 0: it does not add up",)


def test_a_start_up_in_several_files_is_one(tmp_path: Path) -> None:
    made = start_up()
    lines = made.lines()
    (tmp_path / "n1.jsonl").write_bytes(b"".join(line for line in lines if b'"n1"' in line))
    index = looked([tmp_path])
    (row,) = index.state.rows.values()
    assert row.nodes == 1
    (tmp_path / "n2.jsonl").write_bytes(b"".join(line for line in lines if b'"n2"' in line))
    index.refresh()
    (row,) = index.state.rows.values()
    assert row.nodes == 2
    (tmp_path / "n1.jsonl").unlink()
    index.refresh()
    (row,) = index.state.rows.values()
    assert row.nodes == 1


def test_rows_of_parquet_files_are_shown_and_the_fuller_row_counts(tmp_path: Path) -> None:
    whole = start_up().write(tmp_path / "whole.jsonl")
    (tmp_path / "starts.parquet").write_bytes(starts.compact([whole])[0])
    start_up(complete=False).write(tmp_path / "whole.jsonl")
    index = looked([tmp_path])
    (row,) = index.state.rows.values()
    assert row.startup_seconds == 60.0
    whole.unlink()
    index.refresh()
    assert index.look(key(("llama", "7", 0))) is None
    assert index.row(key(("llama", "7", 0))) == row
    with serving(tmp_path) as server:
        assert "Only its summary is here" in server.page("/job/" + key(("llama", "7", 0)))
        assert json.loads(server.page("/fleet.json"))["total"]["starts"] == 1


def test_compared_rows_add_up(tmp_path: Path) -> None:
    before, after = (next(starts.of(start_up(env=env).log())) for env in (30, 12))
    found = {row.name: row for row in compare.rows(before, after)}
    assert found["env"].change == pytest.approx(-18)
    assert found["start-up"].change == pytest.approx(-18)
    assert found["queue"].change is None
    parts = [row.after for row in found.values() if row.name not in ("start-up", "queue")]
    assert sum(part or 0 for part in parts) == pytest.approx(after.startup_seconds)


def test_the_pages_are_there_before_the_events_are_read(tmp_path: Path) -> None:
    """And programs are told to wait, as what is known so far is not all there is."""
    start_up().write(tmp_path / "a.jsonl")
    index = Index([tmp_path])
    pages = app.make(index, Access(""))
    for path, status in (
        ("/", 200),
        ("/fleet", 200),
        ("/growth", 200),
        ("/growth.json", 503),
        ("/jobs.json", 503),
        ("/fleet.csv", 503),
        ("/metrics", 503),
    ):
        assert _status(pages, path, "localhost") == status
    assert _status(pages, f"/job/{key(('llama', '7', 0))}", "localhost") == 503
    index.refresh()
    for path in (
        "/",
        "/fleet",
        "/growth.csv",
        "/jobs.json",
        "/fleet.csv",
        "/metrics",
        f"/job/{key(('llama', '7', 0))}",
    ):
        assert _status(pages, path, "localhost") == 200


def _noted(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any], Any]) -> list[Any]:
    """What ``note`` says of the paths each time that events are read from now on."""
    real, seen = events.read, list[Any]()
    monkeypatch.setattr(events, "read", lambda paths: (seen.append(note(paths)), real(paths))[1])
    return seen


def test_files_are_shown_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        start_up(name).write(tmp_path / f"{name}.jsonl")
    monkeypatch.setattr(index_module, "_PART", 1)
    index = Index([tmp_path])
    seen = _noted(monkeypatch, lambda _: (len(index.state.rows), index.state.whole))
    index.refresh()
    assert seen == [(0, False), (1, False), (2, False)]
    assert (len(index.state.rows), index.state.whole) == (3, True)


def test_a_file_that_names_every_start_up_has_not_all_of_them_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"job-{number}" for number in range(8)]
    for name in names:
        start_up(name).write(tmp_path / f"{name}.jsonl")
    lines = [json.dumps(one.events[0] | {"span": one.job}).encode() + b"\n" for one in map(start_up, names)]
    index = looked([tmp_path])
    (tmp_path / "zz.jsonl").write_bytes(b"".join(lines))
    monkeypatch.setattr(index_module, "_PART", 3 * (tmp_path / "job-1.jsonl").stat().st_size)
    sizes = _noted(monkeypatch, len)
    index.refresh()
    assert max(sizes) <= 4
    assert {row.job: row.startup_seconds for row in index.state.rows.values()} == dict.fromkeys(names, 60.0)


def test_files_that_are_large_and_name_the_same_start_ups_are_read_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [start_up(f"job-{number}") for number in range(8)]
    for name in "ab":
        lines = [json.dumps(event).encode() + b"\n" for one in starts for event in one.events]
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(lines))
    monkeypatch.setattr(index_module, "_PART", 1)
    sizes = _noted(monkeypatch, len)
    index = looked([tmp_path])
    assert sizes == [1, 1, 2]
    assert len(index.state.rows) == 8


def test_what_a_neighbour_puts_there_keeps_no_page_from_coming(tmp_path: Path) -> None:
    start_up().write(tmp_path / "good.jsonl")
    (tmp_path / "digits.jsonl").write_bytes(
        json.dumps({**start_up().events[0], "node": "n" + "9" * 4000, "attrs": {"nodes": 10**300}}).encode()
    )
    (tmp_path / "deep.jsonl").write_bytes(b'{"bootseer":2,"x":' + b"[" * 60_000 + b"\n")
    for name in ("holes.jsonl", "holes.parquet"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2 << 40)
        os.mkfifo(tmp_path / f"pipe-{name}")
    with serving(tmp_path) as server:
        assert [row["job"] for row in json.loads(server.page("/jobs.json"))] == ["llama"]
        text = server.page("/")
        assert "holes.jsonl" in text
        assert "holes.parquet has more than" in text


@pytest.mark.parametrize(
    "number", ["9" * 400 + "d", "9" * 400, "1e400d", "nan", "-1d", "inf", "0" * 400 + "d", "9" * 15 + "w"]
)
def test_numbers_in_an_address_are_bounded(number: str, tmp_path: Path) -> None:
    start_up().write(tmp_path / "a.jsonl")
    pages = app.make(looked([tmp_path]), Access(""))
    for form in ("", ".json", ".csv"):
        assert _status(pages, f"/fleet{form}", "localhost", f"since={number}") in (200, 400)
    for query in (f"page={number}", f"page={number.rstrip('dw')}"):
        assert _status(pages, "/", "localhost", query) == 200
    for path in ("/live", "/compare", "/job/", "/jobs.json", "/metrics", "/login"):
        query = f"mark={number}&keys={number},{number}&one={number}&other={number}&q={number}&team={number}"
        if path != "/live":
            assert _status(pages, path + (number if path.endswith("/") else ""), "localhost", query) < 500


def test_pages_of_the_same_site_send_nothing_with_its_cookie(tmp_path: Path) -> None:
    """At an address without TLS browsers say ``Origin`` and no ``Sec-Fetch-Site``; cookies know no ports."""
    (tmp_path / "token").write_text(TOKEN)
    lines = b"".join(start_up().lines())
    with serving("--receive", tmp_path / "in", "--token-file", tmp_path / "token") as server:
        body = urllib.parse.urlencode({"token": TOKEN, "then": "/"}).encode()
        host = {"Host": f"monitor:{server.port}"}
        for origin in ("http://monitor:9999", "http://other", "null", "http://[", "", f"ftp://monitor:{server.port}"):
            assert server.ask("/login", "POST", body, Origin=origin, **host)[0] == 401
            assert (
                server.ask("/events", "POST", lines, Origin=origin, Authorization=f"Bearer {TOKEN}", **host)[0] == 401
            )
        here = f"http://monitor:{server.port}"
        cookie = server.ask("/login", "POST", body, Origin=here, **host)[1]["Set-Cookie"]
        assert cookie.startswith("bootseer-session=")
        known = {"Cookie": cookie.partition(";")[0], **host}
        assert server.ask("/jobs.json", **known)[0] == 200
        assert server.ask("/events", "POST", lines, Origin=here, **known)[0] == 401
        assert server.ask("/events", "POST", lines, **known)[0] == 401
        assert list((tmp_path / "in").iterdir()) == []
        page = server.ask("/", **known)[1]
        assert page["Cross-Origin-Resource-Policy"] == page["Referrer-Policy"] == "same-origin"


def test_under_tls_the_cookie_is_of_this_host_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with serving(tmp_path, "--token-file", tmp_path / "token") as server:
        body = urllib.parse.urlencode({"token": TOKEN, "then": "/"}).encode()
        proxied = {"Host": "monitor", "X-Forwarded-Proto": "https", "Origin": "https://monitor"}
        for headers in (proxied, {name: proxied[name] for name in ("Host", "Origin")}):
            cookie = server.ask("/login", "POST", body, **headers)[1]["Set-Cookie"]
            assert cookie.startswith("__Host-bootseer-session=")
            assert "secure" in cookie.lower()
            assert "path=/" in cookie.lower()
            assert "domain" not in cookie.lower()
            assert server.ask("/jobs.json", Cookie=cookie.partition(";")[0], **headers)[0] == 200
        plain = {"Host": "monitor", "X-Forwarded-Proto": "https", "Origin": "http://monitor"}
        assert server.ask("/login", "POST", body, **plain)[0] == 401


def _sent(application: Starlette, body: bytes, sender: str) -> int:
    return asyncio.run(_answer(application, "/events", body=body, method="POST", client=(sender, 9)))[0]


def test_what_is_kept_of_senders_is_bounded_for_each_and_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [b"".join(start_up(f"job-{number}").lines()) for number in range(20)]
    monkeypatch.setattr(inbox, "MOST_BYTES", 8 * len(bodies[11]))
    monkeypatch.setattr(inbox, "_RECOUNT", 0.0)

    def fresh() -> Starlette:
        return app.make(Index([]), Access(""), tmp_path / "in")

    application = fresh()
    assert [_sent(application, body, "10.0.0.1") for body in bodies[:4]] == [201, 201, 507, 507]
    assert _sent(application, bodies[0], "10.0.0.1") == 200  # it is here
    assert [_sent(application, body, "10.0.0.2") for body in bodies[:3]] == [201, 201, 507]
    application = fresh()  # which counts what is there
    assert [_sent(application, body, "10.0.0.1") for body in bodies[:3]] == [200, 200, 507]
    assert [_sent(application, body, f"fd00::{n}") for n in (1, 2) for body in bodies[11:13]] == [201] * 4
    assert _sent(application, bodies[11], "../../x") == 507
    next((tmp_path / "in/10.0.0.1").iterdir()).unlink()
    assert _sent(application, bodies[12], "../../x") == 201
    assert {path.name for path in (tmp_path / "in").iterdir()} == {
        "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "unknown",
    }  # fmt: skip
    monkeypatch.setattr(inbox, "MOST_FILES", 8)
    monkeypatch.setattr(inbox, "MOST_BYTES", 1 << 40)
    assert _sent(application, bodies[15], "10.0.0.3") == 507


def test_a_link_in_the_folder_of_what_was_sent_leads_nowhere(tmp_path: Path) -> None:
    application = app.make(Index([]), Access(""), tmp_path / "in")
    (tmp_path / "away").mkdir()
    (tmp_path / "in/10.0.0.1").symlink_to(tmp_path / "away")
    assert _sent(application, b"".join(start_up().lines()), "10.0.0.1") == 507
    assert list((tmp_path / "away").iterdir()) == []


def test_a_visitor_holds_his_own_streams_and_not_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_STREAMS", 3)
    application = app.make(looked([]), Access(""))

    async def listen(visitor: str, said: list[int]) -> None:
        await _answer(application, "/live", ends=False, said=said, client=(visitor, 9))

    async def visit() -> list[int]:
        found: list[list[int]] = []
        tasks = []
        for visitor in ("10.0.0.1",) * 4 + ("10.0.0.2",):
            found.append([])
            tasks.append(asyncio.create_task(listen(visitor, found[-1])))
            await asyncio.sleep(0.1)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        found.append([])
        tasks.append(asyncio.create_task(listen("10.0.0.1", found[-1])))
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return [status for said in found for status in said]

    assert asyncio.run(visit()) == [200, 200, 200, 503, 200, 200]


SILENT = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: loc",
    "half a form": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nt",
}
_PAGE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", SILENT.values(), ids=SILENT)
def test_who_does_not_go_on_asking_is_left(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Red before: for as long as the visitor likes, and of these any number."""
    monkeypatch.setattr(connection, "SECONDS", 0.2)
    assert asyncio.run(_visit(sent, takes=True)) == b""


@pytest.mark.parametrize("takes", [True, False])
def test_an_answer_is_sent_for_as_long_as_somebody_takes_it(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    monkeypatch.setattr(connection, "SECONDS", 0.2)
    got = asyncio.run(_visit(_PAGE, takes=takes))
    assert (len(got) > _LARGE) is takes


_LARGE = 16 << 20


@contextlib.asynccontextmanager
async def _open(size: int, places: int | None = None) -> AsyncIterator[tuple[tuple[str, int], ServerState]]:
    """The address of a server whose page has ``size`` bytes, and its state."""

    async def page(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while scope["method"] == "POST" and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    settings = uvicorn.Config(
        page, http=connection.Connection, lifespan="off", log_config=None, timeout_keep_alive=0,
        limit_concurrency=places,
    )  # fmt: skip
    settings.load()
    state = uvicorn.Server(settings).server_state
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: connection.Connection(settings, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname(), state


async def _visit(sent: bytes, *, takes: bool) -> bytes:
    """What the server has sent until it left who ``sent`` that, and takes a part after the other, or nothing."""
    loop = asyncio.get_running_loop()
    async with _open(_LARGE) as (address, state):
        with socket.create_connection(address) as visitor:
            visitor.setblocking(False)
            await loop.sock_sendall(visitor, sent)
            if not takes:
                while state.connections or not state.total_requests:
                    await asyncio.sleep(0.05)
                return b""
            got = b""
            with contextlib.suppress(ConnectionResetError):
                while part := await asyncio.wait_for(loop.sock_recv(visitor, 1 << 20), 30):
                    got += part
                    await asyncio.sleep(0.05)
            return got


@pytest.mark.parametrize("sent", [*SILENT.values(), _PAGE], ids=[*SILENT, "takes no answer"])
def test_who_asks_finds_a_place_among_any_number_who_do_not_go_on(sent: bytes) -> None:
    """Red before: for a minute all others were sent away, and then the next silent visitors came."""

    async def visit() -> list[bytes]:
        loop = asyncio.get_running_loop()
        async with _open(_LARGE if sent == _PAGE else 9, places=8) as (address, _):
            with contextlib.ExitStack() as visitors:
                answers = []
                for _ in range(4):
                    for _ in range(8):
                        silent = visitors.enter_context(socket.create_connection(address))
                        silent.setblocking(False)
                        await loop.sock_sendall(silent, sent)
                    await asyncio.sleep(0.05)
                    asking = visitors.enter_context(socket.create_connection(address))
                    asking.setblocking(False)
                    await loop.sock_sendall(asking, _PAGE)
                    answers.append((await asyncio.wait_for(loop.sock_recv(asking, 99), 30))[:12])
                return answers

    assert asyncio.run(visit()) == [b"HTTP/1.1 200"] * 4
