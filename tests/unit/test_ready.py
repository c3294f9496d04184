import contextlib
import json
import os
import subprocess
import threading
import time

import pytest

from bootseer.launch import ready
from bootseer.launch.ready import ReadyWatch
from bootseer.profile import emit


def test_ready_when_a_first_step_ends_and_only_once(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    with emit.span("first_step"):
        pass
    earlier = file.stat().st_size
    calls: list[int] = []
    called = threading.Event()
    watch = ReadyWatch(file, lambda: (calls.append(1), called.set())[0])
    watch.start(earlier)
    with emit.span("import"):
        pass
    with contextlib.suppress(RuntimeError), emit.span("first_step"):
        raise RuntimeError
    step = emit.begin("first_step")
    assert not called.wait(0.2)
    emit.end(step)
    assert called.wait(20)
    with emit.span("first_step"):
        pass
    watch.stop()
    assert calls == [1]


def test_all_ranks_of_the_node_are_waited_for(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    first, second = emit.begin("first_step", node_ranks=2), emit.begin("first_step", node_ranks=2)
    emit.end(first)
    assert not watch.ready.wait(0.3)
    emit.end(second)
    assert watch.ready.wait(10)
    watch.stop()
    early = ReadyWatch(file, lambda: None)
    early.start(file.stat().st_size)
    emit.end(emit.begin("first_step", node_ranks=2))
    early.stop()  # the job has ended
    assert early.ready.is_set()


def test_a_job_that_ends_at_once_is_still_seen(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    with emit.span("first_step"):
        pass
    watch.stop()
    assert watch.ready.is_set()


def test_a_line_that_is_no_utf8_ends_nothing(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"ev":"begin","stage":"env","span":"\xff"}\n')
    monkeypatch.setenv("BOOTSEER_EVENTS", str(file))
    with emit.span("first_step"):
        pass
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    assert watch.ready.wait(10)
    watch.stop()


def test_no_first_step_no_ready(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"bootseer":2,"ev":"begin","stage":"first_step","span":"x"}\ngarbage\n')
    watch = ReadyWatch(tmp_path / "events.jsonl", lambda: None)
    watch.start()
    watch.stop()
    assert not watch.ready.is_set()


STEP = b'{"bootseer":2,"ev":"begin","stage":"first_step","span":"x"}\n{"bootseer":2,"ev":"end","span":"x"}\n'


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_what_a_job_puts_in_the_place_of_its_events_is_not_followed_and_not_waited_for(tmp_path, kind):
    """The job may be root, and what watches it is root of the host."""
    file, other = tmp_path / "events.jsonl", tmp_path / "other"
    other.write_bytes(STEP)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(other if kind == "link" else "/dev/zero")
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    began = time.monotonic()
    watch.stop()
    assert time.monotonic() - began < 5
    assert not watch.ready.is_set()


def test_only_so_much_is_read_of_what_a_job_writes(tmp_path, monkeypatch, caplog):
    file = tmp_path / "events.jsonl"
    file.touch()
    os.truncate(file, 1 << 41)
    with file.open("ab") as out:
        out.write(STEP)
    asked = []
    monkeypatch.setattr(os, "pread", lambda *args, real=os.pread: asked.append(args[1]) or real(*args))
    watch = ReadyWatch(file, lambda: None)
    watch.start()
    watch.stop()
    assert 0 < sum(asked) <= ready.MOST
    assert max(asked) <= 1 << 20
    assert not watch.ready.is_set()
    assert "no more of them is read" in caplog.text


def test_events_of_the_job_are_handed_on_as_data_and_nothing_else_is(tmp_path):
    """A shell that sources the file runs none of it."""
    file, out = tmp_path / "events.jsonl", tmp_path / "out"
    run = f"touch {tmp_path}/run"
    noted = {"bootseer": 2, "ev": "note", "span": f"$({run})`{run}`", "attrs": {"a": f'\\$({run})\n{run}\n"; {run}; é'}}
    lines = [
        json.dumps({"bootseer": 2, "ev": "begin", "stage": "first_step", "span": "x"}),
        run,
        f"$({run})",
        json.dumps(noted),
        json.dumps({"bootseer": 2, "ev": "note", "span": "x", "attrs": {"a": "$" * 20000}}),
        json.dumps({"ev": "note", "span": "x"}),
        "[" * 100000,
        json.dumps({"bootseer": 2, "ev": "end", "span": "x"}),
        '{"bootseer":2,"ev":"end","span":"torn',
    ]
    file.write_bytes("\n".join(lines).encode())
    handed: list[bytes] = []
    watch = ReadyWatch(file, lambda: handed.append(b"ready\n"), handed.append)
    watch.start()
    watch.stop()
    assert handed.pop() == b"ready\n", "what is shown of a start has its first step in it"
    text = b"".join(handed)
    assert [json.loads(line) for line in text.splitlines()] == [json.loads(lines[n]) for n in (0, 3, 7)]
    out.write_bytes(text)
    for shell in ("sh", "bash"):
        subprocess.run([shell, "-c", ". $0", out], capture_output=True, check=False)
    assert not (tmp_path / "run").exists()
