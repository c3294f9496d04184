"""Block servers forked from the program that mounts: right bytes, nothing of the program's left, as safe as others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.serving.members import members
from bootseer.kernel import mount as mounts
from bootseer.store import open_store

pytestmark = pytest.mark.root

_MOUNT = """
import os, signal, sys
from pathlib import Path
from bootseer.blocks import tree
from bootseer.config import Config

tmp, digest = Path(sys.argv[1]), sys.argv[2]
held = open(tmp / "held", "w")
os.set_inheritable(held.fileno(), True)
signal.signal(signal.SIGTERM, lambda *_: print("the program's handler"))
signal.signal(signal.SIGUSR1, lambda *_: None)
made = tree.mount(str(tmp / "store"), digest, tmp / "mnt", cache_dir=tmp / "cache", state_dir=tmp / "state",
                  config=Config(background_fill=False), server=tree.FORK)
print(made.status().pid, flush=True)
"""


@pytest.fixture
def digest(tmp_path: Path) -> str:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(os.urandom(300_000))
    erofs.build(tmp_path / "tree", tmp_path / "meta", tmp_path / "data")
    return tree.publish(open_store(str(tmp_path / "store")), tmp_path / "meta", tmp_path / "data").digest


def mounted_by(tmp_path: Path, digest: str, argv: list[str], cwd: Path | None = None) -> tuple[int, tree.TreeMount]:
    """Have a program mount the tree and end; the pid of the server."""
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return int(done.stdout), tree.attach(tmp_path / "mnt", tmp_path / "state")


def test_it_outlives_the_program_and_has_nothing_of_it(tmp_path: Path, digest: str) -> None:
    pid, made = mounted_by(tmp_path, digest, [sys.executable, "-c", _MOUNT, str(tmp_path), digest])
    try:
        assert (tmp_path / "mnt/file").read_bytes() == (tmp_path / "tree/file").read_bytes()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert words[1:4] == [b"-m", b"bootseer.blocks.serving.server", b"-"]
        assert b"-c" not in words
        status = made.status()
        for one in {pid, status.front_pid, status.fetcher_pid}:
            open_files = [os.readlink(entry) for entry in Path(f"/proc/{one}/fd").iterdir()]
            assert str(tmp_path / "held") not in open_files
            assert {name for name in open_files if name.endswith(".log")} == {f"{tmp_path}/state/trees/{made.id}.log"}
            signals = dict(line.split(":\t", 1) for line in Path(f"/proc/{one}/status").read_text().splitlines())
            assert not int(signals["SigCgt"], 16) >> 9 & 1  # SIGUSR1
            assert int(signals["SigBlk"], 16) == 0
        assert os.getsid(pid) == os.getpgid(pid) != os.getsid(0)
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    finally:
        made.unmount()
    assert pid not in members(tmp_path / "state/trees" / made.id)
    log = (tmp_path / "state/trees" / f"{made.id}.log").read_text()
    assert "the program's handler" not in log
    assert "Traceback" not in log


def test_a_program_with_too_short_a_command_line_gets_one_that_is_executed(tmp_path: Path, digest: str) -> None:
    (tmp_path / "m").write_text(_MOUNT.replace("sys.argv[1]", repr(str(tmp_path))).replace("sys.argv[2]", repr(digest)))
    (tmp_path / "v").symlink_to(sys.prefix)
    pid, made = mounted_by(tmp_path, digest, ["v/bin/python", "m"], cwd=tmp_path)
    try:
        assert (tmp_path / "mnt/file").read_bytes() == (tmp_path / "tree/file").read_bytes()
        assert str(tmp_path / "store").encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        made.unmount()


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_ends_when_the_program_is_killed_before_it_says_what_to_serve(tmp_path: Path) -> None:
    code = (
        "import sys, time; from bootseer.blocks.serving import standby\n"
        "with standby.standby('/x', fork=True):\n"
        "    print(standby._waiting[0].server.process.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, "x" * 40], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    time.sleep(0.5)  # it has made its session, and waits
    assert alive(group)
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    end = time.monotonic() + 10
    while alive(group) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(group)


def test_a_tree_that_is_not_there_is_an_error_and_leaves_nothing(tmp_path: Path, digest: str) -> None:
    done = subprocess.run([sys.executable, "-c", _MOUNT, str(tmp_path), "0" * 64], capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert "NotFoundError" in done.stderr
    assert not mounts.is_mounted(tmp_path / "mnt")
    assert not list(tmp_path.glob("state/trees/*/spec.json"))


_INTERRUPTED = """
import contextlib, os, signal
from bootseer.blocks.serving import standby

real, program = os.fork, os.getpid()

def fork():
    pid = real()
    os.kill(os.getpid(), signal.SIGINT if not pid else 0)
    return pid

os.fork = fork
with contextlib.ExitStack() as undo:
    undo.callback(lambda: print("the program" if os.getpid() == program else "its child", flush=True))
    with standby.standby("/x", fork=True):
        print("forked", os.getpid() == program, signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
"""


def test_a_signal_right_after_the_fork_does_not_have_the_child_end_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["forked True set()", "the program"]


_THREADS = """
import os, threading
from bootseer.blocks.serving import standby

def fork():
    raise AssertionError("forked")

os.fork = fork
threading.Thread(target=threading.Event().wait, daemon=True).start()
with standby.standby("/x", fork=True):
    print(type(standby._waiting[0].server.process).__name__)
"""


def test_a_program_with_threads_gets_one_that_is_executed() -> None:
    done = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "Popen\n"), done.stderr
