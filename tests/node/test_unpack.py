"""Applying layers: what the container sees, and what a hostile layer cannot do. Needs root for owners and devices."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootseer import oci
from bootseer.errors import DataError, FullError, PrivilegeError
from support.images import Member, folder, write_image

pytestmark = pytest.mark.root

Layers = Sequence[Sequence[Member] | bytes]


def apply(tmp_path: Path, layers: Layers, compression: str = "gzip") -> Path:
    write_image(tmp_path / "layout", layers, compression=compression)  # type: ignore[arg-type]
    with oci.open_image(f"oci:{tmp_path}/layout") as image:
        oci.unpack(image, tmp_path / "root")
    return tmp_path / "root"


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_everything_a_member_says(tmp_path: Path, compression: str) -> None:
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    odd = os.fsdecode(b"caf\xe9")
    root = apply(
        tmp_path,
        [
            [
                folder("./", 0o711, uid=3),
                folder("d", 0o2750, uid=1, gid=2, mtime_ns=1_111_111_111_111_111_111),
                Member("d/f", data=b"hello" * 300_000, mode=0o4755, uid=5, gid=6, mtime_ns=1_222_222_222_222_222_222),
                Member(
                    "d/cap", data=b"x", mode=0o755, xattrs={"security.capability": capability, "user.k": b"\0\xff\n"}
                ),
                Member("d/link", "symlink", link="f", uid=7, mtime_ns=1_333_333_333_333_333_333),
                Member("d/hard", "hardlink", link="d/f"),
                Member("d/null", "char", mode=0o666, device=(1, 3)),
                Member("d/pipe", "fifo", mode=0o622, gid=9),
                Member(odd, data=b"odd"),
                Member("implied/deep/file"),
            ]
        ],
        compression,
    )
    d, f = os.stat(root / "d"), os.stat(root / "d/f")
    assert (os.stat(root).st_mode, os.stat(root).st_uid) == (stat.S_IFDIR | 0o711, 3)
    assert (d.st_mode, d.st_uid, d.st_gid, d.st_mtime_ns) == (stat.S_IFDIR | 0o2750, 1, 2, 1_111_111_111_111_111_111)
    assert (f.st_mode, f.st_uid, f.st_gid, f.st_mtime_ns) == (stat.S_IFREG | 0o4755, 5, 6, 1_222_222_222_222_222_222)
    assert (root / "d/f").read_bytes() == b"hello" * 300_000
    assert os.getxattr(root / "d/cap", "security.capability") == capability
    assert os.getxattr(root / "d/cap", "user.k") == b"\0\xff\n"
    link = os.lstat(root / "d/link")
    assert (os.readlink(root / "d/link"), link.st_uid, link.st_mtime_ns) == ("f", 7, 1_333_333_333_333_333_333)
    assert os.stat(root / "d/hard").st_ino == f.st_ino
    null, pipe = os.stat(root / "d/null"), os.stat(root / "d/pipe")
    assert (null.st_mode, null.st_rdev) == (stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert (pipe.st_mode, pipe.st_gid) == (stat.S_IFIFO | 0o622, 9)
    assert (root / odd).read_bytes() == b"odd"
    implied = os.stat(root / "implied/deep")
    assert (implied.st_mode & 0o7777, implied.st_uid, implied.st_mtime_ns) == (0o755, 0, 0)


def test_later_layers_replace(tmp_path: Path) -> None:
    root = apply(
        tmp_path,
        [
            [Member("f", data=b"old"), folder("d"), Member("d/x"), folder("e"), Member("e/y"),
             Member("l", "symlink", link="d"), Member("h1", data=b"both"), Member("h2", "hardlink", link="h1")],
            [Member("f", data=b"new"), Member("d", data=b"now a file"), folder("l"), Member("l/z"),
             folder("e", 0o700, uid=4), Member("h1", data=b"own")],
        ],
    )  # fmt: skip
    assert (root / "f").read_bytes() == b"new"
    assert (root / "d").read_bytes() == b"now a file"
    assert not (root / "l").is_symlink()
    assert (root / "l/z").exists()
    assert (root / "e/y").exists()
    assert os.stat(root / "e").st_uid == 4
    assert ((root / "h1").read_bytes(), (root / "h2").read_bytes()) == (b"own", b"both")


def test_members_below_a_link_of_a_lower_layer_land_where_it_points(tmp_path: Path) -> None:
    lower = [
        folder("usr"),
        folder("usr/lib"),
        Member("lib", "symlink", link="usr/lib"),
        Member("abs", "symlink", link="/usr"),
    ]
    root = apply(tmp_path, [lower, [Member("lib/a", data=b"1"), Member("abs/lib/b", data=b"2"), folder("abs/new")]])
    assert (root / "lib").is_symlink()
    assert {"usr/lib/a", "usr/lib/b", "usr/new"} <= names(root)


def test_whiteouts(tmp_path: Path) -> None:
    lower = [
        folder("d"),
        Member("d/a"),
        Member("d/b"),
        folder("d/sub"),
        Member("d/sub/c"),
        Member("gone"),
        folder("e"),
        Member("e/f"),
    ]
    upper = [Member("d/.wh.a"), Member(".wh.gone"), Member(".wh.never-there"), Member("d/.wh.sub"), Member(".wh.e")]
    root = apply(tmp_path, [lower, upper])
    assert names(root) == {"d", "d/b"}


def test_a_whiteout_spares_members_of_its_own_layer(tmp_path: Path) -> None:
    lower = [folder("d"), Member("d/old"), folder("d/s"), Member("d/s/old")]
    for number, upper in enumerate(
        [
            [Member("d/new"), Member("d/s/new"), Member("d/.wh..wh..opq")],
            [Member("d/.wh..wh..opq"), Member("d/new"), Member("d/s/new")],
            [Member("d/new"), Member("d/s/new"), Member(".wh.d")],
        ]
    ):
        root = apply(tmp_path / str(number), [lower, upper])
        assert names(root) == {"d", "d/new", "d/s", "d/s/new"}, upper


def test_directory_times_survive_later_layers(tmp_path: Path) -> None:
    root = apply(tmp_path, [[folder("d", mtime_ns=5), Member("d/a")], [Member("d/b"), Member("d/.wh.a")]])
    assert os.stat(root / "d").st_mtime_ns == 5


def test_xattrs_of_a_lower_directory_do_not_shine_through(tmp_path: Path) -> None:
    lower = [Member("d", "dir", mode=0o755, xattrs={"user.old": b"1"})]
    root = apply(tmp_path, [lower, [Member("d", "dir", mode=0o755, xattrs={"user.new": b"2"})]])
    assert os.listxattr(root / "d") == ["user.new"]


HOSTILE = {
    "dotdot": [Member("../escape")],
    "dotdot inside": [Member("a/../../escape")],
    "hard link out": [Member("h", "hardlink", link="../victim")],
    "hard link to nothing": [Member("h", "hardlink", link="missing")],
    "hard link to a folder": [folder("d"), Member("h", "hardlink", link="d")],
    "whiteout of dotdot": [Member(".wh...")],
    "whiteout of itself": [Member("d/.wh..")],
    "member below a file": [Member("f"), Member("f/x")],
    "member below a dangling link": [Member("l", "symlink", link="/nowhere"), Member("l/x")],
    "link loop": [Member("l", "symlink", link="l"), Member("l/x")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_members_are_refused(tmp_path: Path, members: list[Member]) -> None:
    (tmp_path / "victim").write_text("safe")
    with pytest.raises(DataError, match="layer sha256:"):
        apply(tmp_path, [members])
    assert (tmp_path / "victim").read_text() == "safe"
    assert not (tmp_path / "escape").exists()


@pytest.mark.serial
def test_what_deep_paths_cost_is_bounded(tmp_path: Path) -> None:
    """Each of the folders above a file has a path of its own: many times the size of the layer."""
    write_image(tmp_path / "layout", [[Member(f"{number}/" + "d/" * 2000 + "file") for number in range(3)]])
    with oci.open_image(f"oci:{tmp_path}/layout") as image:
        oci.unpack(image, tmp_path / "small")
        tracemalloc.start()
        try:
            oci.unpack(image, tmp_path / "root")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            # not left to pytest, whose removal of old folders goes as deep as they are
            subprocess.run(["rm", "-rf", tmp_path / "small", tmp_path / "root"], check=True, timeout=60)
    assert peak < 9 << 20  # 4.9 MB measured; 12 MB more if the paths were kept


def test_links_and_absolute_names_stay_inside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("safe")
    up = "../" * 30 + str(outside).lstrip("/")
    root = apply(
        tmp_path,
        [
            [folder("in"), folder(str(outside).lstrip("/")), Member("abs", "symlink", link=str(outside)),
             Member("up", "symlink", link=up)],
            [Member("abs/victim", data=b"x"), Member("up/second", data=b"y"), Member(f"{outside}/third", data=b"z"),
             Member("h", "hardlink", link="abs/victim")],
        ],
    )  # fmt: skip
    assert [path.name for path in outside.iterdir()] == ["victim"]
    assert (outside / "victim").read_text() == "safe"
    inner = root / str(outside).lstrip("/")
    assert {path.name for path in inner.iterdir()} == {"victim", "second", "third"}
    assert (root / "h").read_bytes() == b"x"


def test_a_file_through_a_link_replaces_the_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("safe")
    root = apply(tmp_path, [[Member("l", "symlink", link=str(target))], [Member("l", data=b"x")]])
    assert target.read_text() == "safe"
    assert (root / "l").read_bytes() == b"x"


def _blob(tmp_path: Path) -> Path:
    with oci.open_image(f"oci:{tmp_path}/layout") as image:
        return tmp_path / "layout/blobs/sha256" / image.layers[0].hex


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "longer", "missing"])
def test_damaged_layers_are_named(tmp_path: Path, compression: str, damage: str) -> None:
    content = hashlib.shake_256(b"x").digest(200_000)
    write_image(tmp_path / "layout", [[Member("f", data=content)]], compression=compression)  # type: ignore[arg-type]
    blob = _blob(tmp_path)
    data = bytearray(blob.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    blob.write_bytes(data[: len(data) * 2 // 3] if damage == "truncated" else data + b"x" * (damage == "longer"))
    if damage == "missing":
        blob.unlink()
    with oci.open_image(f"oci:{tmp_path}/layout") as image, pytest.raises(Exception, match=image.layers[0].digest) as e:
        oci.unpack(image, tmp_path / "root")
    assert e.value.exit_code == (66 if damage == "missing" else 65)  # type: ignore[attr-defined]


def test_a_wrong_diff_id_is_noticed(tmp_path: Path) -> None:
    write_image(tmp_path / "layout", [[Member("f", data=b"1")]])
    with oci.open_image(f"oci:{tmp_path}/layout") as image:
        image.config = oci.ImageConfig(
            architecture="", os="linux", rootfs=oci.RootFS(diff_ids=("sha256:" + "0" * 64,)), config=None
        )
        with pytest.raises(DataError, match="diff id"):
            oci.unpack(image, tmp_path / "root")


def test_disk_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "oci.unpack.after-layer=enospc")
    with pytest.raises(FullError, match="No space left"):
        apply(tmp_path, [[Member("f")]])


def test_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PrivilegeError):
        apply(tmp_path, [[Member("f")]])


def test_threads_end_and_no_descriptor_leaks(tmp_path: Path) -> None:
    import threading

    before = set(os.listdir("/proc/self/fd"))
    apply(tmp_path, [[Member(f"d{n}/f", data=b"x")] for n in range(5)])
    with pytest.raises(DataError):
        apply(tmp_path / "bad", [[Member("ok")], [Member("../no")], [Member("x" * 50, data=b"1" * 5_000_000)]])
    assert [t.name for t in threading.enumerate() if t.name.startswith("oci-")] == []
    assert set(os.listdir("/proc/self/fd")) <= before, "others may be collected meanwhile"


def test_sparse_files_stay_sparse(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    with open(source / "holes", "wb") as file:
        for at in (4096, 3_000_000, 9_000_000):
            file.seek(at)
            file.write(b"data" * 1000)
        file.truncate(20_000_000)
    for number, options in enumerate((["--format=gnu"], ["--format=posix"])):
        data = subprocess.run(
            ["tar", "-S", *options, "-cf", "-", "-C", source, "holes"], capture_output=True, check=True
        )
        root = apply(tmp_path / str(number), [data.stdout])
        assert (root / "holes").read_bytes() == (source / "holes").read_bytes()
        assert os.stat(root / "holes").st_blocks * 512 < 200_000
