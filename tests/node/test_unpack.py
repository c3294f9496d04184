"""Layers applied to a folder: what goes wrong, and what that costs. What the container sees: test_erofs_layers.py."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootseer import oci
from bootseer.errors import DataError, FullError, NotFoundError, PrivilegeError
from support.images import Member, folder, write_image

pytestmark = pytest.mark.root

Layers = Sequence[Sequence[Member] | bytes]


def apply(tmp_path: Path, layers: Layers, compression: str = "gzip") -> Path:
    write_image(tmp_path / "layout", layers, compression=compression)  # type: ignore[arg-type]
    with oci.open_image(f"oci:{tmp_path}/layout") as image:
        oci.unpack(image, tmp_path / "root")
    return tmp_path / "root"


def test_what_deep_paths_cost_is_bounded(tmp_path: Path) -> None:
    """Each of the folders above a file has a path of its own: many times the size of the layer."""
    apply(tmp_path, [[Member("d/file")]])  # what is imported late
    write_image(tmp_path / "deep", [[Member(f"{number}/" + "d/" * 2000 + "file") for number in range(3)]])
    with oci.open_image(f"oci:{tmp_path}/deep") as image:
        tracemalloc.start()
        try:
            oci.unpack(image, tmp_path / "unpacked")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            # not left to pytest, whose removal of old folders goes as deep as they are
            subprocess.run(["rm", "-rf", tmp_path / "unpacked"], check=True, timeout=60)
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


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "longer", "missing"])
def test_damaged_layers_are_named(tmp_path: Path, compression: str, damage: str) -> None:
    content = hashlib.shake_256(b"x").digest(200_000)
    write_image(tmp_path / "layout", [[Member("f", data=content)]], compression=compression)  # type: ignore[arg-type]
    with oci.open_image(f"oci:{tmp_path}/layout") as image:
        blob = tmp_path / "layout/blobs/sha256" / image.layers[0].hex
    data = bytearray(blob.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    blob.write_bytes(data[: len(data) * 2 // 3] if damage == "truncated" else data + b"x" * (damage == "longer"))
    if damage == "missing":
        blob.unlink()
    kind = NotFoundError if damage == "missing" else DataError
    with oci.open_image(f"oci:{tmp_path}/layout") as image, pytest.raises(kind, match=image.layers[0].digest):
        oci.unpack(image, tmp_path / "root")


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
