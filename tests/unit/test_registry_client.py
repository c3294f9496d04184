"""The registry client against a server that misbehaves on purpose."""

from __future__ import annotations

import collections
import errno
import gc
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import image, oci
from bootseer.errors import (
    BootseerError,
    ConfigError,
    DataError,
    FullError,
    NotFoundError,
    PrivilegeError,
    UnavailableError,
)
from bootseer.oci import endpoint, pipeline, spec, transport
from bootseer.oci.image import verified
from bootseer.oci.registry import Registry
from support.images import Member, write_image
from support.web import Answer, Request, WebServer

BLOB = hashlib.shake_256(b"blob").digest(1_500_000)


class Server(WebServer):
    def __init__(self) -> None:
        super().__init__(self._answer)
        self.documents: dict[str, tuple[bytes, str]] = {}
        self.blobs: dict[str, bytes] = {}
        self.troubles: list[str] = []
        self.seen: list[tuple[str, str]] = []
        self.token = ""
        self.page: dict[str, str] = {}
        """Headers of what it answers in place of blobs."""

    def _answer(self, request: Request) -> Answer:
        path, asked = request.path, request.headers.get("Range", "")
        self.seen.append((path, asked))
        trouble = self.troubles.pop(0) if self.troubles else ""
        if path.startswith("/token"):
            return Answer(body=json.dumps({"token": self.token}).encode())
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            where = f'Bearer realm="http://{self.address}/token",service="s",scope="repository:x:pull"'
            return Answer(401, headers={"WWW-Authenticate": where} if self.token != "none" else {})
        if trouble.isdigit():
            return Answer(int(trouble), headers={"Retry-After": "0"})
        kind, _, name = path.removeprefix("/v2/x/").partition("/")
        if kind == "manifests" and name in self.documents:
            body, media_type = self.documents[name]
            return Answer(body=body, headers={"Content-Type": media_type})
        if kind == "blobs" and self.page:
            return Answer(body=iter([b"<" * int(self.page["Content-Length"])]), headers=self.page)
        if kind == "blobs" and name in self.blobs:
            data = self.blobs[name]
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and trouble != "no ranges" else 0
            part = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
            length = {"Content-Length": str(len(data) - start)}
            return Answer(206 if start else 200, pieces(data[start:], trouble), length | part)
        return Answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')


def pieces(data: bytes, trouble: str) -> Iterator[bytes | None]:
    yield data[:300_000]
    if trouble == "cut":
        yield data[300_000:400_000]
        yield None
    elif trouble == "stall":
        time.sleep(1.0)
        yield None
    yield data[300_000:]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(endpoint, "backoff", lambda failures, exc: 0.01)
    with Server() as server:
        yield server


def descriptor(data: bytes) -> spec.Descriptor:
    return spec.Descriptor(spec.LAYER, "sha256:" + hashlib.sha256(data).hexdigest(), len(data))


def fetch(server: Server) -> bytes:
    item = descriptor(BLOB)
    server.blobs[item.digest] = BLOB
    with Registry(oci.Reference.parse(f"{server.address}/x")) as client:
        return b"".join(verified(client.blob(item), item, "layer"))


def put_image(server: Server, *, as_index: bool = False, platform: str = "") -> str:
    os_name, arch, variant = [*(platform or oci.host_platform()).split("/"), ""][:3]
    of = {"os": os_name, "architecture": arch, **({"variant": variant} if variant else {})}
    config = json.dumps({**of, "rootfs": {"type": "layers", "diff_ids": []}}).encode()
    server.blobs[descriptor(config).digest] = config
    item = {"mediaType": spec.CONFIG, "digest": descriptor(config).digest, "size": len(config)}
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": spec.DOCKER_MANIFEST, "config": item, "layers": []}
    ).encode()
    digest = descriptor(manifest).digest
    server.documents[digest] = server.documents["v1"] = (manifest, spec.DOCKER_MANIFEST)
    if as_index:
        entry = {"mediaType": spec.DOCKER_MANIFEST, "digest": digest, "size": len(manifest),
                 "platform": of}  # fmt: skip
        other = {**entry, "digest": "sha256:" + "0" * 64, "platform": {"os": "plan9", "architecture": "mips"}}
        body = json.dumps({"schemaVersion": 2, "manifests": [other, entry]}).encode()
        server.documents["v1"] = (body, spec.DOCKER_LIST)
    return digest


@pytest.mark.parametrize("troubles", [[], ["503", "429"], ["cut"], ["cut", "502", "cut"], ["cut", "no ranges"]])
def test_blobs_survive_trouble(server: Server, troubles: list[str]) -> None:
    server.troubles = list(troubles)
    assert fetch(server) == BLOB


def test_a_cut_transfer_resumes_where_it_was(server: Server) -> None:
    server.troubles = ["cut"]
    assert fetch(server) == BLOB
    assert [asked for _, asked in server.seen] == ["", "bytes=400000-1499999"]


def test_a_stalled_transfer_is_given_up_and_resumed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "STALL", 0.3)
    server.troubles = ["stall"]
    began = time.monotonic()
    assert fetch(server) == BLOB
    assert time.monotonic() - began < 1.0
    assert server.seen[1][1].startswith("bytes=")


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ({"Content-Type": "text/html; charset=utf-8"}, 900),
        ({"Content-Type": "application/json"}, 30),
        ({"Content-Type": "application/octet-stream"}, len(BLOB) + 1),
    ],
)
def test_a_page_in_place_of_a_blob_is_no_outage(server: Server, headers: dict[str, str], length: int) -> None:
    server.page = headers | {"Content-Length": str(length)}
    with pytest.raises(DataError, match=rf"something else than blob .*'{headers['Content-Type'].lower()}'.*proxy"):
        fetch(server)
    assert len(server.seen) == 1
    item = descriptor(BLOB)
    with Registry(oci.Reference.parse(f"{server.address}/x")) as client:
        # a reader may wait until the page is gone
        with pytest.raises(UnavailableError, match="something else than blob"):
            client.read_range(item, 0, 100)
        server.page = {}
        assert client.read_range(item, 0, 100) == BLOB[:100]


def test_a_page_in_place_of_a_layer_is_one_line_with_what_to_do(server: Server, tmp_path: Path) -> None:
    write_image(tmp_path / "layout", [[Member("f")]])
    server.blobs = {f"sha256:{path.name}": path.read_bytes() for path in (tmp_path / "layout/blobs/sha256").iterdir()}
    with oci.open_image(f"oci:{tmp_path}/layout") as wanted:
        server.documents["v1"] = (server.blobs[wanted.digest], spec.MANIFEST)
    with oci.open_image(f"{server.address}/x:v1") as opened, pipeline.Layers(opened, tmp_path) as layers:
        server.page = {"Content-Type": "text/html", "Content-Length": "9"}
        with pytest.raises(DataError, match=r"^registry .* answers something else than .*; a proxy or login page"):
            layers.apply(0, lambda chunks: collections.deque(chunks, 0).clear(), "read")


def test_trouble_without_end_is_an_error(server: Server) -> None:
    server.troubles = ["503"] * 50
    with pytest.raises(UnavailableError, match=r"does not answer.*HTTP 503"):
        fetch(server)
    assert len(server.seen) == endpoint.RETRIES + 1


def test_a_login_that_leads_nowhere(server: Server) -> None:
    server.token = "secret"
    put_image(server)
    with Registry(oci.Reference.parse(f"{server.address}/x")) as client:
        server.token = "other"
        assert client.manifest("v1")[1].digest == put_image(server)
        server.token = "another"  # the old one has been taken back
        assert client.manifest("v1")[1].digest == put_image(server)
    server.token = "none"
    with pytest.raises(PrivilegeError, match="denies access"):
        oci.open_image(f"{server.address}/x:v1")


@pytest.mark.parametrize("as_index", [False, True])
def test_the_digest_is_the_manifests(server: Server, as_index: bool) -> None:
    digest = put_image(server, as_index=as_index)
    with oci.open_image(f"{server.address}/x:v1") as image:
        assert image.digest == digest
    assert oci.resolve_digest(f"{server.address}/x:v1") == digest


def test_another_platform(server: Server) -> None:
    put_image(server, as_index=True, platform="linux/s390x")
    with pytest.raises(DataError, match=rf"no image for {oci.host_platform()}.*it has linux/s390x, plan9/mips"):
        oci.open_image(f"{server.address}/x:v1")


@pytest.mark.parametrize("as_index", [False, True])
@pytest.mark.parametrize(
    ("machine", "said"),
    [("aarch64", "linux/arm64/v8"), ("aarch64", "linux/arm64"), ("aarch64", "linux/arm64/v9"),
     ("armv7l", "linux/arm/v7"),
     ("x86_64", "linux/amd64/v1"), ("x86_64", "linux/amd64/v3"), ("x86_64", "linux/x86_64")],
)  # fmt: skip
def test_images_with_a_variant_are_found_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, said: str, as_index: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    digest = put_image(server, as_index=as_index, platform=said)
    ref = f"{server.address}/x:v1"
    made = image.ensure(ref, str(tmp_path / "store"), work_dir=tmp_path / "work").record
    assert image.resolve(ref, str(tmp_path / "store")) == made
    assert image.resolve(f"{server.address}/x@{digest}", str(tmp_path / "store")) == made
    assert not image.ensure(ref, str(tmp_path / "store"), work_dir=tmp_path / "work").fresh


@pytest.mark.parametrize("as_index", [False, True])
@pytest.mark.parametrize("asked", ["linux/arm64", "linux/arm64/v8", "linux/aarch64"])
def test_conversion_for_other_machines(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, as_index: bool
) -> None:
    put_image(server, as_index=as_index, platform="linux/arm64/v8")
    ref, store = f"{server.address}/x:v1", str(tmp_path / "store")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(DataError, match="linux/arm64"):
        image.ensure(ref, store, work_dir=tmp_path / "work")
    made = image.ensure(ref, store, work_dir=tmp_path / "work", platform=asked).record
    assert made.platform == "linux/arm64"
    if not as_index:
        with pytest.raises(NotFoundError):
            image.resolve(ref, store)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert image.resolve(ref, store) == made


@pytest.mark.parametrize(
    "platform", ["linux", "linux/", "linux/a/b/c", "linux/../..", "/amd64", "linux/am d64", "a\nb/c"]
)
def test_what_is_no_platform(server: Server, tmp_path: Path, platform: str) -> None:
    put_image(server)
    with pytest.raises(ConfigError, match="bad platform"):
        image.ensure(f"{server.address}/x:v1", str(tmp_path / "store"), work_dir=tmp_path, platform=platform)


def platforms(*said: str) -> spec.Index:
    items = [spec.Descriptor(spec.MANIFEST, text, 1, spec.Platform(*_parts(text))) for text in said]
    return spec.Index(schema_version=2, manifests=tuple(items))


def _parts(text: str) -> tuple[str, str, str]:
    os_name, arch, variant = [*text.split("/"), ""][:3]
    return arch, os_name, variant


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("linux/amd64", "linux/amd64"),
        ("linux/amd64/v3", "linux/amd64/v3"),
        ("linux/amd64/v1", "linux/amd64"),
        ("linux/arm64", "linux/arm64/v8"),
        ("linux/arm", "linux/arm/v7"),
        ("linux/arm/v7", "linux/arm/v7"),
        ("linux/arm/v6", "linux/arm/v6"),
        ("linux/ppc64le", "linux/ppc64le/v9"),
        ("linux/arm/v5", ""),
        ("linux/arm64/v9", "linux/arm64/v8"),
        ("linux/amd64/v2", "linux/amd64"),
        ("linux/amd64/v4", "linux/amd64/v3"),
        ("linux/arm/v8", "linux/arm/v7"),
        ("linux/386", "linux/386/v3"),
        ("linux/riscv64/rva23", ""),
        ("windows/amd64", ""),
    ],
)
def test_which_of_an_index_is_taken(wanted: str, found: str) -> None:
    index = platforms(
        "unknown/unknown", "linux/amd64/v3", "linux/amd64", "linux/arm/v6", "linux/arm/v7", "linux/arm64/v8",
        "linux/ppc64le/v9", "linux/ppc64le/v10", "linux/386/v10", "linux/386/v3", "linux/riscv64/rva20",
    )  # fmt: skip
    if found:
        assert spec.select(index, spec.Platform.parse(wanted), "x").digest == found
    else:
        with pytest.raises(DataError, match=f"no image for {wanted}"):
            spec.select(index, spec.Platform.parse(wanted), "x")


def test_other_bytes_for_a_digest(server: Server) -> None:
    digest = put_image(server)
    server.documents[digest] = (b"{}", spec.MANIFEST)
    with pytest.raises(DataError, match="other bytes"):
        oci.open_image(f"{server.address}/x@{digest}")


def test_noise_as_manifest(server: Server) -> None:
    for body in (b"", b"<html>", b"[]", b'{"schemaVersion":1}'):
        server.documents["v1"] = (body, "text/html")
        with pytest.raises(DataError, match=r"not a valid (document|manifest)"):
            oci.open_image(f"{server.address}/x:v1")


CONFIG_OF_NONE = {"mediaType": spec.CONFIG, "digest": "sha256:" + "0" * 64, "size": 2}


@pytest.mark.parametrize(
    ("document", "kind", "says"),
    [
        ({"mediaType": spec.INDEX, "manifests": [CONFIG_OF_NONE], "layers": [CONFIG_OF_NONE]}, spec.INDEX, "fields of"),
        ({"manifests": [CONFIG_OF_NONE], "config": CONFIG_OF_NONE, "layers": []}, spec.MANIFEST, "fields of an index"),
        ({"manifests": [CONFIG_OF_NONE]}, spec.MANIFEST, "not a valid manifest"),
        ({"config": CONFIG_OF_NONE, "layers": [CONFIG_OF_NONE]}, spec.INDEX, "no image for"),
        ({"mediaType": spec.INDEX, "manifests": [CONFIG_OF_NONE]}, spec.DOCKER_LIST, "given as .* calls itself"),
        ({"mediaType": spec.MANIFEST}, "application/xml", "given as"),
        ({"manifests": []}, "", "not a valid manifest"),
    ],
)
def test_what_a_document_is_its_media_type_says(
    server: Server, document: dict[str, object], kind: str, says: str
) -> None:
    server.documents["v1"] = (json.dumps({"schemaVersion": 2, **document}).encode(), kind)
    with pytest.raises(DataError, match=says):
        oci.open_image(f"{server.address}/x:v1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"digest": "sha512:" + "0" * 128}, "unsupported digest 'sha512:0"),
        ({"digest": "latest"}, "unsupported digest 'latest'"),
        ({"digest": "sha256:" + "0" * 64 + "/../../../token"}, "unsupported digest"),
        ({"mediaType": spec.MANIFEST}, r"calls .*oci.image.manifest.* it is .*docker"),
        ({"size": 1}, "of 1 bytes, it is"),
    ],
)
def test_children_of_an_index_are_what_it_says(server: Server, change: dict[str, object], says: str) -> None:
    put_image(server, as_index=True)
    index = json.loads(server.documents["v1"][0])
    manifest = server.documents[index["manifests"][1]["digest"]]
    server.documents["latest"] = manifest  # that a server has it there makes it no better
    server.documents["sha512:" + "0" * 128] = manifest
    index["manifests"][1].update(change)
    server.documents["v1"] = (json.dumps(index).encode(), spec.DOCKER_LIST)
    with pytest.raises(DataError, match=says):
        oci.open_image(f"{server.address}/x:v1")


def test_blobs_are_named_by_sha256(server: Server) -> None:
    with Registry(oci.Reference.parse(f"{server.address}/x")) as client, pytest.raises(DataError, match="unsupported"):
        next(client.blob(spec.Descriptor(spec.LAYER, "sha512:" + "0" * 128, 10)))
    assert server.seen == []


@pytest.mark.parametrize("damaged", ["layers", "config", "manifest"])
@pytest.mark.parametrize("how", ["convert", "unpack"])
def test_what_a_mirror_has_damaged_comes_from_the_registry(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    damaged: str, how: str,
) -> None:  # fmt: skip
    write_image(tmp_path / "layout", [[Member("f", data=BLOB)], [Member("g", data=BLOB)]], compression="none")
    with oci.open_image(f"oci:{tmp_path}/layout") as wanted:
        body = (tmp_path / "layout/blobs/sha256" / wanted.digest[7:]).read_bytes()
        spoiled = wanted.layers[1] if damaged == "layers" else wanted.manifest.config
    with Server() as mirror:
        for one in (server, mirror):
            one.documents["v1"] = (body, spec.MANIFEST)
            one.blobs |= {f"sha256:{p.name}": p.read_bytes() for p in (tmp_path / "layout/blobs/sha256").iterdir()}
        good = mirror.blobs[spoiled.digest]
        mirror.blobs[spoiled.digest] = good[:100] + b"x" + good[101:]
        if damaged == "manifest":  # of a tag, whose digest nobody knows
            mirror.documents["v1"], mirror.blobs[spoiled.digest] = (b'{"schemaVersion": 2}', spec.MANIFEST), good
        monkeypatch.setenv("BOOTSEER_REGISTRY_MIRRORS", f"{server.address}=http://{mirror.address}")
        if damaged == "manifest":
            mirror.documents["i"], server.documents["i"] = (b'{"manifests": 1}', spec.INDEX), (body, spec.MANIFEST)
            assert oci.resolve_digest(f"{server.address}/x:i") == wanted.digest
        if how == "convert":
            made = image.ensure(f"{server.address}/x:v1", str(tmp_path / "store"), work_dir=tmp_path / "work").record
            assert (made.image, made.members) == (wanted.digest, 2)
        else:
            with oci.open_image(f"{server.address}/x:v1") as opened:
                oci.unpack(opened, tmp_path / "root")
            assert (tmp_path / "root/g").read_bytes() == BLOB
    assert "with what the registry itself gives" in caplog.text
    assert any(path.endswith("v1" if damaged == "manifest" else spoiled.digest) for path, _ in server.seen)


def spool(server: Server, size: int, tmp_path: Path, how: str) -> None:
    """Convert or unpack an image whose one layer is said to have ``size`` bytes."""
    layer = {"mediaType": spec.LAYER, "digest": descriptor(BLOB).digest, "size": size}
    server.blobs[descriptor(BLOB).digest] = BLOB
    put_image(server)
    config = json.dumps(
        {
            **dict(zip(("os", "architecture"), oci.host_platform().split("/"), strict=True)),
            "rootfs": {"type": "layers", "diff_ids": [descriptor(BLOB).digest]},
        }
    ).encode()
    server.blobs[descriptor(config).digest] = config
    item = {"mediaType": spec.CONFIG, "digest": descriptor(config).digest, "size": len(config)}
    document = {"schemaVersion": 2, "mediaType": spec.MANIFEST, "config": item, "layers": [layer]}
    server.documents["v1"] = (json.dumps(document).encode(), spec.MANIFEST)
    if how == "convert":
        image.ensure(f"{server.address}/x:v1", str(tmp_path / "store"), work_dir=tmp_path / "work")
    else:
        with oci.open_image(f"{server.address}/x:v1") as opened:
            oci.unpack(opened, tmp_path / "root")


@pytest.mark.parametrize("how", ["convert", "unpack"])
def test_layers_are_not_spooled_past_the_free_disk(server: Server, tmp_path: Path, how: str) -> None:
    with pytest.raises(FullError, match=r"no space for the layers of .* GB are needed"):
        spool(server, 10**17, tmp_path, how)
    assert not [path for path, _ in server.seen if path.endswith(descriptor(BLOB).digest)]


@pytest.mark.parametrize("how", ["convert", "unpack"])
@pytest.mark.parametrize("size", [-1, -(10**17)])
def test_sizes_that_are_none_are_refused(server: Server, tmp_path: Path, how: str, size: int) -> None:
    with pytest.raises(DataError, match="not a valid manifest"):
        spool(server, size, tmp_path, how)


@pytest.mark.parametrize("how", ["convert", "unpack"])
def test_too_many_open_files_are_one_line(
    server: Server, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**more: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(pipeline.tempfile, "TemporaryFile", full)
    with pytest.raises(BootseerError, match=r"cannot spool layer sha256:.*: Too many open files"):
        spool(server, len(BLOB), tmp_path, how)


def test_of_many_layers_some_wait_on_the_disk(server: Server, tmp_path: Path) -> None:
    """All of them, where the first took long, were more open files than a process may have."""
    count = 150
    write_image(tmp_path / "layout", [[Member(f"f{number}")] for number in range(count)])
    server.blobs = {f"sha256:{path.name}": path.read_bytes() for path in (tmp_path / "layout/blobs/sha256").iterdir()}
    with oci.open_image(f"oci:{tmp_path}/layout") as wanted:
        server.documents["v1"] = (server.blobs[wanted.digest], spec.MANIFEST)
    (spool := tmp_path / "spool").mkdir()
    with oci.open_image(f"{server.address}/x:v1") as opened, pipeline.Layers(opened, spool) as layers:
        asked = -1
        while asked != (asked := len(server.seen)):
            time.sleep(0.5)
        assert count // 4 < asked < count * 3 // 4
        for index in range(count):
            layers.apply(index, lambda chunks: collections.deque(chunks, 0).clear(), "read")
    assert len(server.seen) == count + 2


def test_an_image_closes_its_connections(server: Server) -> None:
    put_image(server)
    with oci.open_image(f"{server.address}/x:v1") as image:
        assert isinstance(image.source, Registry)
        assert image.source._transport.idle == 1
    assert image.source._transport.idle == 0


def test_a_store_that_is_dropped_closes_its_connections_at_once(server: Server) -> None:
    """Not when garbage is collected, some time later."""
    put_image(server)
    made = Registry(oci.Reference.parse(f"{server.address}/x:v1"))
    made.manifest("v1")
    (((connection, _),),) = made._transport._idle.values()
    gc.disable()
    try:
        del made
        assert connection.sock is None
    finally:
        gc.enable()
