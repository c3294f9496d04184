"""Errands: the node daemon restores an environment for root's `env run`, or leaves it all to that."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import bootseer
from bootseer.config import Config
from bootseer.env import Target, lock, overlay
from bootseer.errors import PrivilegeError, UnavailableError
from bootseer.kernel import mount as mounts
from bootseer.kernel import procfs
from bootseer.node import access, client, thin
from bootseer.node.daemon import Daemon
from bootseer.node.protocol import NodeReply, socket_path
from bootseer.wiretypes import json_as
from support.nodedaemon import NodeDaemon, User
from support.waits import until

pytestmark = pytest.mark.root

_MAIN = "import sys; from bootseer.cli import main\ntry: main.main()\nfinally: print(*sys.modules, file=sys.stderr)"


class Job:
    """Root's command lines on a node whose daemon is ``daemon``, with folders of their own, in the folder ``work``."""

    def __init__(self, daemon: NodeDaemon, work: Path) -> None:
        self.daemon, self.work, self.target = daemon, work, work / "env"
        own = {name: str(work.parent / name) for name in ("cache", "state")}
        self.config = Config(cache_dir=own["cache"], state_dir=own["state"])
        self.environ = {**os.environ, **{f"BOOTSEER_{name.upper()}_DIR": path for name, path in own.items()}}
        self.environ |= {"BOOTSEER_STORE": str(work.parent / "store"), "BOOTSEER_NODE_DIR": daemon.config.node_dir}
        work.mkdir()
        (work / "setup.sh").write_text("mkdir -p env; echo $PPID > env/made; cat $FROM >> env/made\n")

    def start(self, *before: str, words: str = "--no-background", **environ: str) -> subprocess.Popen[str]:
        argv = [*before, sys.executable, "-c", _MAIN, "env", "run", "--json", "--target", "env", *words.split()]
        return subprocess.Popen(
            [*argv, "--", "sh", "setup.sh"], cwd=self.work, env={"FROM": "/dev/null", **self.environ, **environ},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *before: str, words: str = "--no-background", **environ: str) -> tuple[str, set[str]]:
        """The outcome, and the modules that were loaded for it."""
        with self.start(*before, words=words, **environ) as process:
            said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return json.loads(said)["outcome"], set(errors.split())

    def errands(self) -> tuple[int, int]:
        """How many were done, and how many were not."""
        found = client.node(config=self.daemon.config)
        return found.done.get("errand", 0), found.failed.get("errand", 0)

    def release(self) -> None:
        for group in overlay.groups(Path(self.config.state_dir))[::-1]:
            group.take_down()


@pytest.fixture
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="bootseer-pytest-", dir="/var/tmp") as name:
        (folder := Path(name)).chmod(0o755)  # for users
        daemon = NodeDaemon(folder, f"{folder}/store")
        daemon.start()
        made = Job(daemon, folder / "work")
        yield made
        made.release()
        daemon.stop()


def test_a_hit_is_restored_by_the_daemon_for_the_one_that_asks(job: Job) -> None:
    assert job.run()[0] == "ran-and-published"
    job.release()
    assert job.errands() == (0, 1)
    outcome, loaded = job.run()
    assert outcome == "restored-mount"
    assert job.errands() == (1, 1)
    assert not {"typer", "msgspec", "socket", "pathlib", "json", "bootseer.env"} & loaded
    assert (job.target / "made").exists()
    (group,) = overlay.groups(Path(job.config.state_dir))
    assert str(os.getpid()) in [user.split(":")[0] for user in group.record.users]
    assert job.run()[0] == "restored-mount"  # it is in place
    assert job.errands() == (2, 1)


def test_a_miss_is_run_by_the_one_that_asks(job: Job) -> None:
    with job.start() as process:
        said, _ = process.communicate(timeout=120)
    assert json.loads(said)["outcome"] == "ran-and-published"
    assert (job.target / "made").read_text().split() == [str(process.pid)]
    job.release()
    assert job.run(FROM="/etc/hostname")[0] == "ran-and-published"  # a variable of the one that asks counts
    assert job.errands() == (0, 2)


@pytest.mark.parametrize("words", ["--refresh --no-background", "--no-snapshot", "--check true", "--dry-run"])
def test_what_is_more_than_a_restore_is_not_done(job: Job, words: str) -> None:
    job.run()
    job.release()
    with job.start(words=words) as process:
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert job.errands() == (0, 2)


@pytest.mark.parametrize(
    "before",
    [
        ["setpriv", "--bounding-set=-sys_chroot"],
        ["setpriv", "--no-new-privs"],
        ["setpriv", "--regid=1", "--clear-groups"],
        ["unshare", "-m"],
        ["unshare", "-n"],
        ["unshare", "-u"],
    ],
)
def test_one_with_other_rights_or_namespaces_does_it_alone(job: Job, before: list[str]) -> None:
    job.run()
    job.release()
    assert job.run(*before)[0] == "restored-mount"
    assert job.errands() == (0, 2)
    assert mounts.is_mounted(job.target) == (before != ["unshare", "-m"])


def test_another_bootseer_does_it_alone(job: Job, tmp_path: Path) -> None:
    job.run()
    job.release()
    shutil.copytree(Path(bootseer.__file__).parent, tmp_path / "other/bootseer")
    assert job.run(PYTHONPATH=str(tmp_path / "other"))[0] == "restored-mount"
    assert job.errands() == (0, 2)


def test_an_errand_counts_for_the_one_that_asks_and_has_its_time_zone() -> None:
    """Red before: the cgroups and the time zone stayed those of the service."""
    steps: list[object] = []
    serving = SimpleNamespace(
        _errand=lambda words, parent: bool(steps.append((words, time.tzname[0]))) or True,
        _part=SimpleNamespace(draining=False),
        _stamp=thin.stamp(),
        _start=lambda client, name, work, *rest: steps.append(work()),
    )
    file, pidfd = os.memfd_create("errand"), os.pidfd_open(os.getpid())
    os.write(file, b"\0".join([thin.stamp(), b"18", b"1", b"env", b"TZ=XYZ-1", b""]))
    asking = SimpleNamespace(uid=0, file=file, pid=os.getpid(), pidfd=pidfd)
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException), mock.patch.object(access, "join", steps.append):
            vars(Daemon)["_do_errand"](serving, asking, None)
            os._exit(steps != [tuple(procfs.cgroups()), (["env"], "XYZ"), NodeReply()])
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(file)
    os.close(pidfd)


def asked(path: Path, text: bytes | None) -> NodeReply:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        file = os.memfd_create("errand")
        os.write(file, text or b"")
        socket.send_fds(sock, [b'{"do":"errand","version":1}'], [file] if text is not None else [])
        os.close(file)
        return json_as(sock.recv(1 << 16), NodeReply)


@pytest.mark.parametrize(
    "text", [None, b"", b"x", b"\0" * 10, b"{}\0" + b"0\0" * 3, b"{}\0-1\0x\0", b"{}\0" + b"9\0" * 2]
)
def test_what_is_no_errand_is_refused(job: Job, text: bytes | None) -> None:
    text = text and text.replace(b"{}", thin.stamp())
    reply = asked(socket_path(job.daemon.config.node_dir), text)
    assert reply.code == (PrivilegeError if text is None else UnavailableError).exit_code
    assert job.daemon.serves


def test_nobody_but_root_is_served(job: Job) -> None:
    path, text = socket_path(job.daemon.config.node_dir), thin.stamp() + b"\x0018\x000\0"
    with User(65534) as user:
        assert user.do(asked, path, text).code == PrivilegeError.exit_code


def test_a_daemon_that_stands_still_is_not_waited_for(job: Job) -> None:
    job.run()
    job.release()
    pid = client.node(config=job.daemon.config).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert job.run()[0] == "restored-mount"
        assert time.monotonic() - began < 60  # an errand has 200
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_errand_ends_with_the_one_that_asks(job: Job) -> None:
    job.run()
    job.release()
    with job.start() as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    until(lambda: client.node(config=job.daemon.config).running == 0, 30.0, "the end of the errand")
    assert job.run()[0] == "restored-mount"


def test_another_stage_on_the_target_is_waited_for_by_the_one_that_asks(job: Job) -> None:
    job.run()
    job.release()
    state = Path(job.config.state_dir)
    with lock.locked((Target(str(job.target)),), state):
        process = job.start()
        until(lambda: job.errands() == (0, 2), 30.0, "the end of the errand")
        assert process.poll() is None
    said, errors = process.communicate(timeout=60)
    assert json.loads(said)["outcome"] == "restored-mount"
    assert "too long" not in errors


def test_where_the_daemon_is_drained_or_gone_it_is_done_without(job: Job) -> None:
    job.run()
    job.daemon.kill()
    job.release()
    assert socket_path(job.daemon.config.node_dir).exists()
    assert job.run()[0] == "restored-mount"
