"""A set-up command's file operations below an overlay: each does what it does in a plain folder, and its result is
restored on another node, or not published with a reason."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.env import EnvResult, Outcome
from support import envnode

pytestmark = pytest.mark.root

_EXCHANGE, _NOREPLACE = 2, 1


def before(host: Path) -> None:
    """What the target holds on every node before the command."""
    for name in ("old/inner/deep/file", "old/inner/other", "old/file", "second/file", "file"):
        (host / name).parent.mkdir(parents=True, exist_ok=True)
        (host / name).write_text(f"{name}\n")
    os.link(host / "old/file", host / "old/hard")
    (host / "link").symlink_to("old")
    os.chmod(host / "old/inner", 0o750)
    for path in sorted(host.rglob("*"), reverse=True):
        os.utime(path, ns=(10**18, 10**18), follow_symlinks=False)


def renameat2(old: Path, new: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def rename_and_change(host: Path) -> None:
    os.rename(host / "old", host / "new")
    (host / "new/inner/deep/file").write_text("changed\n")
    (host / "new/inner/other").unlink()
    (host / "new/inner/added").write_text("added\n")


def rename_in_renamed(host: Path) -> None:
    os.rename(host / "old", host / "new")
    os.rename(host / "new/inner", host / "new/within")
    os.rename(host / "new/within/deep", host / "deep")


def rename_over_empty(host: Path) -> None:
    (host / "second/file").unlink()
    os.rename(host / "old", host / "second")


def rename_and_back(host: Path) -> None:
    os.rename(host / "old", host / "new")
    os.rename(host / "new", host / "old")


def rename_and_anew(host: Path) -> None:
    os.rename(host / "old", host / "new")
    (host / "old").mkdir()
    (host / "old/file").write_text("another\n")


def hard_links(host: Path) -> None:
    os.link(host / "file", host / "second/hard")
    os.link(host / "old/file", host / "third")
    with (host / "second/hard").open("a") as file:
        file.write("more\n")


def unnamed_file(host: Path) -> None:
    fd = os.open(host, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(fd, b"unnamed\n")
    assert ctypes.CDLL(None).linkat(-100, f"/proc/self/fd/{fd}".encode(), -100, os.fsencode(host / "named"), 0x400) == 0
    os.close(fd)


def open_and_remove(host: Path) -> None:
    with (host / "file").open("r+") as file:
        os.unlink(host / "file")
        file.write("gone\n")
        (host / "file").mkdir()


def attributes(host: Path) -> None:
    os.setxattr(host / "file", "user.x", b"1")
    os.setxattr(host / "old", "user.y", b"2")
    os.chmod(host / "second", 0o711)
    os.utime(host / "old/inner", ns=(5, 5))


def locks(host: Path) -> None:
    with (host / "file").open("r+") as one, (host / "file").open("r+") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        one.write("locked")


def other_kinds(host: Path) -> None:
    (host / "link").unlink()
    (host / "link").mkdir()
    shutil.rmtree(host / "old")
    (host / "old").symlink_to("second")
    os.rename(host / "file", host / "second/file")


def holes(host: Path) -> None:
    with (host / "holes").open("wb") as file:
        file.truncate(5 << 20)
        file.seek(1 << 20)
        file.write(b"middle")


def gnu_mv(host: Path) -> None:
    subprocess.run(["mv", host / "old", host / "moved"], check=True)


OPERATIONS: dict[str, Callable[[Path], None]] = {
    "rename": lambda host: os.rename(host / "old", host / "new"),
    "rename into": lambda host: os.rename(host / "old", host / "second/new"),
    "rename with a changed time": lambda host: (os.rename(host / "old", host / "new"), os.utime(host, ns=(7, 7)))[1],
    "exchange folders": lambda host: renameat2(host / "old", host / "second", _EXCHANGE),
    "exchange kinds": lambda host: renameat2(host / "old", host / "file", _EXCHANGE),
    "no replace": lambda host: renameat2(host / "old", host / "new", _NOREPLACE),
    **{
        act.__name__: act
        for act in (
            rename_and_change, rename_in_renamed, rename_over_empty, rename_and_back, rename_and_anew, hard_links,
            unnamed_file, open_and_remove, attributes, locks, other_kinds, holes, gnu_mv,
        )
    },
}  # fmt: skip


def tree(root: Path) -> dict[str, object]:
    """All that is promised of each entry. (Times of folders that the operation itself changes are of now. Of files that
    were linked before the command, a name that it changes or links again becomes a file of its own.)"""
    out: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        known: list[object] = [info.st_mode]
        if info.st_mtime < 2e9 and info.st_mtime > 1e9 + 1:
            known.append("now")
        else:
            known.append(info.st_mtime_ns)
        if path.is_symlink():
            known.append(os.readlink(path))
        else:
            known.append({name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")})
            known.append(path.read_bytes() if path.is_file() else sorted(os.listdir(path)))
        out[str(path.relative_to(root))] = known
    return out


class Nodes:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []

    def run(self, name: str, act: Callable[[Path], None]) -> tuple[EnvResult, Path]:
        host = self.root / name / "env"
        before(host)
        self.names.append(name)

        def runner() -> int:
            act(host)
            return 0

        return envnode.run(self.root / name, self.root / "store", runner, host, restore="mount"), host


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for name in made.names:
        envnode.release(tmp_path / name / "state")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_works_and_its_result_is_restored(nodes: Nodes, tmp_path: Path, operation: str) -> None:
    plain = tmp_path / "plain"
    before(plain)
    OPERATIONS[operation](plain)
    first, host = nodes.run("a", OPERATIONS[operation])
    assert tree(host) == tree(plain)
    assert first.outcome is Outcome.RAN_AND_PUBLISHED, first.reason
    second, other = nodes.run("b", OPERATIONS[operation])
    assert second.outcome is Outcome.RESTORED_MOUNT, second.reason
    assert tree(other) == tree(plain)


@pytest.mark.parametrize("kind", ["socket", "pipe"])
def test_what_no_snapshot_can_hold_is_made_and_not_published(nodes: Nodes, kind: str) -> None:
    def act(host: Path) -> None:
        if kind == "pipe":
            os.mkfifo(host / "made")
        else:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(host / "made"))

    result, host = nodes.run("a", act)
    assert (result.outcome, result.exit_code) == (Outcome.RAN, 0)
    assert "made: it is a device, a socket or a FIFO" in result.reason
    assert (host / "made").lstat()
