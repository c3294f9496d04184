"""Background servers: forked from a process that has loaded them, or started by themselves, with the same result."""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.cli.verbs import assemble
from bootseer.errors import BootseerError
from bootseer.kernel import background
from support.waits import until

pytestmark = pytest.mark.usefixtures("children")

SERVER = background.program("support.echoserver")


@pytest.fixture(params=["forked", "by itself"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with background.preloaded(SERVER) if request.param == "forked" else contextlib.nullcontext():
        yield request.param


def ask(*steps: tuple[str, Any], seconds: float = 20.0, **more: Any) -> bytes:
    return background.start(SERVER, json.dumps(steps).encode(), seconds=seconds, **more)


def test_nothing_is_imported_from_the_working_folder(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "msgspec", "mmap"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('that of somebody else')")
    monkeypatch.chdir(tmp_path)
    with background.preloaded(SERVER) if way == "forked" else contextlib.nullcontext():
        assert ask(("say", "ok")).strip() == b"ok"


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_server_has_a_session_of_its_own_and_is_nobodys_child(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO", "set after the process that loads servers was started")
    with open(os.devnull) as mine:
        os.set_inheritable(mine.fileno(), True)
        facts = json.loads(ask(("tell", "json")))
        assert facts["group"] == facts["session"] != os.getsid(0)
        assert facts["environ"] == os.environ["ECHO"]
        assert mine.fileno() not in facts["fds"] or way == "by itself"
        assert [fd for fd in facts["fds"] if fd > 4] == []  # 3: who answers; 4: of the listing
        assert facts["pid"] not in _children()
        assert facts["parent"] != os.getpid()
        assert facts["name"] == "bootseer-echo"


def test_servers_are_forked_from_one_process_that_has_loaded_them() -> None:
    before = set(_children())
    with background.preloaded(SERVER):
        (starter,) = set(_children()) - before
        with background.preloaded(background.program("email.mime.audio")):  # of no effect: there is one
            assert json.loads(ask(("tell", "email.mime.audio")))["loaded"] is False
            assert set(_children()) - before == {starter}
        assert json.loads(ask(("tell", "support.echoserver")))["loaded"]
        assert b"support.echoserver" in Path(f"/proc/{starter}/cmdline").read_bytes()
    until(lambda: set(_children()) <= before)
    assert not Path(f"/proc/{starter}").exists()


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_another_command_is_not_forked(tmp_path: Path) -> None:
    before = set(_children())
    with background.preloaded(["/bin/cat"]):
        assert set(_children()) <= before
        assert background.start(["/bin/cat"], b"said\n", seconds=10) == b"said"


def test_what_a_server_prints_is_no_answer(way: str, tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        assert ask(("print", "a line"), ("say", "ready"), ("print", "more"), stderr=log.fileno()) == b"ready"
    until(lambda: (tmp_path / "log").read_text() == "a line\nmore\n")


def test_a_program_of_ours_is_copied_instead_of_loaded_anew(tmp_path: Path) -> None:
    """And what it has opened, catches and is about to do is not done by the servers."""
    code = (
        "import atexit, fcntl, json, os, signal, sys, logging\nfrom bootseer.kernel import background\n"
        "logging.basicConfig(format='of the program %(message)s')\n"
        "lock = open(sys.argv[1], 'w'); os.set_inheritable(lock.fileno(), True); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); atexit.register(print, 'at the end')\n"
        "server = background.program('support.echoserver')\n"
        "background.lend()\n"
        "with background.preloaded(server):\n"
        "    (starter,) = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "    assert open(f'/proc/{starter}/cmdline').read() == open('/proc/self/cmdline').read()\n"
        "    steps = [('tell', 'json'), ('print', 'to errors'), ('wait', sys.argv[2])]\n"
        "    print(background.start(server, json.dumps(steps).encode(), seconds=20).decode(), flush=True)\n"
        "assert not open(f'/proc/self/task/{os.getpid()}/children').read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock"), str(tmp_path / "pid")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, cwd=tmp_path)
    said, end = done.stdout.splitlines()
    facts = json.loads(said)
    assert end == b"at the end"
    assert [fd for fd in facts["fds"] if fd > 4] == []
    assert facts["group"] == facts["session"] != os.getsid(0)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    with open(tmp_path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(facts["pid"], signal.SIGTERM)
    until(lambda: gone(facts["pid"]))


@pytest.mark.parametrize("code", [0, 3])
def test_one_that_ends_without_an_answer_has_said_nothing(way: str, code: int) -> None:
    began = time.monotonic()
    assert ask(("exit", code)) == b""
    assert time.monotonic() - began < 10


def test_one_that_is_late_is_ended(way: str, tmp_path: Path) -> None:
    assert ask(("wait", str(tmp_path / "pid")), seconds=3.0) == b""
    pid = int((tmp_path / "pid").read_text())
    until(lambda: gone(pid))


def test_an_interrupt_ends_what_was_being_started(way: str, tmp_path: Path) -> None:
    def interrupt() -> None:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", 20)
        os.kill(os.getpid(), signal.SIGALRM)

    def alarm(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, alarm)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(("wait", str(tmp_path / "pid")), seconds=30)
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: gone(pid))


def test_a_large_request_arrives(way: str) -> None:
    assert ask(("print", "x" * (3 << 20)), ("say", "all"), stderr=os.open(os.devnull, os.O_WRONLY)) == b"all"


def test_servers_go_on_when_the_process_that_loaded_them_ends(tmp_path: Path) -> None:
    with background.preloaded(SERVER):
        assert ask(("say", "here"), ("wait", str(tmp_path / "pid"))) == b"here"
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    pid = int((tmp_path / "pid").read_text())
    time.sleep(0.2)
    assert not gone(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))


def test_without_the_process_that_loads_servers_they_load_themselves(caplog: pytest.LogCaptureFixture) -> None:
    before = set(_children())
    with background.preloaded(SERVER):
        (starter,) = set(_children()) - before
        os.kill(starter, signal.SIGKILL)
        assert ask(("say", "here")) == b"here"
        assert "has ended" in caplog.text


def test_it_ends_with_its_owner_and_leaves_servers_alone(tmp_path: Path) -> None:
    code = (
        "import json, os, sys, time\nfrom bootseer.kernel import background\n"
        "server = background.program('support.echoserver')\n"
        "with background.preloaded(server):\n"
        "    background.start(server, json.dumps([('say', 'x'), ('wait', sys.argv[1])]).encode(), seconds=20)\n"
        "    here = f'/proc/self/task/{os.getpid()}/children'\n"
        "    print(open(here).read(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")], stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        (starter,) = map(int, owner.stdout.readline().split())
        owner.kill()
    until(lambda: gone(starter))
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid)
    os.kill(pid, signal.SIGKILL)


def test_a_program_that_is_not_there_is_one_line() -> None:
    with pytest.raises(BootseerError, match="cannot start /no/such"):
        background.start(["/no/such"], b"", seconds=5)


def test_a_server_knows_whether_its_answer_is_heard(way: str, tmp_path: Path) -> None:
    assert ask(("say", "x"), ("heard", str(tmp_path / "heard"))) == b"x"
    until(lambda: (tmp_path / "heard").exists() and (tmp_path / "heard").read_text() == "True")
    code = (
        "import json, sys\nfrom bootseer.kernel import background\n"
        "steps = [('print', 'begun'), ('sleep', 1.0), ('say', 'x'), ('heard', sys.argv[1])]\n"
        "background.start(background.program('support.echoserver'), json.dumps(steps).encode(), seconds=20)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "late")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as owner:
        assert owner.stderr
        assert owner.stderr.readline() == b"begun\n"
        owner.kill()
    until(lambda: (tmp_path / "late").exists() and (tmp_path / "late").read_text() == "False", 10)


@pytest.mark.parametrize("name", ["order", "group", "_hear"])
def test_an_interrupt_before_the_group_is_known_leaves_no_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as soon as that step of the owner's is done. Servers that begin to answer find out that nobody waits."""
    real, calls = getattr(background.Starter, name), []

    def interrupted(*args: Any) -> Any:
        found = real(*args)
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return found

    steps = (("end unheard", str(tmp_path / "end")), ("sleep", 0.5), ("say", "x"), ("wait", str(tmp_path / "pid")))
    with background.preloaded(SERVER):
        with monkeypatch.context() as patch:
            patch.setattr(background.Starter, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(*steps)
        assert ask(("say", "y")) == b"y"
    time.sleep(1.0)
    assert not (tmp_path / "pid").exists()
    assert not (tmp_path / "end").exists() or gone(int((tmp_path / "end").read_text()))


def test_after_one_that_was_given_up_the_next_ones_are_right(tmp_path: Path) -> None:
    """The process that loads servers stands still, as on a disk that hangs: no later answer is taken for another's."""
    before = set(_children())
    with background.preloaded(SERVER):
        assert ask(("say", "loaded")) == b"loaded"
        (starter,) = set(_children()) - before
        os.kill(starter, signal.SIGSTOP)
        with pytest.raises(BootseerError, match="cannot start"):
            ask(("say", "late"), ("wait", str(tmp_path / "late")), seconds=0.5)
        os.kill(starter, signal.SIGCONT)
        assert ask(("say", "a"), ("wait", str(tmp_path / "pid"))) == b"a"
        assert ask(("exit", 0)) == b""
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid)
    os.kill(pid, signal.SIGKILL)
    assert not (tmp_path / "late").exists()


def test_a_request_is_not_left_for_others_to_read(way: str, tmp_path: Path) -> None:
    assert ask(("say", "x"), ("wait", str(tmp_path / "pid"))) == b"x"
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    pid = int((tmp_path / "pid").read_text())
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    os.kill(pid, signal.SIGKILL)


def test_each_thread_has_a_process_of_its_own() -> None:
    answers: dict[int, bytes] = {}

    def mount(number: int) -> None:
        with background.preloaded(SERVER):
            answers[number] = ask(("say", str(number)))

    with background.preloaded(SERVER):
        threads = [threading.Thread(target=contextvars.copy_context().run, args=(mount, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        assert ask(("say", "mine")) == b"mine"
        for thread in threads:
            thread.join()
    assert answers == {number: str(number).encode() for number in range(4)}


class _LentError(Exception):
    pass


@pytest.mark.parametrize(
    "line",
    ["image run x", "image mount x /nowhere", "run job.toml", "fs mount file:///x /nowhere", "env run --target /x y"],
)
def test_each_start_from_the_command_line_is_copied(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has loaded most of what the servers need: to load that anew takes longer than all else of a mount."""

    def lend() -> None:
        raise _LentError

    monkeypatch.setattr(background, "lend", lend)
    verb, *_ = words = line.split()
    with pytest.raises(_LentError):
        assemble(verb)(words, prog_name="bootseer", standalone_mode=False)
