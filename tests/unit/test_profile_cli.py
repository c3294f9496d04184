"""``bootseer profile``: the commands as a user meets them."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from bootseer.profile import events
from support import forked
from support.startups import StartUp

CLI = [sys.executable, "-m", "bootseer.cli.main", "profile"]


@pytest.fixture
def environ(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER_") or "TEST" in name}
    return {**kept, "BOOTSEER_EVENTS": str(tmp_path / "e.jsonl"), "BOOTSEER_JOB": "j", "BOOTSEER_NODE": "n"}


@pytest.fixture
def call(environ):
    def run(*args, **kwargs):
        return forked.cli("profile", *args, env=environ, text=False, **kwargs)

    return run


@pytest.fixture
def job(tmp_path):
    for cycle in (0, 1):
        s = StartUp("llm", cycle=cycle, zero=1000 * cycle)
        for i in range(5):
            s.span(f"n{i}", "env", 0, 90 if i == 2 else 20)
            s.span(f"n{i}", "first_step", 90, 95)
        s.write(tmp_path / f"cycle-{cycle}.jsonl")
    return tmp_path


def test_show_prints_the_last_start_up(call, job):
    done = call("show", str(job))
    shown = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "hot restart of job llm, attempt 0, cycle 1" in shown
    assert "1 more in these events" in shown
    assert "\x1b" not in shown


def test_compare_shows_two_start_ups_side_by_side(call, job):
    shown = call("show", str(job), "--against", str(job)).stdout.decode()
    assert "cycle 0" in shown
    assert "cycle 1" in shown
    first, second = (str(job / f"cycle-{cycle}.jsonl") for cycle in (0, 1))
    rows = {row["name"]: row for row in json.loads(call("show", "--json", second, "--against", first).stdout)}
    assert (rows["start-up"]["before"], rows["start-up"]["after"]) == (95.0, 95.0)
    assert {"env", "first_step", "between stages", "queue"} <= rows.keys()
    alone = call("show", first, "--against", first)
    assert (alone.returncode, len(alone.stderr.splitlines())) == (66, 1)
    assert b"only one start-up of this job" in alone.stderr


def test_show_all_names_repeat_offenders(call, job):
    shown = call("show", "--all", str(job)).stdout.decode()
    assert shown.count("of job llm") == 2
    assert "stragglers in more than one: n2 (2)" in shown


def test_show_json(call, job):
    report = json.loads(call("show", "--json", "--cycle", "0", "--nodes", "7", str(job)).stdout)
    assert (report["job"], report["cycle"], report["startup_seconds"], report["nodes_missing"]) == ("llm", 0, 95.0, 2)
    assert report["stages"][0]["stragglers"] == ["n2"]
    named = json.loads(call("show", "--json", "--nodes", "n[0-5],m", str(job)).stdout)
    assert (named["nodes_expected"], named["missing"]) == (7, ["n5", "m"])
    assert [call("show", "--nodes", nodes, str(job)).returncode for nodes in ("0", "n[")] == [2, 2]
    cost = report["cost"]
    assert cost["own"] + cost["wait"] + cost["gap"] == pytest.approx(cost["total"])
    assert len(json.loads(call("show", "--json", "--all", str(job)).stdout)) == 2


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["show", "{}/nope"], 66, "no events file or job folder"),
        (["show", "{}"], 65, "no events in"),
        (["show", "/etc/hostname"], 65, "no events in"),
        (["export", "{}/nope"], 66, "no events file"),
        (["wrap", "--stage", "env", "--attr", "x", "--", "true"], 78, "--attr 'x' is not NAME=VALUE"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, args, code, said):
    done = call(*(arg.format(tmp_path) for arg in args))
    assert done.returncode == code
    assert said in done.stderr.decode()
    assert len(done.stderr.splitlines()) == 1


def test_mistakes_in_choosing(call, job, environ):
    done = call("show", "--job", "other", str(job))
    assert done.returncode == 66
    assert b"there are: job llm, attempt 0, cycle 0" in done.stderr
    done = call("export", "--format", "pdf", str(job))
    assert done.returncode == 78
    environ.pop("BOOTSEER_EVENTS")
    assert call("show").returncode == 78


def test_export_writes_a_trace(call, job, tmp_path):
    out = tmp_path / "trace.json"
    assert call("export", "--format", "chrome", "-o", str(out), str(job)).returncode == 0
    assert len([e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]) == 20
    piped = json.loads(call("export", "--cycle", "1", str(job)).stdout)
    assert len([e for e in piped["traceEvents"] if e["ph"] == "X"]) == 10
    done = call("export", "-o", "/nonexistent/x.json", str(job))
    assert done.returncode == 66
    assert len(done.stderr.splitlines()) == 1


def test_wrap_keeps_stdin_stdout_stderr_and_exit_code(call, environ):
    data = bytes(range(256)) * 1000
    attrs = ("--attr", "n=3", "--attr", "why=a b")
    done = call("wrap", "--stage", "env", *attrs, "--", "sh", "-c", "cat; echo e >&2; exit 7", input=data)
    assert (done.returncode, done.stdout, done.stderr) == (7, data, b"e\n")
    (span,) = events.read(environ["BOOTSEER_EVENTS"]).spans
    assert (span.stage, span.state) == ("env", events.State.DONE)
    assert span.attrs == {"command": "sh", "n": 3, "why": "a b", "exit_code": 7}


def test_wrap_hands_options_and_the_span_to_the_command(call, environ):
    code = "import os, sys; print(sys.argv[1:], os.environ['BOOTSEER_SPAN'])"
    done = call("wrap", "--stage", "env", "--", sys.executable, "-c", code, "--stage", "x", "-h", "--")
    (span,) = events.read(environ["BOOTSEER_EVENTS"]).spans
    assert done.stdout.decode().strip() == f"['--stage', 'x', '-h', '--'] {span.id}"


def test_wrap_records_no_arguments(call, environ):
    attrs = ("--attr", "url=https://u:hunter2@h/", "--attr", "parent=x")
    call("wrap", "--stage", "env", *attrs, "--", "true", "--password", "hunter2")
    with open(environ["BOOTSEER_EVENTS"], "rb") as file:
        assert b"hunter2" not in file.read()


@pytest.mark.parametrize(("command", "code"), [("no-such-command-xyz", 127), ("/etc/hostname", 126), ("/", 126)])
def test_wrap_of_what_cannot_run(call, environ, command, code):
    done = call("wrap", "--stage", "env", "--", command)
    assert done.returncode == code
    assert f"cannot run {command}".encode() in done.stderr
    (span,) = events.read(environ["BOOTSEER_EVENTS"]).spans
    assert span.attrs["exit_code"] == code


@pytest.mark.parametrize("path", ["", "/nonexistent/x.jsonl", "/dev/full", "/"])
def test_wrap_runs_the_command_whatever_happens_to_the_events(call, environ, path):
    environ["BOOTSEER_EVENTS"] = path
    done = call("wrap", "--stage", "env", "--", "sh", "-c", "echo hi; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"hi\n", b"")


def test_wrap_with_an_events_file_of_its_own(call, environ, tmp_path):
    environ.pop("BOOTSEER_EVENTS")
    call("wrap", "--stage", "env", "--events", str(tmp_path / "own.jsonl"), "--", "true")
    assert events.read(tmp_path / "own.jsonl").events == 2


def test_wrap_dies_of_the_signal_the_command_died_of(call, environ):
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        done = call("wrap", "--stage", "env", "--", "sh", "-c", f"kill -{int(number)} $$")
        assert done.returncode == -number
    assert [s.attrs["signal"] for s in events.read(environ["BOOTSEER_EVENTS"]).spans] == [
        "SIGKILL",
        "SIGSEGV",
        "SIGTERM",
    ]


def test_wrap_leaves_sigpipe_as_commands_know_it(call):
    assert call("wrap", "--stage", "env", "--", "bash", "-c", "kill -PIPE $$").returncode == -signal.SIGPIPE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_wrap_passes_signals_on(environ, number):
    code = (
        "import os, signal, sys, time\n"  # os.write: a handler that prints may have interrupted the print of 'ready'
        f"signal.signal({int(number)}, lambda *a: (os.write(1, b'got it\\n'), sys.exit(5)))\n"
        "os.write(1, b'ready\\n')\ntime.sleep(30)"
    )
    argv = [*CLI, "wrap", "--stage", "env", "--", sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.read() == b"got it\n"
        assert process.wait(30) == 5
    assert events.read(environ["BOOTSEER_EVENTS"]).spans[0].attrs["exit_code"] == 5


def test_wrap_does_not_send_twice_what_the_terminal_sends(environ):
    code = (
        "import signal, time\nseen = []\nsignal.signal(2, lambda *a: seen.append(1))\n"
        "print('ready', flush=True)\nwhile not seen: time.sleep(0.01)\ntime.sleep(0.5)\n"
        "print('seen', len(seen), flush=True)"
    )
    terminal, inside = pty.openpty()
    # setsid --ctty rather than pty.fork: other tests of this process have started threads that a fork does not survive
    argv = ["setsid", "--ctty", "--wait", *CLI, "wrap", "--stage", "env", "--", sys.executable, "-c", code]
    process = subprocess.Popen(argv, env=environ, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    said = b""
    deadline = time.monotonic() + 30
    try:
        while not re.search(rb"seen \d", said) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                said += os.read(terminal, 1000)
            if b"ready" in said and b"^C" not in said:
                os.write(terminal, b"\x03")
                time.sleep(0.1)
        assert b"seen 1" in said
    finally:
        os.close(terminal)
        process.kill()
        process.wait(10)
