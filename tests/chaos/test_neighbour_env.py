"""A user of the node, and the root of a container, who exchange names in what root's environments are made from while
root's starts go on: nothing outside is read or written, nothing hangs, and each start ends right or with one line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvSpec, Outcome, Target, overlay
from bootseer.errors import BootseerError
from bootseer.kernel import beneath
from bootseer.kernel import mount as mounts

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

ALICE = 65534
SECRET = "the plan: buy all GPUs"

RACER = """
import ctypes, os, sys
uid, folder, outside = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3]
if uid:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
libc = ctypes.CDLL(None)
os.chdir(folder)
for name in ("env", "reqs.txt", "sub"):
    os.symlink(outside if name != "reqs.txt" else outside + "/secret", name + ".link")
os.mkfifo("reqs.txt.pipe")
os.truncate(os.open("reqs.txt.huge", os.O_CREAT | os.O_WRONLY), 2 << 40)
print("racing", flush=True)
while True:
    for pair in ("env link", "sub link", "reqs.txt link", "reqs.txt pipe", "reqs.txt huge"):
        name, _, other = pair.partition(" ")
        for _ in range(2):
            libc.renameat2(-100, name.encode(), -100, f"{name}.{other}".encode(), 2)
"""


@contextlib.contextmanager
def racing(uid: int, folder: Path, outside: Path) -> Iterator[None]:
    racer = subprocess.Popen(
        [sys.executable, "-c", RACER, str(uid), folder, outside], stdout=subprocess.PIPE, text=True
    )
    assert racer.stdout
    try:
        assert racer.stdout.readline() == "racing\n"
        yield
    finally:
        racer.kill()
        racer.communicate()


def starts(root: Path, uid: int, seconds: float) -> tuple[list[str], list[str]]:
    """Starts of root's that use a folder of user ``uid``, who races: their outcomes, and what was wrong."""
    shown, outside = root / "shown", root / "outside"
    (shown / "env").mkdir(parents=True)
    (shown / "sub").mkdir()
    (shown / "reqs.txt").write_text("-r sub/secret\npkg==1\n")
    outside.mkdir()
    (outside / "env").mkdir()
    (outside / "secret").write_text(SECRET)
    (outside / "secret").chmod(0o600)
    for path in (shown, *shown.iterdir()):
        os.chown(path, uid, uid)
    for path in (root, *root.parents):
        path.chmod(path.stat().st_mode | 0o001)
    config = Config(cache_dir=str(root / "cache"), state_dir=str(root / "state"))
    target = Target("/shown/env", str(shown / "env"), str(shown))
    outcomes: list[str] = []
    wrong: list[str] = []
    end, number = time.monotonic() + seconds, 0
    with racing(uid, shown, outside):
        while time.monotonic() < end and not any("outside" in one for one in wrong):
            number += 1
            spec = EnvSpec(
                targets=(target,),
                command=("make-env",),
                image_digest="sha256:1",
                background=False,
                mounts=((str(shown), "/shown"),),
                key_files=(str(shown / "reqs.txt"),),
                salt=str(number % 3),
                wait=0,
                restore="unpack" if number % 4 == 3 else "auto",
            )
            began = time.monotonic()
            try:
                outcomes.append(env.run(spec, lambda: 0, store_url=str(root / "store"), config=config).outcome.value)
            except BootseerError as exc:
                outcomes.append(type(exc).__name__)
            if time.monotonic() - began > 20:
                wrong.append("a start hung")
            if (
                mounts.is_mounted(outside)
                or sorted(os.listdir(outside)) != ["env", "secret"]
                or os.listdir(outside / "env")
            ):
                wrong.append("something outside was covered or written")
            with contextlib.suppress(BootseerError):  # in the control a name leads elsewhere when it is unmounted
                for group in overlay.groups(Path(config.state_dir))[::-1]:
                    group.take_down()
            for entry in mounts.below(root):  # whose name another folder had by then
                if entry.fstype == "overlay":
                    mounts.unmount(entry.target, lazy=True)
    for group in overlay.groups(Path(config.state_dir))[::-1]:
        group.take_down()
    stored = b"".join(path.read_bytes() for path in (root / "store").rglob("*") if path.is_file())
    if SECRET.encode() in stored:
        wrong.append("a secret was published")
    return outcomes, wrong


@pytest.mark.parametrize("uid", [0, ALICE], ids=["the root of a container", "a user"])
def test_nothing_outside_is_touched(tmp_path: Path, uid: int, neighbour_seconds: float) -> None:
    used = {Outcome.RAN_AND_PUBLISHED.value, Outcome.RESTORED_MOUNT.value}
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        outcomes, wrong = starts(tmp_path / str(number), uid, max(10.0, neighbour_seconds))
        assert wrong == []
        assert len(outcomes) > 10
        if uid or used & set(outcomes):  # nobody but root can write there: when the names are right, they are used
            return
    raise AssertionError(outcomes)


def test_without_the_protection_something_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: names are followed as they are."""

    def follow(root: int, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path or ".", flags | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=root)

    monkeypatch.setattr(beneath, "open_at", follow)
    monkeypatch.setattr("bootseer.folders.settled", lambda path: Path(os.path.realpath(path)))
    _, wrong = starts(tmp_path, 0, 15)
    assert "something outside was covered or written" in wrong
