"""EROFS images of hostile trees: identical through a mount and an overlay, deterministic, and clean after a failure."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.errors import BootseerError, DataError, FullError, NotFoundError
from bootseer.kernel import mount
from support import forked
from support.trees import scan

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


def torture(root: Path) -> None:
    """A tree with about everything a container image may hold."""
    root.mkdir()

    def write(name: str, data: bytes, mode: int = 0o644, mtime_ns: int = 1_600_000_000_123_456_789) -> Path:
        path = root / name
        path.write_bytes(data)
        path.chmod(mode)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return path

    for size in (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 1_000_003):
        write(f"size-{size}", os.urandom(size))
    write("suid", b"#!/bin/sh\n", 0o4755)
    write("sgid", b"#!/bin/sh\n", 0o2755)
    write("unreadable", b"secret", 0)
    write(os.fsdecode(b"not-utf8-\xff\xfe"), b"z")
    write("new\nline and space", b"z")
    write("n" * 255, b"long name")
    write("before-1970", b"o", mtime_ns=-1_000_000_000_500_000_000)
    write("far-future", b"f", mtime_ns=5_000_000_000_000_000_001)
    os.link(root / "size-65537", root / "hard")
    (root / "link").symlink_to("size-65537")
    (root / "long-link").symlink_to("x" * 4000)
    (root / "longest-link").symlink_to("x" * 4095)
    (root / "dangling").symlink_to("/absent")
    os.mkfifo(root / "fifo")
    if os.geteuid() == 0:
        os.mknod(root / "char", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.mknod(root / "block", stat.S_IFBLK | 0o600, os.makedev(259, 70000))
        os.setxattr(write("capability", b"c", 0o755), "security.capability", CAPABILITY)
        os.chown(root / "size-1", 70_000, 4_000_000_000)
    os.setxattr(write("attribute", b"u"), "user.long", b"v" * 1000)
    with (root / "sparse").open("wb") as file:
        file.truncate(10 << 20)
        file.seek(5 << 20)
        file.write(b"middle")
    with (root / "only-a-hole").open("wb") as file:
        file.truncate(3 << 20)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    deep = root
    for _ in range(8):
        deep = deep / ("d" * 200)
        deep.mkdir()
    (root / "many").mkdir()
    for number in range(500):
        write(f"many/{number:05}", b"%d" % number)
    os.utime(root / "many", ns=(1, 1_500_000_000_000_000_007))


@pytest.mark.root
def test_a_torture_tree_is_identical_through_mounts(place: Path) -> None:
    torture(place / "tree")
    erofs.build(place / "tree", place / "meta", place / "data")
    expected = scan(place / "tree")
    for name in ("image", "over", "upper", "work"):
        (place / name).mkdir()
    mount.mount_erofs(place / "meta", place / "data", place / "image")
    assert scan(place / "image") == expected
    assert (place / "image" / "hard").stat().st_ino == (place / "image" / "size-65537").stat().st_ino
    mount.mount_overlay([place / "image"], place / "over", upper=place / "upper", work=place / "work")
    through = scan(place / "over")
    for found in (through, expected):
        found.pop(b".")  # the top of an overlay has the upper folder's attributes
    assert through == expected
    mount.unmount(place / "over")
    mount.unmount(place / "image")


def test_meta_holds_no_file_contents(place: Path) -> None:
    tree = place / "tree"
    tree.mkdir()
    for size in (20, 100, 5000, 70_000):
        (tree / f"size-{size}").write_bytes(hashlib.shake_128(b"%d" % size).digest(size))
    erofs.build(tree, place / "meta", place / "data")
    meta, data = (place / "meta").read_bytes(), (place / "data").read_bytes()
    for size in (20, 100, 5000, 70_000):
        start = hashlib.shake_128(b"%d" % size).digest(20)
        assert start not in meta
        assert data.find(start) % 4096 == 0
        assert data.count(start) == 1


def test_holes_take_no_room(place: Path) -> None:
    tree = place / "tree"
    tree.mkdir()
    with (tree / "hole").open("wb") as file:
        file.truncate(100 << 20)
    (tree / "zeros").write_bytes(bytes(10 << 20))
    with (tree / "islands").open("wb") as file:
        for number in range(10):
            file.seek((number * 10 << 20) + 5000)
            file.write(b"island")
    (tree / "content").write_bytes(os.urandom(1 << 20))
    erofs.build(tree, place / "meta", place / "data")
    assert (place / "data").stat().st_size <= (1 << 20) + 11 * 65536


def test_the_same_tree_gives_the_same_bytes(place: Path) -> None:
    torture(place / "tree")
    subprocess.run(["cp", "-a", "--sparse=always", place / "tree", place / "copy"], check=True, timeout=60)
    erofs.build(place / "tree", place / "meta", place / "data")
    erofs.build(place / "copy", place / "meta-2", place / "data-2")
    assert (place / "meta").read_bytes() == (place / "meta-2").read_bytes()
    assert (place / "data").read_bytes() == (place / "data-2").read_bytes()


def _left(place: Path) -> list[str]:
    return sorted(os.listdir(place))


def _small_tree(place: Path) -> Path:
    tree = place / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(os.urandom(3 << 20))
    return tree


@pytest.mark.root
def test_no_space(place: Path) -> None:
    tree, small = _small_tree(place), place / "small"
    small.mkdir()
    mount.mount("tmpfs", small, "tmpfs", data="size=1m")
    with pytest.raises(FullError, match="No space left"):
        erofs.build(tree, small / "meta", small / "data")
    assert _left(small) == []
    mount.unmount(small)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("erofs.build.before-rename=enospc", FullError),
        ("erofs.build.between-renames=enospc", FullError),
        ("erofs.build.before-rename=eio", BootseerError),
    ],
)
def test_a_failure_leaves_neither_part(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: str, error: type[BootseerError]
) -> None:
    tree = _small_tree(place)
    monkeypatch.setenv("BOOTSEER_FAULTS", fault)
    with pytest.raises(error):
        erofs.build(tree, place / "meta", place / "data")
    assert _left(place) == ["tree"]
    monkeypatch.delenv("BOOTSEER_FAULTS")
    erofs.build(tree, place / "meta", place / "data")
    assert _left(place) == ["data", "meta", "tree"]


def test_no_tool_is_needed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = _small_tree(place)
    monkeypatch.setenv("PATH", "/nonexistent")
    erofs.build(tree, place / "meta", place / "data")
    assert (place / "meta").exists()


@pytest.mark.parametrize("action", ["shrink", "grow", "touch", "replace"])
def test_a_file_that_changes_meanwhile_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    tree = _small_tree(place)
    file = tree / "file"

    read = os.pread

    def change(fd: int, length: int, offset: int) -> bytes:
        content = read(fd, length, offset)
        if action == "shrink":
            os.truncate(file, 10_000)
        elif action == "grow":
            with file.open("ab") as more:
                more.write(b"more")
        elif action == "touch":
            file.touch()
        return content

    if action == "replace":
        found = os.open

        def swap(path: bytes, flags: int) -> int:
            if path == os.fsencode(file):
                (tree / "other").write_bytes(bytes(3 << 20))
                os.replace(tree / "other", file)
            return found(path, flags)

        monkeypatch.setattr(os, "open", swap)
    monkeypatch.setattr(os, "pread", change)
    with pytest.raises(DataError, match=r"changed while|was replaced|content ends"):
        erofs.build(tree, place / "meta", place / "data")
    assert _left(place) == ["tree"]


def test_bad_input(place: Path) -> None:
    tree = _small_tree(place)

    def fails(error: type[Exception], words: str, action: Callable[[], None]) -> None:
        with pytest.raises(error, match=words):
            action()

    fails(NotFoundError, "no folder", lambda: erofs.build(place / "absent", place / "m", place / "d"))
    fails(NotFoundError, "no folder", lambda: erofs.build(tree / "file", place / "m", place / "d"))
    fails(BootseerError, "lies in", lambda: erofs.build(tree, tree / "m", place / "d"))
    fails(BootseerError, "no such folder", lambda: erofs.build(tree, place / "absent" / "m", place / "absent" / "d"))
    assert _left(place) == ["tree"]


def test_a_fifo_in_place_of_a_file_does_not_hang(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, listxattr = _small_tree(place), os.listxattr

    def swap(path: bytes, *, follow_symlinks: bool = True) -> list[str]:
        if path.endswith(b"/file"):  # between lstat and open
            os.unlink(path)
            os.mkfifo(path)
        return listxattr(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "listxattr", swap)
    signal.alarm(20)  # an open that waits for a writer cannot be ended otherwise
    try:
        with pytest.raises(DataError, match="replaced"):
            erofs.build(tree, place / "meta", place / "data")
    finally:
        signal.alarm(0)


def test_a_crash_between_the_parts_leaves_no_meta_of_other_data(place: Path) -> None:
    tree, meta, data = _small_tree(place), place / "meta", place / "data"
    erofs.build(tree, meta, data)
    (tree / "file").write_bytes(b"longer content" * 1000)
    script = "import sys; from pathlib import Path; from bootseer.erofs import build\nbuild(*map(Path, sys.argv[1:]))"
    for point, left in (("before-rename", True), ("between-renames", False)):
        env = {**os.environ, "BOOTSEER_FAULTS": f"erofs.build.{point}=kill"}
        assert forked.run("-c", script, tree, meta, data, env=env).returncode == -signal.SIGKILL
        assert meta.exists() == left
