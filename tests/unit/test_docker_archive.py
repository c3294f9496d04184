"""Archives of ``docker save`` and ``podman save``: real ones, as skopeo writes them, and what is none."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from bootseer import image, oci
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError
from bootseer.oci.inflate import inflate
from support.images import CHANGES, Member, one_of_each, write_image

Change = Callable[[dict[str, bytes]], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a layout of two images and archives of each and of both."""
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    folder = tmp_path_factory.mktemp("saved")
    write_image(folder / "layout", [one_of_each(os.urandom(3_000_000)), CHANGES], tag="one")
    write_image(folder / "layout", [[Member("a", data=b"two")]], tag="two")
    for tag in ("one", "two"):
        target = f"docker-archive:{folder}/{tag}.tar:registry:5000/team/{tag}:v1"
        argv = ["skopeo", "copy", "--insecure-policy", "-q", f"oci:{folder}/layout:{tag}", target]
        subprocess.run(argv, check=True, timeout=60)
    members = [read(folder / f"{tag}.tar") for tag in ("one", "two")]
    index = [entry for found in members for entry in json.loads(found["manifest.json"])]
    write(folder / "both.tar", {**members[0], **members[1], "manifest.json": json.dumps(index).encode()})
    return folder


def read(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {item.name: file.read() for item in archive if (file := archive.extractfile(item))}


def write(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            item = tarfile.TarInfo(name)
            item.size = len(data)
            archive.addfile(item, io.BytesIO(data))


def content(ref: str) -> list[bytes]:
    with oci.open_image(ref) as opened:
        return [b"".join(inflate(opened.layer_chunks(index), "layer")) for index in range(len(opened.layers))]


def convert(ref: str, folder: Path) -> image.ImageRecord:
    return image.convert(ref, str(folder / "store"), work_dir=folder / "work")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_a_saved_image_converts_to_the_tree_of_its_layout(
    saved: Path, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    archive = tmp_path / "saved.tar"
    archive.write_bytes(pack((saved / "one.tar").read_bytes()))
    record = convert(f"docker-archive:{archive}", tmp_path)
    assert record.tree == convert(f"oci:{saved}/layout:one", tmp_path / "other").tree
    assert record.config.rootfs.type == "layers"
    assert image.resolve(f"docker-archive:{archive}", str(tmp_path / "store")) == record
    assert convert(f"docker-archive:{archive}@{record.image}", tmp_path) == record


@pytest.mark.parametrize("name", ["one:v1", "registry:5000/team/one:v1"])
def test_one_of_several_is_chosen_by_its_name(saved: Path, tmp_path: Path, name: str) -> None:
    members = read(saved / "both.tar")
    index = json.loads(members["manifest.json"])
    index[0]["RepoTags"].append("one:v1")
    write(tmp_path / "x.tar", {**members, "manifest.json": json.dumps(index).encode()})
    assert content(f"docker-archive:{tmp_path}/x.tar:{name}") == content(f"oci:{saved}/layout:one")


@pytest.mark.parametrize("tag", ["", ":v1"])
def test_several_images_and_none_chosen(saved: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match=r"several images; name one of registry:5000/team/one:v1, .*two:v1\Z"):
        oci.open_image(f"docker-archive:{saved}/both.tar{tag}")


def test_an_image_that_is_not_there(saved: Path) -> None:
    with pytest.raises(NotFoundError, match=r"image v2 does not exist .*; it has registry:5000/team/one:v1\Z"):
        oci.open_image(f"docker-archive:{saved}/one.tar:v2")
    with pytest.raises(NotFoundError, match="No such file"):
        oci.open_image(f"docker-archive:{saved}/none.tar")


def of_docker_24(members: dict[str, bytes]) -> None:
    """Layers in folders with names that say nothing of them."""
    (entry,) = json.loads(members["manifest.json"])
    for number, name in enumerate(entry["Layers"]):
        entry["Layers"][number] = f"{number:064x}/layer.tar"
        members[entry["Layers"][number]] = members.pop(name)
    members["manifest.json"] = json.dumps([entry]).encode()


def of_containerd(members: dict[str, bytes]) -> None:
    """Compressed layers, by their digests."""
    (entry,) = json.loads(members["manifest.json"])
    for number, name in enumerate(entry["Layers"]):
        data = gzip.compress(members.pop(name))
        entry["Layers"][number] = f"blobs/sha256/{oci.spec.digest_of(data)[7:]}"
        members[entry["Layers"][number]] = data
    members["manifest.json"] = json.dumps([entry]).encode()


@pytest.mark.parametrize("form", [of_docker_24, of_containerd])
def test_other_forms(saved: Path, tmp_path: Path, form: Change) -> None:
    members = read(saved / "one.tar")
    form(members)
    write(tmp_path / "x.tar", members)
    assert content(f"docker-archive:{tmp_path}/x.tar") == content(f"oci:{saved}/layout:one")


def test_a_layer_that_is_a_link_to_another(saved: Path, tmp_path: Path) -> None:
    members = read(saved / "two.tar")
    (entry,) = json.loads(members["manifest.json"])
    (layer,) = entry["Layers"]
    for target, works in ((f"../{layer}", True), ("layer.tar", False), ("../none", False)):
        entry["Layers"] = ["x/layer.tar"]
        write(tmp_path / "x.tar", {**members, "manifest.json": json.dumps([entry]).encode()})
        with tarfile.open(tmp_path / "x.tar", "a") as archive:
            link = tarfile.TarInfo("x/layer.tar")
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        if works:
            assert content(f"docker-archive:{tmp_path}/x.tar") == content(f"oci:{saved}/layout:two")
        else:
            with pytest.raises(DataError, match=r"has no file x/layer\.tar"):
                content(f"docker-archive:{tmp_path}/x.tar")


def without_manifest(members: dict[str, bytes]) -> None:
    del members["manifest.json"]


def without_layer(members: dict[str, bytes]) -> None:
    del members[json.loads(members["manifest.json"])[0]["Layers"][0]]


def another_layer(members: dict[str, bytes]) -> None:
    name = json.loads(members["manifest.json"])[0]["Layers"][0]
    members[name] = members[name][:-1] + b"x"


def one_layer_less(members: dict[str, bytes]) -> None:
    (entry,) = json.loads(members["manifest.json"])
    members["manifest.json"] = json.dumps([{**entry, "Layers": entry["Layers"][1:]}]).encode()


def noise(members: dict[str, bytes]) -> None:
    members["manifest.json"] = b'{"a":1}'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_manifest, "has no file manifest.json; docker save"),
        (without_layer, "has no file [0-9a-f]{64}.tar"),
        (another_layer, "corrupt: its bytes do not match its digest"),
        (one_layer_less, "1 layers but 2 diff ids"),
        (noise, "manifest.json of .* is not a valid list"),
    ],
)
def test_damaged_archives(saved: Path, tmp_path: Path, change: Change, says: str) -> None:
    members = read(saved / "one.tar")
    change(members)
    write(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=says):
        convert(f"docker-archive:{tmp_path}/x.tar", tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"noise" * 1000, b"\x1f\x8bnoise", gzip.compress(b"noise" * 1000)],
    ids=["empty", "noise", "cut gzip", "gzip"],
)
def test_what_is_no_archive(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError, match=r"x is (not an archive of docker save|corrupt|truncated)"):
        oci.open_image(f"docker-archive:{tmp_path}/x")
    with pytest.raises(BootseerError, match="directory"):
        oci.open_image(f"docker-archive:{tmp_path}")


def header(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    item = tarfile.TarInfo("a")
    item.type = kind
    raw = bytearray(item.tobuf(tarfile.GNU_FORMAT)[:512])
    raw[124:136] = (size % 256**12).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
    raw[148:156] = b"%06o\0 " % (256 + sum(raw[:148]) + sum(raw[156:]))
    return bytes(raw)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "planted",
    [header(-512), header(1 << 80), header(1 << 40, tarfile.GNUTYPE_LONGNAME), header(1 << 80, tarfile.XHDTYPE)],
    ids=["leads to itself", "no offset", "long name", "records"],
)
def test_planted_headers(tmp_path: Path, planted: bytes) -> None:
    (tmp_path / "x").write_bytes(header(0) + planted + bytes(1024))
    with pytest.raises(DataError, match="a member of"):
        oci.open_image(f"docker-archive:{tmp_path}/x")


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(DataError, match="is not a file"):
        oci.open_image(f"docker-archive:{tmp_path}/x")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_archives_that_are_cut_short(saved: Path, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    data = pack((saved / "one.tar").read_bytes())
    for end in (len(data) // 2, 2000, 100):
        (tmp_path / "x").write_bytes(data[:end])
        with pytest.raises(DataError, match=r"x (is|has)"):
            oci.open_image(f"docker-archive:{tmp_path}/x")


def test_on_the_command_line(saved: Path, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "bootseer.cli.main",
        "image",
        "convert",
        f"docker-archive:{saved}/both.tar",
        "--store",
        "s",
    ]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)


_CORE = """
import sys
for name in ("hdfs_native", "google", "google.protobuf", "torch", "numpy", "cryptography", "s3fs", "yaml"):
    sys.modules[name] = None
from bootseer.cli.main import main
main()
"""


def test_a_conversion_needs_the_core_dependencies_only(tmp_path: Path) -> None:
    write_image(tmp_path / "layout", [[Member("a", data=b"one")]])
    argv = [sys.executable, "-c", _CORE, "image", "convert", f"oci:{tmp_path}/layout", "--store", f"{tmp_path}/store"]
    done = subprocess.run(
        [*argv, "--work-dir", f"{tmp_path}/work"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "converted: " in done.stdout
