"""Layers applied in memory, mounted or made in a folder, show what the kernel makes of them, whatever the layers are.

`Reference` applies a layer straight to a folder: each path of it is resolved by the kernel (``openat2`` with
``RESOLVE_IN_ROOT``), and none in memory.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bootseer import oci
from bootseer.erofs import Writer
from bootseer.errors import DataError
from bootseer.kernel import mount
from bootseer.kernel.libc import open_in_root
from bootseer.oci import tar
from bootseer.oci.folder import FolderTree
from bootseer.oci.layers import LayeredTree
from support.images import Member, folder, tar_of, write_image
from support.sinks import Nowhere
from support.trees import Found, scan

pytestmark = pytest.mark.root

Layers = Sequence[Sequence[Member]]


def pieces(data: bytes) -> Iterator[bytes]:
    return iter([data[at : at + 5000] for at in range(0, len(data), 5000)])


class Reference:
    """Applies layers, bottom first, to the folder ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self.prefix = os.readlink(b"/proc/self/fd/%d" % self.root)
        self.times: dict[bytes, int] = {b"": 0}
        self.fresh: set[bytes] = set()
        """What this layer made, and the folders above that."""
        os.fchmod(self.root, 0o755)

    def apply(self, reader: tar.ChunkReader) -> None:
        self.fresh = {b""}
        for entry in tar.entries(reader):
            parts = split(entry.name)
            if not parts:
                if entry.kind != tar.DIRECTORY:
                    raise DataError("the root is not a directory")
                put_on(self.root, entry)
                self.times[b""] = entry.mtime_ns
                continue
            parent = self.parent(parts[:-1])
            try:
                if parts[-1].startswith(b".wh."):
                    self.whiteout(parent, parts[-1])
                    reader.skip(entry.size)
                else:
                    self.member(reader, entry, parent, parts[-1])
            finally:
                os.close(parent)

    def finish(self) -> None:
        for path, mtime in self.times.items():
            try:
                fd = open_in_root(self.root, path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue  # replaced by a later layer
            if self.real(fd) == path:  # else: through a link that took a folder's place
                os.utime(fd, ns=(mtime, mtime))
            os.close(fd)
        os.close(self.root)

    def real(self, folder: int, name: bytes = b"") -> bytes:
        path = os.readlink(b"/proc/self/fd/%d" % folder) + b"/" + name
        assert path.startswith(self.prefix + b"/")
        return path[len(self.prefix) :].strip(b"/")

    def parent(self, parts: list[bytes]) -> int:
        """The folder ``parts``, made if missing."""
        fd = os.dup(self.root)
        for count in range(1, len(parts) + 1):
            below = b"/".join(parts[:count])
            try:
                try:
                    inner = open_in_root(self.root, below, os.O_RDONLY | os.O_DIRECTORY)
                except FileNotFoundError:
                    os.mkdir(parts[count - 1], 0o755, dir_fd=fd)  # fails for a link that leads nowhere
                    inner = open_in_root(self.root, below, os.O_RDONLY | os.O_DIRECTORY)
                    self.times[self.real(inner)] = 0
            finally:
                os.close(fd)
            fd = inner
        return fd

    def member(self, reader: tar.ChunkReader, entry: tar.Entry, parent: int, name: bytes) -> None:
        real = self.real(parent, name)
        for count in range(real.count(b"/") + 1):
            self.fresh.add(real.rsplit(b"/", count)[0])
        path = b"/proc/self/fd/%d/%s" % (parent, name)
        if entry.kind == tar.HARDLINK:
            self.hardlink(entry, path, real)
            return
        if entry.kind == tar.DIRECTORY:
            if os.path.islink(path) or not os.path.isdir(path):
                remove(path)
                os.mkdir(path)
            self.times[real] = entry.mtime_ns
        else:
            remove(path)
        if entry.kind == tar.SYMLINK:
            os.symlink(entry.link, path)
        elif entry.kind == tar.REGULAR:
            with open(path, "xb") as file:
                for offset, length in [(0, entry.size)] if entry.extents is None else entry.extents:
                    file.seek(offset)
                    file.writelines(reader.pieces(length))
                file.truncate(entry.file_size)
        elif entry.kind != tar.DIRECTORY:
            os.mknod(path, TYPES[entry.kind] | entry.mode, os.makedev(entry.major, entry.minor))
        put_on(path, entry)

    def hardlink(self, entry: tar.Entry, path: bytes, real: bytes) -> None:
        *above, last = split(entry.link) or [b""]
        folder = open_in_root(self.root, b"/".join(above) or b".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            if self.real(folder, last) == real:
                raise DataError("a hard link to itself")
            target = b"/proc/self/fd/%d/%s" % (folder, last)
            if stat.S_ISDIR(os.lstat(target).st_mode):
                raise DataError("a hard link to a folder")
            remove(path)
            os.link(target, path, follow_symlinks=False)
        finally:
            os.close(folder)

    def whiteout(self, parent: int, name: bytes) -> None:
        if name == b".wh..wh..opq":
            for child in os.listdir(b"/proc/self/fd/%d/." % parent):
                self.remove_lower(self.real(parent, child))
        elif not name.startswith(b".wh..wh."):
            if name in (b".wh.", b".wh..", b".wh..."):
                raise DataError("a bad whiteout")
            self.remove_lower(self.real(parent, name[4:]))

    def remove_lower(self, real: bytes) -> None:
        """What lower layers made at ``real``: never what this one did."""
        path = self.prefix + b"/" + real
        if real not in self.fresh:
            remove(path)
        elif os.path.isdir(path) and not os.path.islink(path):
            for child in os.listdir(path):
                self.remove_lower(real + b"/" + child)


TYPES = {tar.CHAR: stat.S_IFCHR, tar.BLOCKDEV: stat.S_IFBLK, tar.FIFO: stat.S_IFIFO}


def split(name: bytes) -> list[bytes]:
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise DataError("a name that leads out of the root")
    return parts


def remove(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def put_on(path: bytes | int, entry: tar.Entry) -> None:
    """Owner, mode, attributes and time of a member, which replace those that are there."""
    link = {} if isinstance(path, int) else {"follow_symlinks": False}
    os.chown(path, entry.uid, entry.gid, **link)
    if entry.kind != tar.SYMLINK:
        os.chmod(path, entry.mode)
    for key in os.listxattr(path, **link):
        if os.fsencode(key) not in entry.xattrs:
            os.removexattr(path, key, **link)
    for key, value in entry.xattrs.items():
        if not key.startswith(b"trusted.overlay."):
            os.setxattr(path, key, value, **link)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), **link)


def empty(root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return root


def expected(place: Path, tars: Sequence[bytes]) -> Found:
    """As the kernel makes it."""
    reference = Reference(empty(place / "reference"))
    for data in tars:
        reference.apply(tar.ChunkReader(pieces(data)))
    reference.finish()
    return scan(place / "reference")


def unpacked(place: Path, tars: Sequence[bytes]) -> Found:
    """As `oci.unpack` makes it."""
    root = empty(place / "root")
    made = FolderTree(tempfile.mkdtemp(dir=root))
    tree = LayeredTree(made)
    for data in tars:
        tree.apply(pieces(data))
    made.finish(root)
    return scan(root)


def layered(place: Path, tars: Sequence[bytes]) -> Found:
    with (place / "data").open("wb") as data_file:
        writer = Writer(data_file)
        tree = LayeredTree(writer)
        for data in tars:
            writer.begin_layer()
            tree.apply(pieces(data))
        (place / "meta").write_bytes(writer.finish())
    target = place / "image"
    target.mkdir(exist_ok=True)
    mount.mount_erofs(place / "meta", place / "data", target)
    try:
        return scan(target)
    finally:
        mount.unmount(target)


NAME = st.sampled_from(["a", "b", "c", "l", "m", "caf\udce9"])
PATH = st.lists(NAME, min_size=1, max_size=4).map("/".join)
TARGET = st.one_of(
    PATH,
    PATH.map("/".__add__),
    PATH.map("../".__add__),
    st.sampled_from([".", "..", "/", "../..", "./a/", "a/..", "a/../b", "../../l", "l/./m//"]),
)
UIDS = st.sampled_from([0, 7])
TIMES = st.sampled_from([0, 1_500_000_000_123_456_789, 10**18])
KEYS = st.sampled_from(["user.a", "user.b", "trusted.overlay.opaque", "trusted.c"])
XATTRS = st.dictionaries(KEYS, st.sampled_from([b"", b"1", b"long" * 300]), max_size=2)
LINK_XATTRS = st.dictionaries(st.just("trusted.c"), st.just(b"1"), max_size=1)
MODES = st.sampled_from([0o644, 0o755, 0o4755, 0o1777, 0])
DATA = st.sampled_from([b"", b"x", b"y" * 5000, b"z" * 70_000, bytes(70_000)])
DEVICES = st.sampled_from([(0, 0), (1, 3), (259, 70_000)])
NOTHING = st.just("")


def a(
    kind: str,
    *,
    path: st.SearchStrategy[str] = PATH,
    data: st.SearchStrategy[bytes] = st.just(b""),  # noqa: B008
    link: st.SearchStrategy[str] = NOTHING,
    xattrs: st.SearchStrategy[dict[str, bytes]] = LINK_XATTRS,
) -> st.SearchStrategy[Member]:
    return st.builds(Member, path, st.just(kind), data, MODES, UIDS, UIDS, TIMES, link, DEVICES, xattrs)


NAMED = st.one_of(
    st.builds("{}/.wh.{}".format, PATH, NAME),
    st.builds(".wh.{}".format, NAME),
    st.builds("{}/.wh..wh..opq".format, PATH),
)
MEMBER = st.one_of(
    a("file", data=DATA, xattrs=XATTRS),
    a("dir", xattrs=XATTRS),
    a("dir", path=PATH.map("./".__add__), xattrs=XATTRS),
    a("symlink", link=TARGET),
    a("symlink", link=TARGET),
    a("hardlink", link=TARGET, xattrs=st.just({})),
    a("fifo"),
    a("char"),
    NAMED.map(Member),
    a("dir", path=st.just("./"), xattrs=XATTRS),
    st.sampled_from(
        [Member(".wh..wh..opq"), Member("./", "dir", uid=3, xattrs={"user.a": b"1"}), Member("a/.wh..wh.plnk")]
    ),
)
STACK = st.lists(st.lists(MEMBER, max_size=10), max_size=4)


def members_that_apply(layers: Layers) -> Layers:
    """The stack without what is refused, so that most examples get far; refusals have a test of their own."""
    kept = [list(layer) for layer in layers]
    while True:
        tree = LayeredTree(Writer(Nowhere()))
        for layer in kept:
            before = tree.members
            try:
                tree.apply(pieces(tar_of(layer)))
            except DataError:
                del layer[tree.members - before - 1]
                break
        else:
            return kept


@given(STACK)
@example([[folder("a"), Member("a/x"), Member("l", "symlink", link="a")], [Member("l/y"), Member("l/.wh.x")]])
@example(  # the time of a/m is not set through what took the place of a
    [
        [folder("b"), folder("b/m", mtime_ns=7), folder("a"), folder("a/m", mtime_ns=5)],
        [Member(".wh.a")],
        [Member("a", "symlink", link="b")],
    ]
)
@example([[Member("./", "dir", mode=0o755, xattrs={"user.a": b"1"})], [folder("./")]])
@example([[folder("a"), folder("a/b"), Member("a/b/c")], [Member("a/b/m"), Member("a/.wh..wh..opq")]])
@example([[Member("a"), Member("b", "hardlink", link="a")], [Member("a", data=b"new"), folder("b")]])
@example(
    [
        [folder("a"), Member("l", "symlink", link="/a/../../a/.")],
        [Member("l/m/b"), Member("b", "hardlink", link="l/m/b")],
    ]
)
def test_the_same_as_the_kernel_makes(place: Path, layers: Layers) -> None:
    tars = [tar_of(layer) for layer in members_that_apply(layers)]
    found = expected(place, tars)
    assert layered(place, tars) == found
    assert unpacked(place, tars) == found


@given(STACK)
def test_the_same_layers_are_refused(place: Path, layers: Layers) -> None:
    tars = [tar_of(layer) for layer in layers]
    try:
        wanted: Found | None = expected(place, tars)
    except (DataError, OSError):
        wanted = None
    try:
        found: Found | None = layered(place, tars)
    except DataError:
        found = None
    assert (found is None) == (wanted is None)


def test_an_image_with_everything(place: Path) -> None:
    """Through the layout and the pipeline; the control is one changed member."""
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    layers: list[list[Member]] = [
        [
            folder("usr", 0o2755, uid=1),
            *[Member(f"usr/f{number}", data=b"%d" % number * number * 300) for number in range(60)],
            Member("lib", "symlink", link="usr"),
            Member("usr/cap", data=b"c", mode=0o755, xattrs={"security.capability": capability}),
            Member("null", "char", mode=0o666, device=(1, 3)),
            Member("n" * 255, data=b"long name"),
            Member("deep/" * 30 + "f", data=b"deep"),
            Member("t", "symlink", link="t" * 4000),
        ],
        [Member("lib/f3", data=b"new"), Member("lib/.wh.f4"), Member("usr/hard", "hardlink", link="usr/f50")],
    ]
    write_image(place / "layout", layers)
    root = place / "everything"
    with oci.open_image(f"oci:{place}/layout") as image:
        oci.unpack(image, root)
    found = layered(place, [tar_of(layer) for layer in layers])
    assert found == scan(root)
    assert len(found) > 90
    assert found[b"usr/hard"]["links"] == [b"usr/f50", b"usr/hard"]
    layers[1][0] = Member("lib/f3", data=b"neu")
    assert layered(place, [tar_of(layer) for layer in layers]) != found


@pytest.mark.parametrize("fmt", ["0.0", "0.1", "1.0", "gnu"])
def test_sparse_members(place: Path, fmt: str) -> None:
    source = place / f"source-{fmt}"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.truncate(300 << 20)
        for at in (0, 5 << 20, (250 << 20) + 123):
            file.seek(at)
            file.write(b"island" * 1000)
    with (source / "empty").open("wb") as file:
        file.truncate(1 << 20)
    options = ["--format=gnu"] if fmt == "gnu" else ["--format=posix", f"--sparse-version={fmt}"]
    archive = place / f"{fmt}.tar"
    os.spawnlp(os.P_WAIT, "tar", "tar", "-cSf", str(archive), *options, "-C", str(source), "sparse", "empty")
    data = archive.read_bytes()
    assert len(data) < 1 << 20
    assert layered(place, [data]) == unpacked(place, [data]) == expected(place, [data])
    assert (place / "data").stat().st_size <= 3 * (512 << 10)  # the unit for 3 extents in 300 MiB
    assert os.listdir(place / "root")
