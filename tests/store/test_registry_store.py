"""What only a registry can show: artifacts of an image, tags, batches. What all promise: `test_promises.py`."""

from __future__ import annotations

import base64
import json
import os
import re
import uuid
from pathlib import Path

import pytest

from bootseer import oci
from bootseer.blocks import tree
from bootseer.errors import ConfigError, DataError, UnavailableError
from bootseer.objects import Store, open_store
from bootseer.objects.artifact import ARTIFACT, KEY, tag_of, tag_prefix
from bootseer.objects.registry import RegistryStore
from bootseer.oci import spec
from bootseer.oci.registry import Registry
from support.registry import DockerRegistry
from support.registryproxy import Fault, RegistryProxy
from support.waits import together

pytestmark = pytest.mark.registry


@pytest.fixture
def store(registry: DockerRegistry) -> Store:
    return open_store(f"registry://{registry.address}/r{uuid.uuid4().hex}")


def push_image(store: Store) -> spec.Descriptor:
    """A small image in the store's repository."""
    assert isinstance(store, RegistryStore)
    client = store._registry
    config = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": []}}).encode()
    item = spec.Descriptor(spec.CONFIG, spec.digest_of(config), len(config))
    client.put_blob(item, config)
    document = {"schemaVersion": 2, "mediaType": spec.MANIFEST, "layers": [],
                "config": {"mediaType": item.media_type, "digest": item.digest, "size": item.size}}  # fmt: skip
    body = json.dumps(document).encode()
    return spec.Descriptor(spec.MANIFEST, client.put_manifest(body, spec.MANIFEST, "v1"), len(body))


def test_a_batch_is_one_artifact_of_its_image(store: Store, tmp_path: Path) -> None:
    image = push_image(store)
    (tmp_path / "pack").write_bytes(b"pack" * 100_000)
    key = f"images/{image.digest[7:]}-linux-amd64.json"
    other = open_store(store.url)
    store.put("blobs/aa/old", b"known before")
    with store.batch(subject=image):
        assert store.put("blobs/aa/pack", tmp_path / "pack")
        assert store.get("blobs/aa/pack", most=1 << 30) == b"pack" * 100_000  # seen here, and not by others
        assert not other.exists("blobs/aa/pack")
        assert not store.put("blobs/aa/old", b"known before")
        assert store.put("trees/t.json", b"tree")
        assert store.put(key, b"record")
    assert isinstance(store, RegistryStore)
    (artifact,) = store._registry.referrers(image.digest)
    body = json.loads(store._registry.manifest(artifact.digest)[0])
    assert body["artifactType"] == ARTIFACT
    assert body["subject"] == {"mediaType": spec.MANIFEST, "digest": image.digest, "size": image.size}
    titles = [layer["annotations"][KEY] for layer in body["layers"]]
    assert titles == ["blobs/aa/old", "blobs/aa/pack", key, "trees/t.json"]
    for name, data in {"blobs/aa/pack": b"pack" * 100_000, "trees/t.json": b"tree", key: b"record"}.items():
        assert other.get(name, most=1 << 30) == data
    store.delete("trees/t.json")  # one of a batch: the others stay
    assert not open_store(store.url).exists("trees/t.json")
    assert open_store(store.url).get(key, most=1 << 20) == b"record"


def test_a_batch_that_fails_publishes_nothing(store: Store) -> None:
    with pytest.raises(ConfigError), store.batch():  # noqa: PT012 - the first put counts
        assert store.put("a", b"x")
        store.put("..", b"x")
    assert list(store.list("")) == []
    assert not store.exists("a")
    with store.batch(), store.batch():
        store.put("a", b"x")
    assert store.get("a", most=1 << 30) == b"x"


def test_objects_are_found_by_the_image_alone(store: Store) -> None:
    """As after a copy of the image with its referrers (oras cp -r): no tag of ours is there."""
    image = push_image(store)
    key = f"images/{image.digest[7:]}-linux-amd64.json"
    with store.batch(subject=image):
        store.put("trees/t.json", b"tree")
        store.put(key, b"record")
    copy = open_store(re.sub("/r", "/copy", store.url, count=1))
    assert isinstance(store, RegistryStore)
    assert isinstance(copy, RegistryStore)
    push_image(copy)
    (artifact,) = store._registry.referrers(image.digest)
    body, _ = store._registry.manifest(artifact.digest)
    for layer in (*spec.decode(body, spec.Manifest, "").layers, spec.decode(body, spec.Manifest, "").config):
        copy._registry.put_blob(layer, b"".join(store._registry.blob(layer)))
    copy._registry.put_manifest(body, spec.MANIFEST, artifact.digest)
    assert open_store(copy.url).get(key, most=1 << 20) == b"record"
    named = open_store(f"{copy.url}@{image.digest}")
    assert named.get("trees/t.json", most=1 << 20) == b"tree"
    assert [info.key for info in named.list("")] == [key, "trees/t.json"]
    named.put("profiles/t/default/x.trace", b"trace")  # refers to the image as well
    assert len(copy._registry.referrers(image.digest)) == 2
    named.delete("trees/t.json")
    assert [info.key for info in named.list("")] == [key, "profiles/t/default/x.trace"]


def test_many_writers_of_one_images_artifacts(store: Store) -> None:
    """The fallback tag is read, changed and written by all of them: nothing is lost inside a process."""
    image = push_image(store)
    names = [f"profiles/t/default/{number}.trace" for number in range(8)]

    def publish(name: str) -> None:
        mine = open_store(f"{store.url}@{image.digest}")
        mine.put(name, name.encode())

    together(publish, names)
    assert isinstance(store, RegistryStore)
    assert len(store._registry.referrers(image.digest)) == len(names)
    assert [info.key for info in store.list("profiles")] == names


def test_entries_of_others_stay_as_they_are(store: Store) -> None:
    image = push_image(store)
    assert isinstance(store, RegistryStore)
    strange = {"mediaType": spec.MANIFEST, "digest": image.digest, "size": image.size, "x-vendor": {"a": [1]}}
    index = json.dumps({"schemaVersion": 2, "mediaType": spec.INDEX, "manifests": [strange]}).encode()
    tag = "sha256-" + image.digest[7:]
    store._registry.store_manifest(index, spec.INDEX, tag)
    with store.batch(subject=image):
        store.put("trees/t.json", b"tree")
    entries = json.loads(store._registry.manifest(tag)[0])["manifests"]
    assert entries[0] == strange
    assert entries[1]["artifactType"] == ARTIFACT
    assert open_store(f"{store.url}@{image.digest}").get("trees/t.json", most=1 << 20) == b"tree"


def test_a_small_object_comes_with_its_manifest(registry: DockerRegistry) -> None:
    with RegistryProxy(registry.address) as proxy:
        url = f"registry://{proxy.address}/s{uuid.uuid4().hex}"
        store = open_store(url)
        assert isinstance(store, RegistryStore)
        with store.batch():
            store.put("images/small", b"small")
            store.put("trees/large", b"large" * 10_000)
        for more in (0, 1):
            if more:  # others may write what they like into a manifest
                body = store._registry.manifest(tag_of("images/small"))[0]
                wrong = body.replace(base64.b64encode(b"small"), base64.b64encode(b"wrong"))
                store._registry.store_manifest(wrong, spec.MANIFEST, tag_of("images/small"))
            before, node = len(proxy.requests("^GET .*/blobs/")), open_store(url)
            assert node.get("images/small", most=100) == b"small"
            assert len(proxy.requests("^GET .*/blobs/")) == before + more
        assert node.get("trees/large", most=1 << 20) == b"large" * 10_000
        with node.batch():  # together they are more than a manifest may hold
            for number in range(40):
                node.put(f"env/{number}", bytes([number]) * 16_000)
        for number in range(40):
            assert open_store(url).get(f"env/{number}", most=1 << 20) == bytes([number]) * 16_000
        assert len(store._registry.manifest(tag_of("env/0"))[0]) < 100_000


def test_a_large_upload_goes_in_pieces_and_survives_trouble(
    registry: DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bootseer.oci import endpoint, uploads

    monkeypatch.setattr(uploads, "PIECE", 1 << 20)
    monkeypatch.setattr(endpoint, "backoff", lambda failures, exc: 0.01)
    data = os.urandom((5 << 20) + 17)
    (tmp_path / "big").write_bytes(data)
    with RegistryProxy(registry.address) as proxy:
        store = open_store(f"registry://{proxy.address}/u{uuid.uuid4().hex}")
        proxy.add(Fault(match="^PATCH", after=2, drop=True))
        proxy.add(Fault(match="^PATCH", after=5, status=503))
        assert store.put("k", tmp_path / "big")
        assert store.get("k", most=1 << 30) == data
        assert len(proxy.requests("^PATCH")) > 6
        assert proxy.requests("^GET .*/uploads/")


def test_bad_urls_and_nobody_there() -> None:
    for url in ("registry://", "registry://host", "registry://h.x/UPPER", "registry://h.x/n:tag"):
        with pytest.raises(ConfigError, match="bad store"):
            open_store(url)
    with pytest.raises(UnavailableError, match="refused"):
        open_store("registry://127.0.0.1:9/x").get("k", most=1 << 20)
    assert open_store("registry+https://127.0.0.1:9/x").url.startswith("registry+https")


def test_a_converted_image_can_be_asked_for_its_subject(registry: DockerRegistry, tmp_path: Path) -> None:
    store = open_store(f"registry://{registry.address}/img")
    image = push_image(store)
    with oci.open_image(f"{registry.address}/img:v1") as opened:
        assert opened.descriptor == image
    with Registry(oci.Reference.parse(f"{registry.address}/img:v1")) as client:
        assert client.head_manifest("v1") == image


def test_profiles_are_published_without_touching_the_tag_of_a_record(store: Store, tmp_path: Path) -> None:
    """So a registry may have rules that keep the tags of records as they are."""
    image = push_image(store)
    assert isinstance(store, RegistryStore)
    record = f"images/{image.digest[7:]}-linux-amd64.json"
    with store.batch(subject=image):
        store.put("trees/t.json", b"tree")
        store.put(record, b"{}")
    before = {tag: store._registry.manifest(tag)[1] for tag in store._registry.tags()}
    for node in (open_store(store.url), open_store(f"{store.url}@{image.digest}")):
        node.put("profiles/t/job/1.trace", b"trace")
        node.put("profiles/t/job/pages.claim", b"1")
        node.put("profiles/t/job/pages.claim", b"2", overwrite=True)
        node.delete("profiles/t/job/pages.claim")
    after = {tag: store._registry.manifest(tag, fresh=True)[1] for tag in store._registry.tags()}
    changed = {tag for tag in after if after[tag] != before.get(tag)}
    index = "sha256-" + image.digest[7:]
    assert changed - {index}
    assert all(tag.startswith(tag_prefix("profiles")) for tag in changed - {index})
    assert open_store(store.url).get(record, most=1 << 20) == b"{}"


def test_a_damaged_blob_that_the_registry_keeps_is_an_error_of_the_publication(tmp_path: Path) -> None:
    (tmp_path / "meta").write_bytes(b"metadata")
    (tmp_path / "data").write_bytes(os.urandom(300_000))
    with DockerRegistry(root=tmp_path / "root") as other:
        store = open_store(f"registry://{other.address}/x")
        made = tree.publish(store, tmp_path / "meta", tmp_path / "data")
        assert tree.publish(store, tmp_path / "meta", tmp_path / "data") == made
        blob = max((tmp_path / "root").rglob("data"), key=lambda path: path.stat().st_size)
        raw = blob.read_bytes()
        blob.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(DataError, match=r"is damaged.*operator"):
            tree.publish(store, tmp_path / "meta", tmp_path / "data")
