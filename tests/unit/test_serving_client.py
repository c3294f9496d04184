"""Asking a server: one that is slow is not a dead one."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.blocks import tree
from bootseer.blocks.serving.client import join_or_start
from bootseer.blocks.serving.protocol import ServerSpec, TreeStatus
from bootseer.errors import BootseerError, FullError, NotFoundError, UnavailableError
from bootseer.served import client
from bootseer.served.control import ControlServer
from bootseer.served.protocol import LOCK, SOCKET, GoneError, Request
from support.waits import later

STATUS = TreeStatus(id="a", digest="a", pid=1, targets=["/t"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "state" / "trees" / "a"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def silent(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`stopped`; callers are patient for a second only."""
    ask = client.ask
    monkeypatch.setattr(client, "_ATTEMPT_SECONDS", 0.3)
    monkeypatch.setattr(client, "ask", lambda *args, timeout=1.0: ask(*args, timeout=min(timeout, 1)))
    return stopped


@pytest.fixture
def stopped(folder: Path) -> Iterator[Path]:
    """The folder of a server that accepts requests and never answers."""
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.getcwd()
        os.chdir(folder)
        try:
            sock.bind(SOCKET)
        finally:
            os.chdir(here)
        sock.listen(16)
        yield folder


@contextmanager
def serving(folder: Path, handle: Callable[[Request], TreeStatus]) -> Iterator[None]:
    server, stop = ControlServer(folder), threading.Event()

    def loop() -> None:
        while not stop.wait(0.01):
            server.answer(handle)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        server.close()


def test_nobody_there_is_known_at_once(folder: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    for where in (folder, tmp_path / "none"):
        with pytest.raises(GoneError):
            client.ask(where, Request("status"), TreeStatus)
    ControlServer(folder).close()
    assert (folder / SOCKET).exists()
    with pytest.raises(GoneError):
        client.ask(folder, Request("status"), TreeStatus)
    assert time.monotonic() - began < 3


def test_a_slow_answer_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ATTEMPT_SECONDS", 0.3)
    calls = []

    def slow(request: Request) -> TreeStatus:
        calls.append(request)
        time.sleep(0.8 if len(calls) == 1 else 0)
        return STATUS

    with serving(folder, slow):
        assert client.ask(folder, Request("status"), TreeStatus) == STATUS


def test_errors_come_over_as_what_they_are(folder: Path) -> None:
    def fail(request: Request) -> TreeStatus:
        raise FullError("no space")

    with serving(folder, fail), pytest.raises(FullError, match="no space"):
        client.ask(folder, Request("status"), TreeStatus)


def test_a_server_that_answers_nobody_is_waited_for_while_it_lives(folder: Path) -> None:
    ControlServer(folder).close()
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    asked = later(lambda: client.ask(folder, Request("status"), TreeStatus))
    time.sleep(0.5)
    assert not asked.done()
    with serving(folder, lambda request: STATUS):
        assert asked.result(10) == STATUS
    asked = later(lambda: client.ask(folder, Request("status"), TreeStatus))
    time.sleep(0.2)
    assert not asked.done()
    os.close(fd)
    with pytest.raises(GoneError):
        asked.result(10)


def test_a_client_that_says_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.served.control._PEER_SECONDS", 0.2)
    with serving(folder, lambda request: STATUS), socket.socket(socket.AF_UNIX) as quiet:
        fd = os.open(folder, os.O_PATH)
        quiet.connect(f"/proc/self/fd/{fd}/{SOCKET}")
        os.close(fd)
        assert client.ask(folder, Request("status"), TreeStatus) == STATUS


def test_a_silent_server_is_left_alone(silent: Path, tmp_path: Path) -> None:
    spec = ServerSpec(id="a", store_url="", digest="a", cache_dir="", target="/u")
    state = tmp_path / "state"
    with pytest.raises(UnavailableError, match="does not answer") as caught:
        join_or_start(silent, spec, ["/bin/cat"])
    assert not isinstance(caught.value, GoneError)
    with pytest.raises(UnavailableError, match="does not answer"):
        tree.attach("/t", state)
    with pytest.raises(UnavailableError, match="does not answer"):
        tree.TreeMount(tmp_path / "t", "a", "a", silent).unmount()
    assert sorted(path.name for path in silent.iterdir()) == [SOCKET]


def test_a_server_that_does_not_answer_holds_up_no_other(stopped: Path, tmp_path: Path) -> None:
    other = stopped.with_name("b")
    other.mkdir()
    began = time.monotonic()
    with serving(other, lambda request: STATUS):
        assert tree.attach("/t", tmp_path / "state").target == Path("/t")
    assert time.monotonic() - began < client.PATIENCE / 2


def test_a_dead_server_is_not_found(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        tree.attach("/t", tmp_path / "state")


def test_only_who_holds_the_lock_is_taken_for_the_server(folder: Path) -> None:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as stranger:
        (folder / LOCK).write_text(f"{stranger.pid}\n")  # left by a server that had this number
        assert not client.alive(folder)
        client.await_exit(folder, 0.1)
        assert stranger.poll() is None
        stranger.kill()
    code = (
        "import fcntl, os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(fd, fcntl.LOCK_EX); "
        "os.pwrite(fd, b'%d\\n' % os.getpid(), 0); os.fork(); print(flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder / LOCK)], stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        assert client.alive(folder)
        client.await_exit(folder, 0.1)
        assert not client.alive(folder)
        assert server.wait(20) == -signal.SIGKILL


def test_the_lock_is_not_lost_by_looking(folder: Path) -> None:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert client.alive(folder)
    assert client.alive(folder)
    os.close(fd)
    assert not client.alive(folder)


def test_who_has_given_up_is_not_heard(folder: Path) -> None:
    heard: list[Request] = []

    def handle(request: Request) -> TreeStatus:
        heard.append(request)
        return STATUS

    server = ControlServer(folder)
    for text, stays in ((b'{"do":"add","target":"/gone"}\n', False), (b'{"do":"status"}\n', True)):
        peer = socket.socket(socket.AF_UNIX)
        fd = os.open(folder, os.O_PATH)
        peer.connect(f"/proc/self/fd/{fd}/{SOCKET}")
        os.close(fd)
        peer.sendall(text)
        if not stays:
            peer.close()
        server.answer(handle)
        peer.close()
    server.close()
    assert [request.do for request in heard] == ["status"]


def test_a_file_of_somebody_else_is_an_error_in_one_line(folder: Path) -> None:
    (folder / "mine").touch()
    with pytest.raises(BootseerError, match="remove the state of a server"):
        client.remove(folder)
    assert (folder / "mine").exists()
