"""Archives of ``docker save`` and ``podman save``: real ones, as skopeo writes them, and what is none."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO

import pytest
import zstandard

from bootseer import image, oci
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError
from bootseer.oci.archive import Archive
from bootseer.oci.inflate import inflate
from bootseer.oci.members import Members
from support import forked
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
    return image.ensure(ref, str(folder / "store"), work_dir=folder / "work").record


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_a_saved_image_converts_to_the_tree_of_its_layout(
    saved: Path, tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "saved.tar"
    archive.write_bytes(pack((saved / "one.tar").read_bytes()))
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", "/no/place/for/large/files")
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


def renamed(members: dict[str, bytes], change: Callable[[int, bytes], tuple[str, bytes]]) -> None:
    """Each layer as ``change`` names and packs it."""
    (entry,) = json.loads(members["manifest.json"])
    for number, name in enumerate(entry["Layers"]):
        entry["Layers"][number], data = change(number, members.pop(name))
        members[entry["Layers"][number]] = data
    members["manifest.json"] = json.dumps([entry]).encode()


def of_docker_24(members: dict[str, bytes]) -> None:
    """Layers in folders with names that say nothing of them."""
    renamed(members, lambda number, data: (f"{number:064x}/layer.tar", data))


def of_containerd(members: dict[str, bytes]) -> None:
    """Compressed layers, by their digests."""
    packed = partial(gzip.compress, mtime=0)
    renamed(members, lambda _, data: (f"blobs/sha256/{oci.spec.digest_of(packed(data))[7:]}", packed(data)))


def of_dots(members: dict[str, bytes]) -> None:
    """As ``tar -cf x.tar .`` writes them."""
    for name in list(members):
        members[f"./{name}"] = members.pop(name)


def named_with_dots(members: dict[str, bytes]) -> None:
    """The names in the manifest are the odd ones."""
    (entry,) = json.loads(members["manifest.json"])
    entry |= {"Config": f"./{entry['Config']}", "Layers": [f".//{name}" for name in entry["Layers"]]}
    members["manifest.json"] = json.dumps([entry]).encode()


def compressed_under_any_name(members: dict[str, bytes]) -> None:
    renamed(members, lambda number, data: (f"l{number}.tar.gz", (gzip.compress, zstandard.compress)[number % 2](data)))


def compressed_under_their_diff_ids(members: dict[str, bytes]) -> None:
    renamed(members, lambda _, data: (f"{oci.spec.digest_of(data)[7:]}.tar.gz", gzip.compress(data)))


def named_by_another_digest(members: dict[str, bytes]) -> None:
    """As the ids of a tool that counts differently: only the diff ids say what a layer is."""
    renamed(members, lambda number, data: (f"{number:064x}.tar", data))


@pytest.mark.parametrize(
    "form",
    [
        of_docker_24,
        of_containerd,
        of_dots,
        named_with_dots,
        compressed_under_any_name,
        compressed_under_their_diff_ids,
        named_by_another_digest,
    ],
)
def test_other_forms(saved: Path, tmp_path: Path, form: Change) -> None:
    members = read(saved / "one.tar")
    form(members)
    write(tmp_path / "x.tar", members)
    assert content(f"docker-archive:{tmp_path}/x.tar") == content(f"oci:{saved}/layout:one")
    assert content(f"docker-archive:{tmp_path}/x.tar:registry:5000/team/one:v1") == content(f"oci:{saved}/layout:one")


@pytest.mark.parametrize("layers", [{"Layers": None}, {"Layers": []}, {}])
def test_a_saved_image_without_layers(tmp_path: Path, layers: dict[str, object]) -> None:
    """Of ``FROM scratch`` and nothing more; null is what Go writes for it."""
    config = {"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": None}}
    entry = {"Config": "c.json", "RepoTags": None, **layers}
    members = {"c.json": json.dumps(config), "manifest.json": json.dumps([entry])}
    write(tmp_path / "x.tar", {name: text.encode() for name, text in members.items()})
    assert content(f"docker-archive:{tmp_path}/x.tar") == []


def test_the_last_member_of_a_name_counts(saved: Path, tmp_path: Path) -> None:
    """As for who unpacks the archive."""
    members = read(saved / "two.tar")
    write(tmp_path / "x.tar", {"manifest.json": b"[]", **{f"./{name}": data for name, data in members.items()}})
    assert content(f"docker-archive:{tmp_path}/x.tar") == content(f"oci:{saved}/layout:two")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("dots", ["", "./"])
def test_links_between_layers(saved: Path, tmp_path: Path, kind: bytes, dots: str) -> None:
    members = read(saved / "two.tar")
    (entry,) = json.loads(members["manifest.json"])
    (layer,) = entry["Layers"]
    entry["Layers"] = ["x/layer.tar"]
    write(tmp_path / "x.tar", {f"{dots}{name}": data for name, data in members.items() if name != "manifest.json"})
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        link = tarfile.TarInfo(f"{dots}x/layer.tar")
        link.type, link.linkname = kind, f"../{layer}" if kind == tarfile.SYMTYPE else f"{dots}{layer}"
        archive.addfile(link)
        item = tarfile.TarInfo("manifest.json")
        data = json.dumps([entry]).encode()
        item.size = len(data)
        archive.addfile(item, io.BytesIO(data))
    assert content(f"docker-archive:{tmp_path}/x.tar") == content(f"oci:{saved}/layout:two")


_NAMES = ["docker.io/library/x:1", "index.docker.io/library/x:1", "docker.io/x:1", "library/x:1", "x:1"]


@pytest.mark.parametrize("asked", _NAMES)
@pytest.mark.parametrize("written", _NAMES)
def test_a_name_of_the_hub_has_one_meaning(saved: Path, tmp_path: Path, written: str, asked: str) -> None:
    members = read(saved / "both.tar")
    index = json.loads(members["manifest.json"])
    index[0]["RepoTags"] = [written]
    index[1]["RepoTags"] = ["other.example/library/x:1"]
    write(tmp_path / "x.tar", {**members, "manifest.json": json.dumps(index).encode()})
    assert content(f"docker-archive:{tmp_path}/x.tar:{asked}") == content(f"oci:{saved}/layout:one")


def oci_archive(saved: Path, tmp_path: Path, *names: str, top: str = ".", pack: str = "") -> Path:
    path = tmp_path / "oci.tar"
    subprocess.run(["tar", f"-c{pack}f", path, "-C", saved / "layout", *(names or (top,))], check=True, timeout=60)
    return path


@pytest.mark.parametrize(
    ("names", "pack"), [((), ""), ((), "z"), (("index.json", "blobs", "oci-layout"), "")], ids=["dots", "gzip", "plain"]
)
@pytest.mark.parametrize("scheme", ["oci-archive", "docker-archive"])
def test_a_layout_in_a_tar_file(saved: Path, tmp_path: Path, scheme: str, names: tuple[str, ...], pack: str) -> None:
    path = oci_archive(saved, tmp_path, *names, pack=pack)
    record = convert(f"{scheme}:{path}:one", tmp_path)
    assert record == convert(f"oci:{saved}/layout:one", tmp_path)  # the same digest: nothing is converted again
    with pytest.raises(ConfigError, match="several images; name one of one, two"):
        oci.open_image(f"{scheme}:{path}")


def test_an_oci_archive_of_skopeo(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    name = "docker.io/library/two:v2"
    subprocess.run(
        ["skopeo", "copy", "-q", "--insecure-policy", f"oci:{saved}/layout:two", f"oci-archive:{path}:{name}"],
        check=True,
        timeout=60,
    )
    for asked in ("", f":{name}", ":two:v2", ":v2", ":library/two:v2"):
        assert content(f"oci-archive:{path}{asked}") == content(f"oci:{saved}/layout:two")


def test_what_is_no_oci_archive(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"one\.tar is not an OCI layout") as found:
        oci.open_image(f"oci-archive:{saved}/one.tar")
    assert found.value.hint == f"docker-archive:{saved}/one.tar"
    for pack, kind in ((lzma.compress, "xz"), (bz2.compress, "bzip2")):
        (tmp_path / kind).write_bytes(pack((saved / "one.tar").read_bytes()))
        for scheme in ("oci-archive", "docker-archive"):
            with pytest.raises(DataError, match=f"archive .* is compressed by {kind}"):
                oci.open_image(f"{scheme}:{tmp_path}/{kind}")
    with pytest.raises(BootseerError, match="No such file"):
        oci.open_image(f"oci-archive:{saved}/none.tar")
    path = oci_archive(saved, tmp_path)
    data = path.read_bytes()
    for end in (len(data) // 2, 2000, 100):
        path.write_bytes(data[:end])
        with pytest.raises(BootseerError):
            convert(f"oci-archive:{path}:one", tmp_path)


def test_a_saved_archive_of_both_kinds(saved: Path, tmp_path: Path) -> None:
    """docker save since version 25 writes a layout with a manifest.json beside it: each name reads its own."""
    members = read(oci_archive(saved, tmp_path)) | read(saved / "two.tar")
    write(tmp_path / "x.tar", members)
    assert content(f"oci-archive:{tmp_path}/x.tar:one") == content(f"oci:{saved}/layout:one")
    assert content(f"docker-archive:{tmp_path}/x.tar") == content(f"oci:{saved}/layout:two")


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


@pytest.mark.parametrize(
    ("links", "works"),
    [
        ({"x": "y"}, True), ({"x": "/y"}, True), ({"x": "../../y"}, True), ({"x": "z/../y"}, True),
        ({"x": "a/b", "a": "c", "c/b": "../y"}, True), ({"x/layer.tar": "/y/layer.tar"}, True),
        ({"x": "a", "a": "x"}, False), ({"x/layer.tar": "../x/layer.tar"}, False), ({"x": "."}, False),
        ({"x": "/" + "n/" * 500}, False), ({"x/layer.tar": "/etc/passwd"}, False),
    ],
    ids=str,
)  # fmt: skip
def test_links_lead_as_in_an_archive_that_docker_unpacked(
    saved: Path, tmp_path: Path, links: dict[str, str], works: bool
) -> None:
    members = read(saved / "two.tar")
    (entry,) = json.loads(members["manifest.json"])
    members["y/layer.tar"] = members.pop(entry["Layers"][0])
    entry["Layers"] = ["x/layer.tar"]
    write(tmp_path / "x.tar", {**members, "manifest.json": json.dumps([entry]).encode()})
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        for name, target in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    with contextlib.nullcontext() if works else pytest.raises(DataError, match=r"has no file x/layer\.tar"):
        assert content(f"docker-archive:{tmp_path}/x.tar") == content(f"oci:{saved}/layout:two")


def without_manifest(members: dict[str, bytes]) -> None:
    del members["manifest.json"], members["repositories"]


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
        (without_manifest, "has no file manifest.json"),
        (without_layer, "has no file [0-9a-f]{64}.tar"),
        (another_layer, "corrupt"),
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


def extended(kind: bytes, data: bytes) -> bytes:
    return header(len(data), kind) + data + bytes(-len(data) % 512)


def record(key: str, value: str = "") -> bytes:
    size = len(key) + len(value) + 3
    size += next(n for n in range(1, 9) if len(str(size + n)) == n)
    return f"{size} {key}={value}\n".encode()


_MANY = b"".join(record(f"{number:x}") for number in range(9000))
_SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (extended(tarfile.XGLTYPE, _MANY), "more long names and PAX records"),
        (extended(tarfile.XGLTYPE, record("a", "b" * 40_000)) * 2, "more long names"),
        (header(512, tarfile.GNUTYPE_SPARSE) + bytes(512), "a sparse member"),
        (extended(tarfile.XHDTYPE, b"".join(map(record, *zip(*_SPARSE.items(), strict=True)))) + header(512), "sparse"),
        (extended(tarfile.XHDTYPE, record("GNU.sparse.map", "0,1")) + header(0), "a sparse member"),
        (extended(tarfile.XHDTYPE, record("GNU.sparse.size", "1")) + header(0), "a sparse member"),
        (extended(tarfile.GNUTYPE_LONGNAME, b"a") * 3000 + header(0), "recursion"),
        (header(0) * 200_001, "more than 200000 members"),
    ],
    ids=["records", "records in several", "sparse", "sparse 1.0", "sparse 0.1", "sparse 0.0", "chain", "members"],
)
def test_archives_that_take_more_than_they_have(tmp_path: Path, planted: bytes, said: str) -> None:
    (tmp_path / "x").write_bytes(header(0) + planted + bytes(1024))
    with pytest.raises(DataError, match=f"x is not an archive of docker save: .*{said}"):
        oci.open_image(f"docker-archive:{tmp_path}/x")


def test_long_names_are_bounded_in_sum(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x", "wb", compresslevel=1) as file:
        for _ in range(9):
            file.write(extended(tarfile.GNUTYPE_LONGNAME, b"a" * (8 << 20)) + header(0))
        file.write(bytes(1024))
    with pytest.raises(DataError, match="more long names and PAX records"):
        oci.open_image(f"docker-archive:{tmp_path}/x")


def test_records_for_all_members_do_not_stay_with_each(tmp_path: Path) -> None:
    data = extended(tarfile.XGLTYPE, record("comment", "c" * 1000)) + extended(tarfile.XHDTYPE, record("path", "p/q/"))
    (tmp_path / "x").write_bytes(data + header(0) * 2 + bytes(1024))
    with Members(tmp_path / "x") as members:
        assert "p/q" in members
        assert "a" in members
        assert [item.pax_headers for item in members._found.values()] == [{}, {}]


def plain_image(names: list[list[str]], layers: dict[str, bytes], count: int = 1) -> dict[str, bytes]:
    """Members of an archive of images with ``count`` times the same layers."""
    diff_ids = [f"sha256:{'0' * 64}"] * (len(layers) * count)
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    index = [{"Config": "c", "Layers": [*layers] * count, "RepoTags": tags} for tags in names]
    return {**layers, "c": json.dumps(config).encode(), "manifest.json": json.dumps(index).encode()}


def test_a_layer_that_is_named_often_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    really = Members.open

    def noted(members: Members, name: str) -> AbstractContextManager[IO[bytes]]:
        opened.append(name)
        return really(members, name)

    monkeypatch.setattr(Members, "open", noted)
    write(tmp_path / "x.tar", plain_image([["x:1"], ["y:1"]], {"l": gzip.compress(b"data")}, 100))
    with contextlib.closing(Archive(Members(tmp_path / "x.tar"))) as archive:
        archive.manifest("y:1")
    assert opened == ["manifest.json", "c", "l"]


def test_images_that_nobody_asks_for_are_not_read(tmp_path: Path) -> None:
    members = plain_image([["x:1"]], {"l": b"data"})
    index = [*json.loads(members["manifest.json"]), {"Config": "none", "Layers": [], "RepoTags": ["y:1"]}]
    write(tmp_path / "x.tar", {**members, "manifest.json": json.dumps(index).encode()})
    with contextlib.closing(Archive(Members(tmp_path / "x.tar"))) as archive:
        archive.manifest("x:1")
        with pytest.raises(DataError, match="has no file none"):
            archive.manifest("y:1")


@pytest.mark.parametrize(("images", "layers", "said"), [(1, 1001, "1000 layers"), (1001, 1, "1000 images")])
def test_more_than_any_image_has(tmp_path: Path, images: int, layers: int, said: str) -> None:
    write(tmp_path / "x.tar", plain_image([[]] * images, {"l": b"data"}, layers))
    with pytest.raises(DataError, match=f"more than {said}"):
        oci.open_image(f"docker-archive:{tmp_path}/x.tar", platform="linux/amd64")


def test_a_strangers_link_to_an_archive_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.tar", plain_image([[]], {"l": b"data"}))
    (tmp_path / "own").symlink_to("x.tar")
    Members(tmp_path / "own").close()
    if os.geteuid():
        pytest.skip("needs root, to make links of others")
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o1777)
    (open_folder / "link").symlink_to(tmp_path / "x.tar")
    os.lchown(open_folder / "link", 4711, 4711)
    with pytest.raises(BootseerError, match="is not followed"):
        Members(open_folder / "link")


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
    done = forked.cli("image", "convert", f"docker-archive:{saved}/both.tar", "--store", "s", cwd=tmp_path)
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
