"""EROFS images of hostile trees: identical through a mount and an overlay, deterministic, and clean after a failure."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.errors import BootseerError, FullError, NotFoundError, NotWritableError, UnsupportedError
from bootseer.kernel import mount

Found = dict[bytes, dict[str, object]]

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
    write("n" * 254, b"long name")
    write("before-1970", b"o", mtime_ns=-1_000_000_000_500_000_000)
    write("far-future", b"f", mtime_ns=5_000_000_000_000_000_001)
    os.link(root / "size-65537", root / "hard")
    (root / "link").symlink_to("size-65537")
    (root / "long-link").symlink_to("x" * 4000)
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


def scan(root: Path) -> Found:
    """Everything about every path that must survive."""
    found: Found = {}
    top = os.fsencode(root)
    for folder, folders, files in os.walk(top):
        for name in (b".", *folders, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content: object = status.st_rdev
            if kind == stat.S_IFREG:
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            elif kind == stat.S_IFLNK:
                content = os.readlink(path)
            names = os.listxattr(path, follow_symlinks=False)
            found[os.path.relpath(path, top)] = {
                "mode": oct(status.st_mode),
                "owner": (status.st_uid, status.st_gid),
                "links": status.st_nlink if kind == stat.S_IFREG else 0,
                "size": status.st_size if kind != stat.S_IFDIR else 0,
                "mtime": status.st_mtime_ns,
                "content": content,
                "xattrs": {name: os.getxattr(path, name, follow_symlinks=False) for name in names},
            }
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path("/var/tmp") / f"bootseer-erofs-{os.getpid()}"
    path.mkdir()
    yield path
    for entry in reversed(list(mount.entries())):
        if entry.target.startswith(f"{path}/"):
            mount.unmount(entry.target, lazy=True)
    shutil.rmtree(path)


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


@pytest.mark.root
def test_a_changed_byte_is_seen(place: Path) -> None:
    """The comparison above can fail."""
    torture(place / "tree")
    erofs.build(place / "tree", place / "meta", place / "data")
    with (place / "data").open("r+b") as file:
        where = file.read().index((place / "tree" / "size-1000003").read_bytes()[:64]) + 10
        file.seek(where)
        byte = file.read(1)
        file.seek(where)
        file.write(bytes([byte[0] ^ 1]))
    (place / "image").mkdir()
    mount.mount_erofs(place / "meta", place / "data", place / "image")
    assert scan(place / "image") != scan(place / "tree")
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


def test_holes_and_equal_chunks_take_no_room(place: Path) -> None:
    tree = place / "tree"
    tree.mkdir()
    content = os.urandom(1 << 20)
    for number in range(5):
        (tree / f"copy-{number}").write_bytes(content)
    with (tree / "hole").open("wb") as file:
        file.truncate(100 << 20)
    erofs.build(tree, place / "meta", place / "data")
    assert (place / "data").stat().st_size <= (1 << 20) + 65536


def test_the_same_tree_gives_the_same_bytes(place: Path) -> None:
    torture(place / "tree")
    subprocess.run(["cp", "-a", "--sparse=always", place / "tree", place / "copy"], check=True, timeout=60)
    written: list[int] = []
    erofs.build(place / "tree", place / "meta", place / "data", progress=written.append)
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


def test_an_old_meta_never_meets_a_new_data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = _small_tree(place)
    erofs.build(tree, place / "meta", place / "data")
    (tree / "file").write_bytes(os.urandom(1 << 20))
    monkeypatch.setenv("BOOTSEER_FAULTS", "erofs.build.between-renames=eio")
    with pytest.raises(BootseerError):
        erofs.build(tree, place / "meta", place / "data")
    assert not (place / "meta").exists()


def test_no_tool(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = _small_tree(place)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UnsupportedError, match="apt install erofs-utils"):
        erofs.build(tree, place / "meta", place / "data")


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("echo first >&2; echo '<E> erofs: it broke' >&2; exit 1", BootseerError, "it broke"),
        ("echo '<E> erofs: \tCould not format : [Error 28] No space left' >&2; exit 1", FullError, "No space left"),
        ("echo '<E> erofs: [Error 13] Permission denied' >&2; exit 1", NotWritableError, "Permission denied"),
        ("exit 3", BootseerError, "exit code 3"),
        ("kill -9 $$", BootseerError, "exit code -9"),
    ],
)
def test_a_failing_tool_is_quoted(
    place: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[BootseerError], words: str
) -> None:
    tree = _small_tree(place)
    tools = place / "tools"
    tools.mkdir()
    (tools / "mkfs.erofs").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "mkfs.erofs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    with pytest.raises(error, match=words):
        erofs.build(tree, place / "meta", place / "data")
    assert _left(place) == ["tools", "tree"]


def test_bad_input(place: Path) -> None:
    tree = _small_tree(place)

    def fails(error: type[Exception], words: str, action: Callable[[], None]) -> None:
        with pytest.raises(error, match=words):
            action()

    fails(NotFoundError, "no folder", lambda: erofs.build(place / "absent", place / "m", place / "d"))
    fails(NotFoundError, "no folder", lambda: erofs.build(tree / "file", place / "m", place / "d"))
    fails(BootseerError, "lies in", lambda: erofs.build(tree, tree / "m", place / "d"))
    fails(BootseerError, "no such folder", lambda: erofs.build(tree, place / "absent" / "m", place / "absent" / "d"))
    fails(ValueError, "power of two", lambda: erofs.build(tree, place / "m", place / "d", chunk_size=5000))
    (tree / ("n" * 255)).touch()
    fails(UnsupportedError, "too long", lambda: erofs.build(tree, place / "m", place / "d"))
    assert _left(place) == ["tree"]
