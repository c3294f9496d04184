"""Layer rules in memory: what a container sees, and what a hostile layer cannot do. Needs no root."""

from __future__ import annotations

import os
import re
import stat
import tarfile
import time
import tracemalloc
from collections.abc import Sequence

import pytest

from bootseer.erofs import Node, Reader, Writer
from bootseer.errors import DataError
from bootseer.oci.layers import LayeredTree
from support.images import Member, folder, tar_of
from support.sinks import Memory, Nowhere

Layers = Sequence[Sequence[Member]]


class Image:
    """The layers as an image, read back."""

    def __init__(self, layers: Layers) -> None:
        self.sink = Memory()
        self.writer = Writer(self.sink)
        self.tree = LayeredTree(self.writer)
        for layer in layers:
            self.writer.begin_layer()
            data = tar_of(layer)
            self.tree.apply(iter([data[at : at + 777] for at in range(0, len(data), 777)]))
        self.reader = Reader(self.writer.finish(), self.sink.read)

    def node(self, path: str) -> Node:
        node = self.writer.lookup(os.fsencode(path))
        assert node is not None, path
        return node

    def read(self, path: str) -> bytes:
        inode = self.reader.stat(os.fsencode(path))
        return self.reader.read(inode, 0, inode.size)

    def names(self) -> set[str]:
        found: set[str] = set()

        def walk(node: Node, path: bytes) -> None:
            for name, child in (node.children or {}).items():
                found.add(os.fsdecode(path + name))
                walk(child, path + name + b"/")

        walk(self.writer.root, b"")
        return found


def test_everything_a_member_says() -> None:
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    odd = os.fsdecode(b"caf\xe9")
    image = Image(
        [
            [
                folder("./", 0o711, uid=3),
                folder("d", 0o2750, uid=1, gid=2, mtime_ns=1_111_111_111_111_111_111),
                Member("d/f", data=b"hello" * 300_000, mode=0o4755, uid=5, gid=6, mtime_ns=1_222_222_222_222_222_222),
                Member("d/cap", data=b"x", mode=0o755, xattrs={"security.capability": capability, "user.k": b"\0\xff"}),
                Member("d/link", "symlink", link="f", uid=7, mtime_ns=1_333_333_333_333_333_333),
                Member("d/hard", "hardlink", link="d/f"),
                Member("d/null", "char", mode=0o666, device=(1, 3)),
                Member("d/pipe", "fifo", mode=0o622, gid=9),
                Member(odd, data=b"odd"),
                Member("implied/deep/file"),
            ]
        ]
    )
    root, d, f, link = (image.node(name) for name in ("", "d", "d/f", "d/link"))
    assert (root.mode, root.uid) == (stat.S_IFDIR | 0o711, 3)
    assert (d.mode, d.uid, d.gid, d.mtime_ns) == (stat.S_IFDIR | 0o2750, 1, 2, 1_111_111_111_111_111_111)
    assert (f.mode, f.uid, f.gid, f.mtime_ns) == (stat.S_IFREG | 0o4755, 5, 6, 1_222_222_222_222_222_222)
    assert image.read("d/f") == b"hello" * 300_000
    assert dict(image.node("d/cap").xattrs) == {b"security.capability": capability, b"user.k": b"\0\xff"}
    assert (link.mode, link.target, link.uid) == (stat.S_IFLNK | 0o777, b"f", 7)
    assert image.node("d/hard") is f
    assert (image.node("d/null").mode, image.node("d/null").rdev) == (stat.S_IFCHR | 0o666, 0x103)
    assert (image.node("d/pipe").mode, image.node("d/pipe").gid) == (stat.S_IFIFO | 0o622, 9)
    assert image.read(odd) == b"odd"
    implied = image.node("implied/deep")
    assert (implied.mode, implied.uid, implied.mtime_ns) == (stat.S_IFDIR | 0o755, 0, 0)
    assert image.tree.members == 10


def test_later_layers_replace() -> None:
    image = Image(
        [
            [Member("f", data=b"old"), folder("d"), Member("d/x"), folder("e"), Member("e/y"),
             Member("l", "symlink", link="d"), Member("h1", data=b"both"), Member("h2", "hardlink", link="h1")],
            [Member("f", data=b"new"), Member("d", data=b"now a file"), folder("l"), Member("l/z"),
             folder("e", 0o700, uid=4), Member("h1", data=b"own")],
        ],
    )  # fmt: skip
    assert image.names() == {"f", "d", "l", "l/z", "e", "e/y", "h1", "h2"}
    assert [image.read(name) for name in ("f", "d", "h1", "h2")] == [b"new", b"now a file", b"own", b"both"]
    assert image.node("e").uid == 4
    dead = image.writer.dead_ranges()
    assert dead[0] == (0, 4096)  # the old f


def test_members_below_a_link_land_where_it_points() -> None:
    lower = [
        folder("usr"),
        folder("usr/lib"),
        Member("lib", "symlink", link="usr/lib"),
        Member("abs", "symlink", link="/usr"),
        Member("out", "symlink", link="../../../usr/./lib/"),
        Member("twice", "symlink", link="out/.."),
        Member("far/away/abs", "symlink", link="/usr"),
        Member("far/away/up", "symlink", link="../../usr"),
    ]
    upper = [
        Member("far/away/abs/e"),
        Member("far/away/up/f"),
        Member("lib/a"),
        Member("abs/lib/b"),
        folder("abs/new"),
        Member("out/c"),
        Member("twice/d"),
    ]
    image = Image([lower, upper])
    assert {"usr/lib/a", "usr/lib/b", "usr/new", "usr/lib/c", "usr/d", "usr/e", "usr/f"} <= image.names()
    assert image.node("lib").target == b"usr/lib"


def test_whiteouts() -> None:
    lower = [
        folder("d"), Member("d/a"), Member("d/b"), folder("d/sub"), Member("d/sub/c"), Member("gone"), folder("e"),
        Member("e/f"),
    ]  # fmt: skip
    upper = [Member("d/.wh.a"), Member(".wh.gone"), Member(".wh.never-there"), Member("d/.wh.sub"), Member(".wh.e")]
    assert Image([lower, upper]).names() == {"d", "d/b"}
    assert Image([lower, [Member(".wh..wh..opq", data=b"skipped"), Member(".wh..wh.aufs")]]).names() == set()


@pytest.mark.parametrize(
    "upper",
    [
        [Member("d/new"), Member("d/s/new"), Member("d/.wh..wh..opq")],
        [Member("d/.wh..wh..opq"), Member("d/new"), Member("d/s/new")],
        [Member("d/new"), Member("d/s/new"), Member(".wh.d")],
    ],
)
def test_a_whiteout_spares_members_of_its_own_layer(upper: list[Member]) -> None:
    lower = [folder("d"), Member("d/old"), folder("d/s"), Member("d/s/old")]
    assert Image([lower, upper]).names() == {"d", "d/new", "d/s", "d/s/new"}


def test_a_directory_listed_again_is_changed_whole() -> None:
    lower = [Member("d", "dir", mode=0o755, xattrs={"user.old": b"1"}), Member("d/f")]
    image = Image([lower, [Member("d", "dir", mode=0o700, xattrs={"user.new": b"2"})]])
    assert (image.node("d").mode & 0o777, image.node("d").xattrs) == (0o700, ((b"user.new", b"2"),))
    assert image.names() == {"d", "d/f"}


HOSTILE = {
    ("dotdot", "out of the root"): [Member("../escape")],
    ("dotdot inside", "out of the root"): [Member("a/../../escape")],
    ("root as a file", "root is not a directory"): [Member("./.")],
    ("hard link out", "out of the root"): [Member("h", "hardlink", link="../victim")],
    ("hard link to nothing", "missing 'missing'"): [Member("h", "hardlink", link="missing")],
    ("hard link to itself", "missing 'h'"): [Member("h", "hardlink", link="h")],
    ("hard link below nothing", "missing 'missing/x'"): [Member("h", "hardlink", link="missing/x")],
    ("hard link below a file", "'f' leads through 'f', which"): [Member("f"), Member("h", "hardlink", link="f/x")],
    ("hard link to a folder", "to directory 'd'"): [folder("d"), Member("h", "hardlink", link="d")],
    ("hard link to the root", "to the root"): [Member("h", "hardlink", link="/")],
    ("hard link over its target", "holds 'h/x'"): [Member("h/x"), Member("h", "hardlink", link="h/x")],
    ("whiteout of dotdot", "bad whiteout"): [Member(".wh...")],
    ("whiteout of itself", "bad whiteout"): [Member("d/.wh..")],
    ("member below a file", "leads through 'f', which"): [Member("f"), Member("f/x")],
    ("member below a link to a file", "through 'f', which"): [
        Member("f"), Member("l", "symlink", link="f"), Member("l/x"),
    ],
    ("member below a dangling link", "dangling"): [Member("l", "symlink", link="/nowhere"), Member("l/x")],
    ("member through a file and up", "through 'f', which"): [
        Member("f"), Member("l", "symlink", link="f/.."), Member("l/x"),
    ],
    ("link loop", "more than 40"): [Member("l", "symlink", link="l"), Member("l/x")],
    ("41 links", "more than 40"): [
        folder("d"), Member("l0", "symlink", link="d"),
        *[Member(f"l{n}", "symlink", link=f"l{n - 1}") for n in range(1, 41)], Member("l40/x"),
    ],
    ("long name", "name of 256"): [Member("n" * 256)],
    ("long target", "target of 4096"): [Member("l", "symlink", link="x" * 4096)],
    ("empty target", "target of 0"): [Member("l", "symlink", link="")],
    ("long path", "path of 4096"): [Member("a/" * 2047 + "aa")],
    ("endless path", "name of 2000001"): [Member("a/" * 1_000_000 + "a")],
    ("long path through a link", "path of"): [
        folder("a/" * 1500), Member("l", "symlink", link="a/" * 1500), Member("l/" + "b/" * 1000 + "f"),
    ],
    ("device number", "number 4096:0"): [Member("c", "char", device=(4096, 0))],
}  # fmt: skip


@pytest.mark.parametrize(
    ("says", "members"), [(says, members) for (_, says), members in HOSTILE.items()], ids=[name for name, _ in HOSTILE]
)
def test_hostile_members_are_refused(says: str, members: list[Member]) -> None:
    with pytest.raises(DataError, match=re.escape(says)):
        Image([members])


def test_a_hard_link_to_itself_changes_nothing() -> None:
    lower = [Member("d/f", data=b"kept"), Member("s", "symlink", link="d")]
    image = Image([lower, [Member("d/f", "hardlink", link="s/f"), Member(".wh.d")]])
    assert image.read("d/f") == b"kept"  # and counts as a member of the upper layer


def test_the_deepest_path() -> None:
    deep = "a/" * 2047
    image = Image([[Member(deep + "o")], [Member(deep + "n"), Member(".wh.a")]])
    assert list(image.node(deep).children or ()) == [b"n"]


def test_40_links_are_followed() -> None:
    members = [Member(f"l{n}", "symlink", link=f"l{n - 1}") for n in range(1, 40)]
    image = Image([[folder("d"), Member("l0", "symlink", link="d"), *members, Member("l39/x")]])
    assert "d/x" in image.names()


def test_layers_begin_at_aligned_data() -> None:
    image = Image([[Member("a", data=b"1")], [Member("b", data=b"2" * 70_000)], [Member("c", data=b"3")]])
    assert [image.node(name).start for name in "abc"] == [0, 65536, 196608]
    assert image.sink.position == 196608 + 4096


def sparse(name: str, size: int, extents: list[tuple[int, int]]) -> bytes:
    """A member of ``size`` bytes that are there in ``extents`` only, as GNU tar writes it in format 0.1."""
    info = tarfile.TarInfo(name)
    info.size = sum(length for _, length in extents)
    pairs = ",".join(f"{at},{length}" for at, length in extents)
    info.pax_headers = {"GNU.sparse.map": pairs, "GNU.sparse.size": str(size)}
    return info.tobuf(tarfile.PAX_FORMAT) + b"x" * info.size + bytes(-info.size % 512)


def applied(*members: bytes) -> tuple[Writer, Nowhere]:
    sink = Nowhere()
    writer = Writer(sink)
    LayeredTree(writer).apply(iter([b"".join(members), bytes(1024)]))
    return writer, sink


def test_indexes_of_thin_files_are_few() -> None:
    writer, sink = applied(*(sparse(f"f{n}", 4 << 30, [(0, 1)]) for n in range(300)))
    assert len(writer.finish()) < 4 << 20  # 157 MB when every one had 65,536 indexes
    assert sink.position < 2 << 30


def test_thin_files_without_end_are_refused() -> None:
    last = (64 << 30) + (16 << 20)  # an odd unit: larger ones would not do
    with pytest.raises(DataError, match="chunk indexes"):
        applied(*(sparse(f"f{n}", last + 1, [(last, 1)]) for n in range(1000)))
    extents = [(n << 26, 1) for n in range(2000)]
    writer, sink = applied(sparse("f", 128 << 30, extents))
    assert sink.position < 2 << 30  # 4.2 GB with units of 2 MiB
    assert len(writer.finish()) < 3 << 20
    with pytest.raises(DataError, match="zeros between"):
        applied(*(sparse(f"f{n}", 128 << 30, extents) for n in range(5)))


def test_sparse_files_as_they_are() -> None:
    gib = 1 << 30
    disk = [(n * (256 << 10), 4096) for n in range(20_000)]
    writer, _ = applied(
        sparse("disk", 5 * gib, disk),
        sparse("lastlog", 1_254_000_000_000, [(0, 4096), (1_253_999_996_928, 3072)]),
        sparse("holes", 5 * gib, [(5 * gib, 0)]),
    )
    assert [len(node.chunks or ()) for node in (writer.lookup(b"disk"), writer.lookup(b"holes")) if node] == [81920, 0]
    assert len(writer.finish()) < 2 << 20


def test_deep_members_cost_what_they_are() -> None:
    deep = [Member(f"d{n}" + "/a" * 2040) for n in range(5)]
    tracemalloc.start()
    try:
        began = time.process_time()
        image = Image([deep])
        took = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(image.node("d4").children or ()) == 1
    # 10,200 folders; with a path kept for each they took 5 KiB each, and 20 walks from the root for every one
    assert peak < 20 << 20
    assert took < 5


def test_what_estargz_adds_to_a_layer_is_not_in_the_tree() -> None:
    added = [Member(name, data=b"\x0f") for name in (".prefetch.landmark", ".no.prefetch.landmark")]
    toc = Member("stargz.index.json", data=b"{}" * 999)
    image = Image(
        [[added[0], Member("a"), toc], [added[1], folder("d"), toc._replace(name="d/stargz.index.json"), toc]]
    )
    assert image.names() == {"a", "d", "d/stargz.index.json"}


def test_attributes_of_overlayfs_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    set_by = {"trusted.overlay.redirect": b"/etc", "trusted.overlay.opaque": b"y", "user.overlay.opaque": b"y"}
    members = [
        folder("d", xattrs={**set_by, "trusted.overlayed": b"1", "user.overlays": b"2"}),
        Member("f", xattrs={"trusted.overlay.metacopy": b""}),
        Member("l", "symlink", link="d", xattrs={"trusted.overlay.redirect": b"x"}),
    ]
    image = Image([members])
    assert dict(image.node("d").xattrs) == {b"trusted.overlayed": b"1", b"user.overlays": b"2"}
    assert (image.node("f").xattrs, image.node("l").xattrs) == ((), ())
    assert caplog.text.count("left out") == 4


def test_labels_of_the_machine_that_built_the_image_are_left_out() -> None:
    names = ("security.selinux", "security.ima", "security.evm", "system.nfs4_acl")
    kept = {"security.capability": bytes.fromhex("0100000200200000000000000000000000000000"), "user.selinux": b"1"}
    image = Image([[folder("d", xattrs=dict.fromkeys(names, b"x")), Member("f", xattrs={**kept, "security.ima": b""})]])
    assert image.node("d").xattrs == ()
    assert dict(image.node("f").xattrs) == {key.encode(): value for key, value in kept.items()}


def test_attribute_names_that_linux_does_not_take_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    names = {"user." + "n" * 250: b"1", "user." + "n" * 251: b"2", "com.apple.provenance": b"3"}
    image = Image([[Member("f", xattrs=names)]])
    assert dict(image.node("f").xattrs) == {b"user." + b"n" * 250: b"1"}
    assert caplog.text.count("left out") == 2
