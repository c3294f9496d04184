"""Images of our writer, mounted: the same as their source, and as what ``mkfs.erofs`` makes of it."""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer import erofs
from bootseer.erofs import Attrs, Buffer, Hole, Writer
from bootseer.kernel import mount
from support.trees import Found, scan

pytestmark = pytest.mark.root

FILE = Attrs(0o644)
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


def acl(*entries: tuple[int, int, int]) -> bytes:
    """A POSIX ACL as an attribute: (tag, permissions, id)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


ACL = acl((1, 6, 0xFFFFFFFF), (2, 4, 1000), (4, 4, 0xFFFFFFFF), (0x10, 4, 0xFFFFFFFF), (0x20, 4, 0xFFFFFFFF))


def through_mount(meta: Path, data: Path, target: Path) -> Found:
    target.mkdir(exist_ok=True)
    mount.mount_erofs(meta, data, target)
    try:
        return scan(target)
    finally:
        mount.unmount(target)


class Sparse:
    """A data device in a file; zeros become holes."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.position = 0

    def write(self, data: Buffer, /) -> None:
        view = memoryview(data)
        if view[0] or view[-1] or view.tobytes() != bytes(len(view)):
            self.file.seek(self.position)
            self.file.write(view)
        self.position += len(view)

    def done(self) -> None:
        self.file.truncate(self.position)
        self.file.close()


NAMES = st.one_of(
    st.sampled_from([b"a", b"b", b"-", b"..a", b"\xff\xfe", b"x" * 255, b"new\nline", b" ", b"\xc3\xa9", b".wh.a"]),
    st.binary(min_size=1, max_size=12).filter(lambda name: not set(name) & {0, 47} and name not in (b".", b"..")),
    st.integers(1, 255).map(lambda size: b"n" * size),
)
SIZES = st.one_of(st.integers(0, 20), st.sampled_from([4095, 4096, 4097, 65535, 65536, 65537, 200_000]))
XATTRS = st.dictionaries(
    st.sampled_from([b"user.a", b"user.b", b"user." + b"n" * 250, b"trusted.overlay.opaque", b"trusted.x"]),
    st.one_of(st.binary(max_size=30), st.sampled_from([b"v" * 900, b"shared"])),
    max_size=3,
)
ATTRS = st.tuples(
    st.integers(0, 0o7777),
    st.sampled_from([0, 1000, 65535, 65536, 4_000_000_000]),
    st.sampled_from(
        [0, 1_600_000_000_000_000_000, 1_600_000_000_123_456_789, -1_500_000_000, 9_000_000_000_000_000_001]
    ),
)
KINDS = st.sampled_from(
    ["file", "file", "file", "dir", "dir", "link", "sparse", "fifo", "char", "block", "hard", "many"]
)
STEPS = st.lists(st.tuples(KINDS, st.integers(0, 50), NAMES, SIZES, ATTRS, XATTRS), max_size=25)
Step = tuple[str, int, bytes, int, tuple[int, int, int], dict[bytes, bytes]]


def make(top: bytes, steps: list[Step]) -> None:
    """A directory of these steps; those that do not fit are left out."""
    os.mkdir(top)
    folders = [top]
    files: list[bytes] = []
    times: dict[bytes, int] = {top: 1_500_000_000_000_000_000}
    for kind, where, name, size, (mode, owner, mtime), xattrs in steps:
        path = folders[where % len(folders)] + b"/" + name
        if os.path.lexists(path) or len(path) > 3000:
            continue
        if kind in ("dir", "many"):
            os.mkdir(path)
            folders.append(path)
            for number in range(size % 400 if kind == "many" else 0):
                os.close(os.open(path + b"/%d" % number, os.O_CREAT | os.O_WRONLY, 0o600))
                times[path + b"/%d" % number] = mtime
        elif kind == "link":
            os.symlink(b"t" * min(max(size, 1), 4095), path)
        elif kind == "hard":
            if files:
                os.link(files[where % len(files)], path, follow_symlinks=False)
            continue
        elif kind in ("fifo", "char", "block"):
            types = {"fifo": stat.S_IFIFO, "char": stat.S_IFCHR, "block": stat.S_IFBLK}
            os.mknod(path, types[kind] | 0o600, os.makedev(size % 4096, size) if kind != "fifo" else 0)
        else:
            with open(path, "wb") as file:
                if kind == "sparse":
                    file.truncate(size * 5)
                    file.seek(size * 2)
                file.write(random.Random(size).randbytes(size))
            if size % 3 == 0:
                os.setxattr(path, "security.capability", CAPABILITY)
        files += [path] if kind not in ("dir", "many") else []
        os.chown(path, owner, owner, follow_symlinks=False)
        if kind != "link":
            os.chmod(path, mode)
        for key, value in xattrs.items():
            if kind in ("file", "sparse", "dir", "many") or not key.startswith(b"user."):
                os.setxattr(path, key, value, follow_symlinks=False)
        times[path] = mtime
    for path, mtime in reversed(times.items()):
        os.utime(path, ns=(mtime, mtime), follow_symlinks=False)


@given(STEPS)
def test_any_tree_is_identical_through_a_mount(place: Path, steps: list[Step]) -> None:
    tree = place / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    make(os.fsencode(tree), steps)
    erofs.build(tree, place / "meta", place / "data")
    assert through_mount(place / "meta", place / "data", place / "image") == scan(tree)
    command = ["fsck.erofs", f"--device={place}/data", "--extract", f"{place}/meta"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_same_as_mkfs(place: Path) -> None:
    """A tree of some hundred random entries, through our image and through one of mkfs.erofs."""
    tree = place / "tree"
    rand = random.Random(7)
    steps: list[Step] = []
    kinds = ["file"] * 6 + ["dir", "dir", "link", "sparse", "fifo", "char", "hard", "many"]
    for number in range(300):
        name = b"%d" % number + b"\xe9" * rand.choice([0, 1, 200])
        attrs = (rand.choice([0o644, 0o4755, 0o1777, 0]), rand.choice([0, 70_000]), rand.randrange(2 * 10**18))
        xattrs = {b"user.k": rand.randbytes(20), b"trusted.overlay.opaque": b"y"} if rand.random() < 0.2 else {}
        size = int(rand.paretovariate(0.5)) % 300_000
        steps.append((rand.choice(kinds), rand.randrange(100), name, size, attrs, xattrs))
    shutil.rmtree(tree, ignore_errors=True)
    make(os.fsencode(tree), steps)
    (tree / "acl").touch()
    os.setxattr(tree / "acl", "system.posix_acl_access", ACL)
    (tree / "default").mkdir()
    os.setxattr(tree / "default", "system.posix_acl_default", ACL)
    erofs.build(tree, place / "meta", place / "data")
    command = ["mkfs.erofs", "--quiet", f"--blobdev={place}/data2", "--chunksize=65536", "--preserve-mtime"]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(2**64 - 2)}
    subprocess.run([*command, f"{place}/meta2", str(tree)], env=environ, check=True, timeout=60)
    ours = through_mount(place / "meta", place / "data", place / "image")
    theirs = through_mount(place / "meta2", place / "data2", place / "image")
    assert ours == theirs == scan(tree)
    assert len(ours) > 300
    assert "system.posix_acl_access" in os.listxattr(tree / "acl")
    assert ours[b"acl"]["xattrs"] == {b"system.posix_acl_access": ACL}


def test_a_mount_of_a_damaged_image_differs(place: Path) -> None:
    """The comparisons above can fail: any changed byte of an inode is seen."""
    tree = place / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    (tree / "f").write_bytes(b"content")
    erofs.build(tree, place / "meta", place / "data")
    meta = bytearray((place / "meta").read_bytes())
    reader = erofs.Reader(bytes(meta))
    at = reader.stat(b"f").nid * 32 + 4
    meta[at] ^= 0o4
    meta[1032] &= ~1  # no checksum
    (place / "meta").write_bytes(meta)
    assert through_mount(place / "meta", place / "data", place / "image") != scan(tree)


def test_large_directories_and_files(place: Path) -> None:
    """100,000 names; files of 5 GiB with holes."""
    sink = Sparse(place / "data")
    writer = Writer(sink)
    writer.add_dir(b"many", Attrs(0o755))
    names = [b"%d-%s" % (number, b"n" * (number % 40)) for number in range(100_000)]
    for name in names:
        writer.add_file(b"many/" + name, FILE, 0, ())
    gib = 1 << 30
    writer.add_file(b"holes", FILE, 5 * gib + 5, [b"begin", Hole(5 * gib - 5), b"end!!"])
    writer.add_file(b"mid", FILE, 5 * gib, [Hole(gib), b"m" * 70_000, Hole(3 * gib), b"n", Hole(gib - 70_001)])
    (place / "meta").write_bytes(writer.finish())
    sink.done()
    assert (place / "data").stat().st_size == sink.position
    target = place / "image"
    target.mkdir(exist_ok=True)
    mount.mount_erofs(place / "meta", place / "data", target)
    try:
        found = os.listdir(os.fsencode(target / "many"))
        assert len(found) == len(names)
        assert set(found) == set(names)
        for name in random.Random(1).sample(names, 500):
            assert os.stat(os.fsencode(target / "many") + b"/" + name).st_size == 0
        for name in (b"0", b"1-", b"99999", b"zzz", b"50000-nnn"):
            assert not os.path.exists(os.fsencode(target / "many") + b"/" + name)
        with (target / "holes").open("rb") as file:
            assert os.fstat(file.fileno()).st_size == 5 * gib + 5
            assert os.pread(file.fileno(), 10, 0) == b"begin" + bytes(5)
            assert os.pread(file.fileno(), 100, 5 * gib - 5) == bytes(5) + b"end!!"
            assert os.lseek(file.fileno(), 1 << 20, os.SEEK_DATA) >= 5 * gib - (1 << 20)
        with (target / "mid").open("rb") as file:
            assert os.pread(file.fileno(), 70_002, gib - 1) == b"\0" + b"m" * 70_000 + b"\0"
            assert os.pread(file.fileno(), 3, 4 * gib + 69_999) == b"\0n\0"
            assert os.pread(file.fileno(), 1 << 20, 2 * gib) == bytes(1 << 20)
    finally:
        mount.unmount(target)
    command = ["fsck.erofs", f"--device={place}/data", f"{place}/meta"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_of_one_index_beyond_4_gib(place: Path) -> None:
    """With units as large as the file its zeros are data: one chunk of 8 GiB. What follows lies beyond 4 GiB."""
    gib = 1 << 30
    sink = Sparse(place / "data")
    writer = Writer(sink, align=8 * gib)
    node = writer.add_file(b"f", FILE, 5 * gib, [b"begin", Hole(5 * gib - 10), b"end!!"])
    assert (node.chunks, node.start) == (None, 0)
    writer.add_file(b"after", FILE, 6, [b"after!"])
    meta = writer.finish()
    (place / "meta").write_bytes(meta)
    sink.done()
    assert sink.position == 5 * gib + 4096
    target = place / "image"
    target.mkdir(exist_ok=True)
    mount.mount_erofs(place / "meta", place / "data", target)
    try:
        with (target / "f").open("rb") as file:
            assert os.pread(file.fileno(), 6, 0) == b"begin\0"
            assert os.pread(file.fileno(), 10, 5 * gib - 6) == b"\0end!!"
        assert (target / "after").read_bytes() == b"after!"
    finally:
        mount.unmount(target)


def test_an_image_without_data_mounts_with_and_without_a_data_file(place: Path) -> None:
    sink = Sparse(place / "data")
    writer = Writer(sink)
    writer.add_symlink(b"l", FILE, b"target")
    (place / "meta").write_bytes(writer.finish())
    sink.done()
    target = place / "image"
    target.mkdir(exist_ok=True)
    for data in (place / "data", None):
        mount.mount_erofs(place / "meta", data, target)
        assert os.readlink(target / "l") == "target"
        mount.unmount(target)
