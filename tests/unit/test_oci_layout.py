"""Writing and reading OCI layouts, and decompression of their layers."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bootseer import oci
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnsupportedError
from bootseer.oci import inflate as inflate_module
from bootseer.oci import spec
from bootseer.oci.inflate import inflate
from bootseer.oci.spec import LAYER, LAYER_TYPES
from support.images import Member, write_image


def plain(layout: Path, tag: str, index: int = 0) -> bytes:
    with oci.open_image(f"oci:{layout}:{tag}") as image:
        return b"".join(inflate(image.layer_chunks(index), "layer"))


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_layers_come_back_and_the_digest_is_stable(tmp_path: Path, compression: str) -> None:
    layers = [[Member("a", data=os.urandom(3_000_000))], [Member("b", data=bytes(5_000_000))]]
    first = write_image(tmp_path / "one", layers, compression=compression)  # type: ignore[arg-type]
    assert write_image(tmp_path / "two", layers, compression=compression) == first  # type: ignore[arg-type]
    with oci.open_image(f"oci:{tmp_path}/one:v1") as image:
        assert image.digest == first
        assert image.platform == oci.host_platform()
        for index, diff in enumerate(image.config.rootfs.diff_ids):
            assert "sha256:" + hashlib.sha256(plain(tmp_path / "one", "v1", index)).hexdigest() == diff
        blob = (tmp_path / "one/blobs/sha256" / image.layers[0].hex).read_bytes()
        assert b"".join(image.layer_chunks(0)) == blob


def test_tags(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    one = write_image(layout, [[Member("a")]], tag="one")
    assert oci.resolve_digest(f"oci:{layout}") == one
    two = write_image(layout, [[Member("b")]], tag="two")
    assert oci.resolve_digest(f"oci:{layout}:one") == one
    assert oci.resolve_digest(f"oci:{layout}@{two}") == two
    with pytest.raises(ConfigError, match=r"several images.*one, two"):
        oci.open_image(f"oci:{layout}")
    with pytest.raises(NotFoundError, match=r"does not exist in layout.*it has one, two"):
        oci.open_image(f"oci:{layout}:three")
    moved = write_image(layout, [[Member("c")]], tag="one")
    assert oci.resolve_digest(f"oci:{layout}:one") == moved


def _annotated(layout: Path, *names: dict[str, str], platforms: tuple[tuple[str, str], ...] = ()) -> None:
    """The images of a layout get these annotations, and platforms."""
    index = json.loads((layout / "index.json").read_bytes())
    for number, (item, found) in enumerate(zip(index["manifests"], names, strict=True)):
        item["annotations"] = found
        if platforms:
            item["platform"] = dict(zip(("os", "architecture"), platforms[number], strict=True))
    (layout / "index.json").write_text(json.dumps(index))


_REF, _CONTAINERD = "org.opencontainers.image.ref.name", "io.containerd.image.name"


@pytest.mark.parametrize("asked", ["docker.io/library/x:1.0", "index.docker.io/x:1.0", "library/x:1.0", "x:1.0", "1.0"])
@pytest.mark.parametrize(
    "found",
    [
        {_REF: "docker.io/library/x:1.0"},
        {_REF: "x:1.0"},
        {_REF: "1.0", _CONTAINERD: "docker.io/library/x:1.0"},
        {_CONTAINERD: "docker.io/library/x:1.0"},
    ],
)
def test_a_layout_with_whole_names(tmp_path: Path, found: dict[str, str], asked: str) -> None:
    layout = tmp_path / "layout"
    wanted = write_image(layout, [[Member("a")]], tag="one")
    write_image(layout, [[Member("b")]], tag="two")
    _annotated(layout, found, {_REF: "registry:5000/x:2.0"})
    assert oci.resolve_digest(f"oci:{layout}:{asked}") == wanted


def test_a_tag_that_several_names_have(tmp_path: Path) -> None:
    one = write_image(tmp_path, [[Member("a")]], tag="one")
    two = write_image(tmp_path, [[Member("b")]], tag="two")
    _annotated(tmp_path, {_REF: "docker.io/library/x:1"}, {_REF: "quay.io/x:1"})
    with pytest.raises(ConfigError, match=r"several images; name one of docker\.io/library/x:1, quay\.io/x:1"):
        oci.resolve_digest(f"oci:{tmp_path}:1")
    assert oci.resolve_digest(f"oci:{tmp_path}:x:1") == one
    assert oci.resolve_digest(f"oci:{tmp_path}:quay.io/x:1") == two
    with pytest.raises(NotFoundError, match=r"image ghcr\.io/x:1 does not exist"):
        oci.resolve_digest(f"oci:{tmp_path}:ghcr.io/x:1")


@pytest.mark.parametrize("asked", ["", ":v1"])
def test_several_platforms_and_attestations_under_one_name(tmp_path: Path, asked: str) -> None:
    write_image(tmp_path, [[Member("a")]], tag="one")
    wanted = write_image(tmp_path, [[Member("b")]], tag="two")
    ours = oci.host_platform().split("/")
    for other in (("unknown", "unknown"), ("linux", "s390x")):
        _annotated(tmp_path, {_REF: "v1"}, {_REF: "v1"}, platforms=(other, (ours[0], ours[1])))
        assert oci.resolve_digest(f"oci:{tmp_path}{asked}") == wanted
    _annotated(tmp_path, {_REF: "v1"}, {_REF: "v1"}, platforms=(("linux", "s390x"), ("linux", "riscv64")))
    with pytest.raises(DataError, match=r"no image for .*it has linux/riscv64, linux/s390x"):
        oci.resolve_digest(f"oci:{tmp_path}{asked}")


def test_damaged_documents(tmp_path: Path) -> None:
    digest = write_image(tmp_path / "layout", [[Member("a")]])
    path = tmp_path / "layout/blobs/sha256" / digest[7:]
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="does not match its digest"):
        oci.open_image(f"oci:{tmp_path}/layout")
    path.unlink()
    with pytest.raises(NotFoundError, match=r"manifest of .* is missing"):
        oci.open_image(f"oci:{tmp_path}/layout")
    (tmp_path / "layout/index.json").write_text("[]")
    with pytest.raises(DataError, match="not a valid index"):
        oci.open_image(f"oci:{tmp_path}/layout")


_NO_LAYERS = spec.RootFS(())


@pytest.mark.parametrize(
    ("kind", "said", "wanted"),
    [
        (spec.Manifest, {"schemaVersion": 2, "layers": None}, {"layers": ()}),
        (spec.Manifest, {"schemaVersion": 2, "mediaType": None, "annotations": None}, {"media_type": spec.MANIFEST}),
        (spec.Index, {"schemaVersion": 2, "manifests": None}, {"manifests": ()}),
        (spec.Document, {"mediaType": None}, {"media_type": ""}),
        (spec.ImageConfig, {"rootfs": {"type": "layers", "diff_ids": None}, "history": None}, {"rootfs": _NO_LAYERS}),
        (spec.ImageConfig, {"rootfs": {}, "variant": None}, {"rootfs": _NO_LAYERS, "variant": ""}),
        (spec.ContainerConfig, {"User": None, "WorkingDir": None, "StopSignal": None}, {"user": ""}),
        (spec.ContainerConfig, {"User": None, "Volumes": {"/a": None}}, {"volumes": {}}),
        (spec.Descriptor, {"artifactType": None, "annotations": {"a": None}}, {"annotations": {}}),
        (spec.Descriptor, {"platform": {"os": "linux", "architecture": None}}, {"platform": spec.Platform(os="linux")}),
    ],
    ids=str,
)  # fmt: skip
def test_null_is_what_go_writes_for_empty(kind: Any, said: dict[str, Any], wanted: dict[str, Any]) -> None:
    item: dict[str, object] = {"mediaType": LAYER, "digest": "sha256:" + "0" * 64, "size": 1}
    more: dict[object, dict[str, object]] = {
        spec.Manifest: {"config": item}, spec.ImageConfig: {"os": "linux", "architecture": "amd64"}
    }  # fmt: skip
    found = spec.decode(json.dumps(more.get(kind, item) | said).encode(), kind, "it")
    assert {name: getattr(found, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "said", [{"config": None}, {"layers": [None]}, {"layers": [{"size": None}]}, {"schemaVersion": None}], ids=str
)
def test_null_is_not_what_must_be_there(said: dict[str, Any]) -> None:
    item = {"mediaType": LAYER, "digest": "sha256:" + "0" * 64, "size": 1}
    with pytest.raises(DataError, match="not a valid manifest"):
        spec.decode(json.dumps({"schemaVersion": 2, "config": item} | said).encode(), spec.Manifest, "it")


@pytest.mark.parametrize("said", [1700000000, 1.5, {"at": 1}, [], True])
def test_who_made_an_image_and_when_may_be_said_in_any_way(said: object) -> None:
    document = {"architecture": "amd64", "os": "linux", "rootfs": {}, "created": said, "author": said, "history": said}
    assert spec.decode(json.dumps(document).encode(), spec.ImageConfig, "configuration").architecture == "amd64"


def test_an_image_without_layers_is_one(tmp_path: Path) -> None:
    config = {"os": "linux", "architecture": oci.host_platform().split("/")[1], "rootfs": {"diff_ids": None}}
    body = json.dumps(config).encode()
    digest = hashlib.sha256(body).hexdigest()
    _retyped(
        tmp_path, LAYER, layers=None, config={"mediaType": spec.CONFIG, "digest": f"sha256:{digest}", "size": len(body)}
    )
    (tmp_path / "blobs/sha256" / digest).write_bytes(body)
    with oci.open_image(f"oci:{tmp_path}:v1") as image:
        assert image.layers == ()


def test_a_manifest_of_schema_1_is_named_as_one(tmp_path: Path) -> None:
    _retyped(tmp_path, LAYER, schemaVersion=1, mediaType="", fsLayers=[])
    index = json.loads((tmp_path / "index.json").read_bytes())
    index["manifests"][0]["mediaType"] = "application/vnd.docker.distribution.manifest.v1+prettyjws"
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedError, match="manifest of schema 1, which is not read"):
        oci.open_image(f"oci:{tmp_path}:v1")


def test_a_long_window_is_named() -> None:
    said = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=said).compressobj()
    with pytest.raises(DataError, match="layer wants more than 128 MiB"):
        list(inflate(iter([packer.compress(b"x" * 1000) + packer.flush()]), "layer"))


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20])
@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_members_and_frames_one_after_another(kind: str, size: int) -> None:
    parts = [b"one" * 1000, b"", b"two" * 2000]
    pack = gzip.compress if kind == "gzip" else zstandard.ZstdCompressor().compress
    data = b"".join(pack(part) for part in parts)
    assert b"".join(inflate(pieces(data, size), "layer")) == b"".join(parts)
    assert b"".join(inflate(pieces(b"plain", size), "layer")) == b"plain"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("part", [b"one" * 1000, b""])
def test_bytes_behind_a_gzip_stream_are_named(size: int, part: bytes) -> None:
    assert b"".join(inflate(pieces(gzip.compress(part) + bytes(700), size), "layer")) == part
    with pytest.raises(DataError, match="layer 7 is corrupt: bytes behind the gzip stream"):
        list(inflate(pieces(gzip.compress(part) + b"0123456789", size), "layer 7"))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_frames_that_are_skipped_may_come_first(size: int) -> None:
    """As pzstd writes: the sizes of its frames, before the first of them."""
    frame = zstandard.ZstdCompressor().compress(b"one" * 1000)
    for kind in (0x50, 0x5F):
        skipped = bytes([kind]) + b"\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
        for data in (skipped + frame, skipped + skipped + frame, skipped + frame + skipped + frame + skipped):
            assert b"".join(inflate(pieces(data, size), "layer")) == b"one" * 1000 * data.count(frame)


@pytest.mark.parametrize(
    ("data", "kind"),
    [(lzma.compress(b"x" * 999), "xz"), (bz2.compress(b"x" * 999), "bzip2"), (b"\x04\x22\x4d\x18" + bytes(9), "lz4")],
)
def test_other_compressions_are_named(data: bytes, kind: str) -> None:
    with pytest.raises(DataError, match=f"layer is compressed by {kind}"):
        list(inflate(pieces(data, 3), "layer"))


def test_a_layer_of_another_type_is_refused_by_it(tmp_path: Path) -> None:
    kinds = ("erofs.layer.v1", "oci.image.layer.v1.ext4", "oci.image.layer.v1.tar+gzip+encrypted",
             "cncf.model.weight.v1.tar")  # fmt: skip
    for number, kind in enumerate(("application/octet-stream", *(f"application/vnd.{kind}" for kind in kinds))):
        _retyped(tmp_path / str(number), kind)
        with pytest.raises(UnsupportedError, match=re.escape(f"a layer of type '{kind}', which is not read")):
            oci.open_image(f"oci:{tmp_path}/{number}:v1")
    for number, kind in enumerate(sorted(LAYER_TYPES)):
        _retyped(tmp_path / f"good-{number}", kind)
        oci.open_image(f"oci:{tmp_path}/good-{number}:v1").close()


@pytest.mark.parametrize(
    "kind",
    [
        "cncf.helm.config.v1+json",
        "cncf.model.config.v1+json",
        "oci.empty.v1+json",
        "wasm.config.v0+json",
        "docker.plugin.v1+json",
        "in-toto+json",
        "bootseer.tree.v1+json",
    ],
)
def test_an_artifact_is_named_as_what_it_is(tmp_path: Path, kind: str) -> None:
    body = b'{"name":"chart","version":"1"}'
    digest = hashlib.sha256(body).hexdigest()
    item = {"mediaType": f"application/vnd.{kind}", "digest": f"sha256:{digest}", "size": len(body)}
    _retyped(tmp_path, "application/vnd.cncf.helm.chart.content.v1.tar+gzip", config=item)
    (tmp_path / "blobs/sha256" / digest).write_bytes(body)
    with pytest.raises(
        UnsupportedError, match=re.escape(f"is no image, but an artifact of type 'application/vnd.{kind}")
    ):
        oci.open_image(f"oci:{tmp_path}:v1")
    if kind == "oci.empty.v1+json":
        _retyped(tmp_path, "text/plain", config=item, artifactType="application/vnd.acme.rocket")
        with pytest.raises(UnsupportedError, match=r"artifact of type 'application/vnd\.acme\.rocket'"):
            oci.open_image(f"oci:{tmp_path}:v1")


@pytest.mark.parametrize(
    "kind", ["oci.image.config.v1+json", "docker.container.image.v1+json", "../octet-stream"], ids=str
)
def test_images_of_all_ages_say_so_differently(tmp_path: Path, kind: str) -> None:
    digest = write_image(tmp_path / "one", [[Member("a")]])
    manifest = json.loads((tmp_path / "one/blobs/sha256" / digest[7:]).read_bytes())
    kind = f"application/vnd.{kind}".replace("vnd.../", "")
    _retyped(tmp_path, LAYER, config=manifest["config"] | {"mediaType": kind})
    oci.open_image(f"oci:{tmp_path}:v1").close()


def _retyped(layout: Path, kind: str, **more: object) -> None:
    """An image whose layer says that it is of ``kind``."""
    digest = write_image(layout, [[Member("a")]])
    path = layout / "blobs/sha256" / digest[7:]
    manifest = json.loads(path.read_bytes())
    manifest["layers"][0]["mediaType"] = kind
    manifest |= more
    body = json.dumps(manifest).encode()
    found = "sha256:" + hashlib.sha256(body).hexdigest()
    (layout / "blobs/sha256" / found[7:]).write_bytes(body)
    index = json.loads((layout / "index.json").read_bytes())
    index["manifests"][0] |= {"digest": found, "size": len(body)}
    (layout / "index.json").write_text(json.dumps(index))


def _indexed(layout: Path, manifests: list[dict[str, object]]) -> None:
    """One index more above what the layout has."""
    body = json.dumps({"schemaVersion": 2, "mediaType": spec.INDEX, "manifests": manifests}).encode()
    digest = hashlib.sha256(body).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(body)
    entry = {"mediaType": spec.INDEX, "digest": f"sha256:{digest}", "size": len(body)}
    name = {"annotations": {"org.opencontainers.image.ref.name": "v1"}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry | name]}))


@pytest.mark.parametrize("asked", ["", "v1"])
@pytest.mark.parametrize(
    "index",
    [
        [["linux/arm64"], ["wanted linux/amd64"]],
        ["linux/arm64", ["wanted linux/amd64"]],
        ["arm64", "wanted amd64"],
        ["attested", "wanted"],
        ["artifact", "wanted"],
        ["linux/amd64/v3", "wanted linux/amd64/v2"],
        ["gone", "wanted"],
        ["gone", "wanted linux/amd64/v2"],
        [["gone"], "wanted"],
        ["damaged", "wanted"],
        ["without configuration", "wanted"],
    ],
    ids=str,
)
def test_what_an_index_says_only_further_in(tmp_path: Path, index: list[Any], asked: str) -> None:
    """Indexes and images without a platform, where there are others, what is no image beside one, and what cannot be
    read."""
    blobs, found = tmp_path / "blobs/sha256", []

    def stored(document: object) -> dict[str, object]:
        body = json.dumps(document).encode()
        digest = hashlib.sha256(body).hexdigest()
        (blobs / digest).write_bytes(body)
        return {"digest": f"sha256:{digest}", "size": len(body)}

    def entry(what: Any) -> dict[str, object]:
        if isinstance(what, list):
            inner = {"schemaVersion": 2, "mediaType": spec.INDEX, "manifests": [entry(one) for one in what]}
            return {"mediaType": spec.INDEX, **stored(inner)}
        wanted, said = what.startswith("wanted"), what.removeprefix("wanted").strip()
        digest = write_image(tmp_path, [[Member(what)]])
        manifest = json.loads((blobs / digest[7:]).read_bytes())
        config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
        platform = dict(zip(("os", "architecture", "variant"), said.split("/"), strict=False))
        arch = platform.get("architecture", said if said in ("arm64", "amd64") else "amd64")
        manifest["config"] |= stored(config | {"os": "linux", "architecture": arch})
        made = {"mediaType": spec.MANIFEST, **stored(manifest)}
        if wanted:
            found.append(made["digest"])
        if said == "attested":
            made["annotations"] = {"vnd.docker.reference.type": "attestation-manifest"}
        if said == "artifact":
            made["artifactType"] = "application/vnd.dev.cosign.artifact.sig.v1+json"
        if said == "gone":
            (blobs / str(made["digest"])[7:]).unlink()
        if said == "damaged":
            (blobs / str(made["digest"])[7:]).write_bytes(b"{}")
        if said == "without configuration":
            (blobs / manifest["config"]["digest"][7:]).unlink()
        return made | ({"platform": platform} if "/" in said else {})

    write_image(tmp_path, [[Member("first")]])
    _indexed(tmp_path, [entry(one) for one in index])
    with oci.open_image(f"oci:{tmp_path}:{asked}".rstrip(":"), platform="linux/amd64") as image:
        assert [image.digest] == found


def test_names_of_one_image_and_of_none(tmp_path: Path) -> None:
    """Two names of one image, a name with its digest, and a signature without a name beside it."""
    digest = write_image(tmp_path, [[Member("a")]])
    (image,) = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
    signature = write_image(tmp_path, [[Member("sig")]], tag="sig")
    (_, other) = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
    one, two = ({**image, "annotations": {_REF: name}} for name in ("one", f"ghcr.io/team/two:2@{digest}"))
    other = {**other, "annotations": {}, "artifactType": "application/vnd.dev.sigstore.bundle.v0.3+json"}
    (tmp_path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [one, two, other]}))
    for asked in ("", ":one", ":2", ":ghcr.io/team/two:2"):
        assert oci.resolve_digest(f"oci:{tmp_path}{asked}") == digest
    assert oci.resolve_digest(f"oci:{tmp_path}@{signature}") == signature


@pytest.mark.parametrize("kind", ["oci.image.layer.nondistributable.v1.tar", "docker.image.rootfs.foreign.diff.tar"])
def test_a_layer_that_its_owner_alone_gives_away(tmp_path: Path, kind: str) -> None:
    _retyped(tmp_path, f"application/vnd.{kind}")
    with oci.open_image(f"oci:{tmp_path}:v1") as image:
        (tmp_path / "blobs/sha256" / image.layers[0].hex).unlink()
        with pytest.raises(NotFoundError, match="its owner alone gives it away"):
            list(image.layer_chunks(0))


def test_an_index_in_an_index_and_attestations(tmp_path: Path) -> None:
    digest = write_image(tmp_path, [[Member("a")]])
    (image,) = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
    image = {name: image[name] for name in ("mediaType", "digest", "size")}
    attested = image | {"platform": {"os": "unknown", "architecture": "unknown"}}
    _indexed(tmp_path, [image, attested])  # the image itself names no platform
    assert oci.resolve_digest(f"oci:{tmp_path}:v1") == digest
    (inner,) = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
    _indexed(tmp_path, [{name: inner[name] for name in ("mediaType", "digest", "size")}])
    assert oci.resolve_digest(f"oci:{tmp_path}:v1") == digest
    for _ in range(9):
        (inner,) = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
        _indexed(tmp_path, [{name: inner[name] for name in ("mediaType", "digest", "size")}])
    with pytest.raises(DataError, match="not a valid manifest of an image"):
        oci.resolve_digest(f"oci:{tmp_path}:v1")
    _indexed(tmp_path, [attested])
    with pytest.raises(DataError, match=r"no image for .*attestations alone"):
        oci.resolve_digest(f"oci:{tmp_path}:v1")


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_bomb_comes_in_small_chunks(kind: str) -> None:
    pack = gzip.compress if kind == "gzip" else zstandard.ZstdCompressor().compress
    sizes = [len(chunk) for chunk in inflate(iter([pack(bytes(100 << 20))]), "layer")]
    assert (sum(sizes), max(sizes) <= 1 << 20) == (100 << 20, True)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_bomb_ends_where_no_layer_goes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times its compressed size, beyond what an honest layer with a file of zeros may have."""
    monkeypatch.setattr(inflate_module, "FREE", 16 << 20)
    pack = gzip.compress if kind == "gzip" else zstandard.ZstdCompressor().compress
    sizes = map(len, inflate(iter([pack(bytes(100 << 20))]), "layer 7"))
    assert sum(itertools.islice(sizes, 16)) <= 16 << 20
    with pytest.raises(DataError, match="layer 7 is a bomb"):
        list(itertools.islice(sizes, 10))
    honest = os.urandom(1 << 20) + bytes(100 << 20)
    assert b"".join(inflate(pieces(pack(honest), 1 << 16), "layer")) == honest


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_gzip_members_with_all_fields_are_read_however_they_are_cut(size: int) -> None:
    """Names, comments and checksums of headers, and zeros behind members, as tapes and others fill blocks with them."""
    plain = os.urandom(3000) + bytes(1 << 20)
    body = gzip.compress(plain, mtime=0)[10:]
    fields = [(0, b""), (4, b"\4\0abcd"), (8, b"name\0"), (12, b"\4\0abcdname\0"), (24, b"name\0comment\0"), (2, b"")]
    data = b""
    for flags, more in fields:
        header = b"\x1f\x8b\x08" + bytes([flags]) + bytes(4) + b"\2\xff" + more
        data += header + (struct.pack("<H", zlib.crc32(header) & 0xFFFF) if flags & 2 else b"") + body + bytes(99)
    assert b"".join(inflate(pieces(data, size), "layer")) == len(fields) * plain


def test_truncated_gzip_is_named() -> None:
    data = gzip.compress(os.urandom(100_000))
    for end in (len(data) - 1, len(data) - 9, 50_000, 5):
        with pytest.raises(DataError, match=r"layer 7 is (truncated|corrupt)"):
            list(inflate(pieces(data[:end], 1000), "layer 7"))


@pytest.mark.parametrize("name", ["index.json", "blob"])
def test_a_layout_of_a_neighbour_holds_nobody_up_and_shows_nothing(tmp_path: Path, name: str) -> None:
    """A pipe, a file without end, a link to what is its reader's."""
    root = tmp_path / "layout"
    digest = write_image(root, [[Member("a")]])
    path = root / "index.json" if name == "index.json" else root / "blobs/sha256" / digest.removeprefix("sha256:")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BootseerError, match="a device, a pipe or a socket"):
        oci.open_image(f"oci:{root}")
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(BootseerError, match="a device, a pipe or a socket"):
        oci.open_image(f"oci:{root}")
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="is larger than"):
        oci.open_image(f"oci:{root}")
