"""Removal of folder trees: as deep as others made them, never through a link or into a mount."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from bootseer.errors import NotWritableError
from bootseer.kernel import mount as mounts
from bootseer.kernel.removal import discard_tree, remove_tree
from bootseer.stripefs import open_fs
from support import forked

pytestmark = pytest.mark.root


def deep(folder: Path, depth: int) -> None:
    """``depth`` folders in one another, with a file in each."""
    folder.mkdir(parents=True)
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def test_a_tree_deeper_than_recursion_and_path_names_go(tmp_path: Path) -> None:
    deep(tmp_path / "tree", 5000)
    try:
        remove_tree(tmp_path / "tree")
        assert not (tmp_path / "tree").exists()
    finally:  # pytest could not
        subprocess.run(["rm", "-rf", tmp_path / "tree"], check=True)
    remove_tree(tmp_path / "tree")


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    other, tree = tmp_path / "other", tmp_path / "tree"
    (other / "sub").mkdir(parents=True)
    (other / "file").write_text("theirs")
    (tree / "in").mkdir(parents=True)
    os.symlink(other, tree / "in" / "link")
    os.symlink(other / "file", tree / "file")
    os.mkfifo(tree / "fifo")
    os.mknod(tree / "whiteout", 0o20000, 0)
    remove_tree(tree)
    assert not tree.exists()
    assert (other / "file").read_text() == "theirs"
    os.symlink(other, tree)
    with pytest.raises(OSError, match="Not a directory"):
        remove_tree(tree)
    assert sorted(path.name for path in other.iterdir()) == ["file", "sub"]


@pytest.mark.parametrize("where", ["", "in/mount"])
def test_nothing_is_removed_when_something_is_mounted(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    other, tree = tmp_path / "other", tmp_path / "tree"
    other.mkdir()
    (other / "file").write_text("theirs")
    (tree / "in" / "mount").mkdir(parents=True)
    subprocess.run(["mount", "--bind", other, tree / where], check=True)
    try:
        with pytest.raises(OSError, match="mounted there"):
            remove_tree(tree)
        discard_tree(tree)
        assert "is left" in caplog.text
        assert (other / "file").read_text() == "theirs"
    finally:
        mounts.unmount(tree / where)
    remove_tree(tree)


def test_a_folder_of_a_store_with_a_mount_below_stays_as_it_was(tmp_path: Path) -> None:
    """Red before: it lost its name and its COMMIT, and so did the checkpoint that was mounted in it."""
    fs = open_fs(str(tmp_path))
    for name in ("other", "run"):
        with fs.create(f"{name}/state") as out:
            out.write(b"x")
        fs.commit(name)
    (tmp_path / "run/data").mkdir()
    subprocess.run(["mount", "--bind", tmp_path / "other", tmp_path / "run/data"], check=True)
    before = sorted(tmp_path.rglob("*"))
    try:
        for call in (lambda: fs.remove_tree("run"), fs.remove_all):
            with pytest.raises(NotWritableError, match=r"run/data is mounted there; .*unmount it"):
                call()
            assert sorted(tmp_path.rglob("*")) == before
    finally:
        mounts.unmount(tmp_path / "run/data")
    fs.remove_tree("run")
    assert os.listdir(tmp_path) == ["other"]


def test_another_file_system_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it was mounted after the look at the list of mounts."""
    tree = tmp_path / "tree"
    (tree / "in" / "mount").mkdir(parents=True)
    (tree / "file").write_text("")
    subprocess.run(["mount", "-t", "tmpfs", "bootseer-test", tree / "in" / "mount"], check=True)
    try:
        (tree / "in" / "mount" / "file").write_text("theirs")
        monkeypatch.setattr(mounts, "entries", lambda: iter(()))
        with pytest.raises(OSError, match="another file system"):
            remove_tree(tree)
        assert (tree / "in" / "mount" / "file").read_text() == "theirs"
        assert not (tree / "file").exists()
    finally:
        monkeypatch.undo()
        mounts.unmount(tree / "in" / "mount")
    remove_tree(tree)


def test_the_rest_goes_when_something_cannot(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("a", "b", "c"):
        (tree / name / "sub").mkdir(parents=True)
        (tree / name / "file").write_text("")
    subprocess.run(["chattr", "+i", tree / "b" / "file"], check=True)
    try:
        with pytest.raises(OSError, match="not permitted"):
            remove_tree(tree)
        assert [str(path.relative_to(tree)) for path in sorted(tree.rglob("*"))] == ["b", "b/file"]
    finally:
        subprocess.run(["chattr", "-i", tree / "b" / "file"], check=True)
    remove_tree(tree)


def test_who_still_uses_an_overlay_is_known(tmp_path: Path) -> None:
    target, upper, work, spare = (tmp_path / name for name in ("target", "upper", "work", "spare"))
    for folder in (target, upper, work, spare):
        folder.mkdir()
    mounts.mount_overlay([spare], target, upper=upper, work=work, source="bootseer-test-7")
    try:
        assert [entry.target for entry in mounts.entries() if entry.source == "bootseer-test-7"] == [str(target)]
        for _ in range(3):
            assert not mounts.in_use(target)
        with open(target / "file", "w"):
            assert mounts.in_use(target)
            assert mounts.upper_in_use(upper, tmp_path / "spare2")
            mounts.unmount(target, lazy=True)
            assert mounts.upper_in_use(upper, tmp_path / "spare2")
        assert not mounts.upper_in_use(upper, tmp_path / "spare2")
    finally:
        if mounts.is_mounted(target):
            mounts.unmount(target)


def test_a_look_that_was_killed_leaves_nothing_in_use(tmp_path: Path) -> None:
    upper, spare = tmp_path / "upper", tmp_path / "spare"
    upper.mkdir()
    code = f"""
import os
from pathlib import Path
from bootseer.kernel import mount
mount.entries = lambda: os._exit(9)
mount.unmount = lambda point: None
mount.upper_in_use(Path({str(upper)!r}), Path({str(spare)!r}))
"""
    assert forked.run("-c", code).returncode == 9
    try:
        assert mounts.below(spare)
        assert not mounts.upper_in_use(upper, spare)
        assert not mounts.below(spare)
    finally:
        for entry in mounts.below(spare):
            mounts.unmount(entry.target)


def test_an_ordinary_user_removes_closed_folders_too(tmp_path: Path) -> None:
    closed = tmp_path / "tree" / "closed"
    (closed / "in").mkdir(parents=True)
    (closed / "in" / "file").write_text("")
    for path in (tmp_path / "tree", closed, closed / "in", closed / "in" / "file"):
        os.chown(path, 1234, 1234)
    for path, mode in ((closed / "in", 0o555), (closed, 0), (tmp_path, 0o777)):
        path.chmod(mode)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(0o755)
    pid = os.fork()
    if not pid:
        gone = False
        with contextlib.suppress(BaseException):  # else it would go on as a second pytest
            os.setuid(1234)
            remove_tree(tmp_path / "tree")
            gone = not (tmp_path / "tree").exists()
        os._exit(0 if gone else 1)
    assert os.waitpid(pid, 0)[1] == 0
