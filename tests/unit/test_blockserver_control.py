"""Asking a block server: one that is slow is not a dead one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks import tree
from bootseer.blocks.serving import _process, control
from bootseer.blocks.serving.control import ControlServer, GoneError, Request, TreeStatus
from bootseer.blocks.serving.members import members
from bootseer.blocks.serving.spec import SPEC, ServerSpec
from bootseer.errors import NotFoundError, UnavailableError

STATUS = TreeStatus(id="a", digest="a", pid=1, targets=["/t"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "state" / "trees" / "a"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a server that accepts requests and never answers; callers are patient for a second only."""
    monkeypatch.setattr(control, "_PATIENCE", 1.0)
    monkeypatch.setattr(control, "_ATTEMPT_SECONDS", 0.3)
    (folder / SPEC).write_bytes(b"{}")
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.getcwd()
        os.chdir(folder)
        try:
            sock.bind(control.SOCKET)
        finally:
            os.chdir(here)
        sock.listen(16)
        yield folder


def test_nobody_there_is_known_at_once(folder: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    for where in (folder, tmp_path / "none"):
        with pytest.raises(GoneError):
            control.ask(where, Request("status"))
    ControlServer(folder, lambda request: STATUS).close()
    assert (folder / control.SOCKET).exists()
    with pytest.raises(GoneError):
        control.ask(folder, Request("status"))
    assert time.monotonic() - began < 3


def test_a_slow_answer_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_ATTEMPT_SECONDS", 0.3)
    calls = []

    def slow(request: Request) -> TreeStatus:
        calls.append(request)
        time.sleep(0.8 if len(calls) == 1 else 0)
        return STATUS

    server = ControlServer(folder, slow)
    try:
        assert control.ask(folder, Request("status")) == STATUS
    finally:
        server.close()


def test_a_silent_server_is_left_alone(silent: Path, tmp_path: Path) -> None:
    spec = ServerSpec(id="a", store_url="", digest="a", cache_dir="", target="/u")
    state = tmp_path / "state"
    with pytest.raises(UnavailableError, match="does not answer") as caught:
        _process.join_or_start(silent, spec, ["/bin/false"])
    assert not isinstance(caught.value, GoneError)
    with pytest.raises(UnavailableError, match="does not answer"):
        tree.attach("/t", state)
    with pytest.raises(UnavailableError, match="does not answer"):
        tree.TreeMount(tmp_path / "t", "a", "a", silent).unmount()
    assert sorted(path.name for path in silent.iterdir()) == [control.SOCKET, SPEC]


def test_a_dead_server_is_not_found(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        tree.attach("/t", tmp_path / "state")


@pytest.mark.parametrize(
    ("arguments", "pid_file", "found"),
    [
        (["FOLDER"], False, False),
        (["bootseer.blocks.serving.server", "FOLDER", "3"], False, True),
        (["--serve", "FOLDER", "3"], True, True),
        (["bootseer.blocks.serving.server", "-", "3"], True, True),
        (["something", "-", "else"], True, False),
    ],
)
def test_only_servers_are_taken_for_servers(folder: Path, arguments: list[str], pid_file: bool, found: bool) -> None:
    given = [str(folder) if text == "FOLDER" else text for text in arguments]
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before, its command line may be empty
        if pid_file:
            (folder / "pid").write_text(f"{process.pid} {process.pid}")
        try:
            assert members(folder) == ([process.pid] if found else [])
        finally:
            process.communicate(timeout=10)
