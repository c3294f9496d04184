"""Publishing a tree and bringing its small parts to a node: atomic, repeatable, verified from the digest down."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from bootseer.blocks.metadata import localize
from bootseer.blocks.publish.packs import PackWriter
from bootseer.blocks.publish.tree import publish
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import ObjectRef
from bootseer.chunks.manifest import TreeManifest, TreeRef
from bootseer.chunks.zstd import compress
from bootseer.errors import DataError, FullError, NotFoundError, UnavailableError
from bootseer.objects import Source, Store
from bootseer.objects.folder import FolderStore
from support import forked, lazy
from support.node import damage
from support.stores import FlakyStore


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = folder / "in" / "meta"
        self.data = folder / "in" / "data"
        self.meta.parent.mkdir()
        self.meta.write_bytes(lazy.content(9000, seed=5))
        self.data.write_bytes(lazy.content(50 * 4096))
        self.store = FolderStore(folder / "store")

    def publish(self) -> TreeRef:
        return publish(self.store, self.meta, self.data, block_size=4096)

    def keys(self) -> list[str]:
        return [info.key for info in self.store.list("")]

    def contents(self) -> dict[str, bytes]:
        return {info.key: self.store.get(info.key, most=1 << 30) for info in self.store.list("")}

    def manifest(self, ref: TreeRef) -> TreeManifest:
        return TreeManifest.decode(self.store.get(f"trees/{ref.digest}.json", most=1 << 30), ref.digest)

    def damage(self, key: str) -> None:
        path = self.store.root / key
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_published_and_localized(rig: Rig) -> None:
    ref = rig.publish()
    tree = localize(rig.store, ref.digest, rig.folder / "cache")
    assert tree.meta.read_bytes() == rig.meta.read_bytes()
    assert tree.map.size == 50 * 4096
    assert ref.size == 9000 + 50 * 4096
    assert ref.stored == sum(info.size for info in rig.store.list("") if not info.key.startswith("uses/"))
    assert sorted(path.name for path in rig.meta.parent.iterdir()) == ["data", "meta"], "no temporary files left"


def test_again_changes_nothing(rig: Rig) -> None:
    first = rig.publish()
    keys = rig.keys()
    assert rig.publish() == first
    assert rig.keys() == keys


def test_the_second_localize_needs_no_store(rig: Rig) -> None:
    ref = rig.publish()
    localize(rig.store, ref.digest, rig.folder / "cache")
    flaky = FlakyStore(rig.store)
    flaky.down = True
    localize(flaky, ref.digest, rig.folder / "cache")
    with pytest.raises(UnavailableError):
        localize(flaky, ref.digest, rig.folder / "other")


@pytest.mark.parametrize("name", ["manifest.json", "map", "meta"])
def test_a_damaged_local_copy_is_fetched_again(rig: Rig, name: str) -> None:
    ref = rig.publish()
    tree = localize(rig.store, ref.digest, rig.folder / "cache")
    path = tree.meta.parent / name
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"!")
    localize(rig.store, ref.digest, rig.folder / "cache")
    assert path.read_bytes() == raw


@pytest.mark.parametrize("how", ["flip", "truncate", "duplicate", "swap"])
@pytest.mark.parametrize("part", ["manifest", "map", "meta_stored"])
def test_a_damaged_object_is_refused_and_nothing_of_it_kept(rig: Rig, part: str, how: str) -> None:
    ref = rig.publish()
    key = f"trees/{ref.digest}.json" if part == "manifest" else getattr(rig.manifest(ref), part).key
    path = rig.store.root / key
    raw = path.read_bytes()
    damage(path, how, random.Random(how), unit=16)
    with pytest.raises(DataError, match=r"damaged|bytes, not"):
        localize(rig.store, ref.digest, rig.folder / "cache")
    path.write_bytes(raw)
    assert localize(rig.store, ref.digest, rig.folder / "cache").meta.read_bytes() == rig.meta.read_bytes()


class Mirrored(FlakyStore):
    """A store behind a mirror that has every object wrong, in the way ``how``."""

    def __init__(self, inner: Store, how: str) -> None:
        super().__init__(inner)
        self._how = how

    def open(self, key: str) -> Source:
        reader = self.inner.open(key)
        right = reader.read

        def wrong(offset: int, length: int) -> bytes:
            if self._how == "short":
                raise DataError("the mirror's copy is shorter")
            raw = bytearray(right(offset, length))
            raw[-1] ^= 1
            return bytes(raw)

        reader.read, reader.original = wrong, right  # type: ignore[method-assign]
        return reader


@pytest.mark.parametrize("how", ["flipped", "short"])
def test_small_parts_that_a_mirror_has_wrong_come_from_the_store_itself(
    rig: Rig, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ref = rig.publish()
    tree = localize(Mirrored(rig.store, how), ref.digest, rig.folder / "cache")
    assert tree.meta.read_bytes() == rig.meta.read_bytes()
    assert tree.map.encode() == localize(rig.store, ref.digest, rig.folder / "other").map.encode()
    assert caplog.text.count("was damaged at a mirror") == 2
    rig.damage(rig.manifest(ref).map.key)
    with pytest.raises(DataError, match=r"damaged|shorter"):
        localize(Mirrored(rig.store, how), ref.digest, rig.folder / "third")


def test_a_swapped_map_is_refused(rig: Rig) -> None:
    ref = rig.publish()
    rig.data.write_bytes(lazy.content(50 * 4096, seed=99))
    other = rig.publish()
    mine, theirs = rig.manifest(ref).map, rig.manifest(other).map
    (rig.store.root / mine.key).write_bytes((rig.store.root / theirs.key).read_bytes())
    with pytest.raises(DataError, match="damaged"):
        localize(rig.store, ref.digest, rig.folder / "cache")


@pytest.mark.parametrize("digest", ["", "abc", "../../etc/passwd", "G" * 64, "0" * 64])
def test_no_such_tree(rig: Rig, digest: str) -> None:
    with pytest.raises(NotFoundError):
        localize(rig.store, digest, rig.folder / "cache")


def manifest(**change: object) -> bytes:
    ref = {"digest": "0" * 64, "size": 1}
    fields = {"format": "bootseer-tree", "version": 2, "meta": ref, "meta_stored": ref, "map": ref, "data_size": 1}
    return json.dumps({**fields, **change}).encode()


def test_the_handmade_manifest_is_good() -> None:
    assert TreeManifest.decode(manifest(), hashing.hexdigest(manifest())).data_size == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1]",
        manifest(version=1),
        manifest(version=3),
        manifest(format="bootseer-trees"),
        manifest(meta={"digest": "..", "size": 1}),
        manifest(meta={"digest": "0" * 64, "size": 1 << 60}),
        manifest(data_stored={"digest": "0" * 64, "size": 1}),
        b" " * (1 << 17),
    ],
)
def test_a_hostile_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(DataError):
        TreeManifest.decode(text, hashing.hexdigest(text))


_PUBLISH = """
import sys
from pathlib import Path
from bootseer.blocks.publish.tree import publish
from bootseer.objects.folder import FolderStore
folder = Path(sys.argv[1])
publish(FolderStore(folder / "store"), folder / "in" / "meta", folder / "in" / "data", block_size=4096)
"""


@pytest.mark.parametrize(
    "fault", ["tree.publish.after-data", "tree.publish.before-manifest", "store.put.before-publish"]
)
def test_a_killed_publication_leaves_no_tree_and_can_be_repeated(rig: Rig, fault: str) -> None:
    environ = {**os.environ, "BOOTSEER_FAULTS": f"{fault}=kill"}
    assert forked.run("-c", _PUBLISH, rig.folder, env=environ).returncode == -9
    keys = rig.keys()
    assert not any(key.startswith("trees/") for key in keys)
    ref = rig.publish()
    localize(rig.store, ref.digest, rig.folder / "cache")


def test_a_full_store_is_one_clear_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "store.put.before-sync=enospc")
    with pytest.raises(FullError):
        rig.publish()
    assert rig.keys() == []
    assert sorted(path.name for path in rig.meta.parent.iterdir()) == ["data", "meta"]


@pytest.mark.parametrize("now", [10, 60])
def test_data_that_changes_meanwhile_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch, now: int) -> None:
    write = PackWriter.write

    def writing(self: PackWriter, data: bytes) -> None:
        write(self, data)
        os.truncate(rig.data, now << 20)

    rig.data.write_bytes(lazy.content(20 << 20))
    monkeypatch.setattr(PackWriter, "write", writing)
    with pytest.raises(DataError, match="changed while it was published"):
        rig.publish()
    assert list(rig.store.list("trees")) == []
    assert sorted(rig.meta.parent.iterdir()) == [rig.data, rig.meta]


def test_missing_input(rig: Rig) -> None:
    rig.data.unlink()
    with pytest.raises(NotFoundError):
        rig.publish()


@pytest.mark.parametrize("part", ["data", "meta_stored", "map", "manifest", "missing", "short"])
def test_what_is_there_but_damaged_is_replaced(rig: Rig, part: str, caplog: pytest.LogCaptureFixture) -> None:
    ref = rig.publish()
    good = rig.contents()
    data = localize(rig.store, ref.digest, rig.folder / "cache").map.packs[0].key
    if part == "manifest":
        rig.damage(f"trees/{ref.digest}.json")
    elif part == "data":
        rig.damage(data)
    elif part == "missing":
        rig.store.delete(data)
    elif part == "short":
        rig.store.put(data, good[data][:-1], overwrite=True)
    else:
        rig.damage(getattr(rig.manifest(ref), part).key)
    assert publish(rig.store, rig.meta, rig.data, block_size=4096) == ref
    assert rig.contents() == good
    assert caplog.text.count("replacing") == (part != "missing")


@pytest.mark.parametrize(("part", "size"), [("meta", (2 << 30) + 1), ("meta_stored", 20_000), ("map", (1 << 30) + 1)])
def test_sizes_are_checked_before_anything_is_made_of_them(rig: Rig, part: str, size: int) -> None:
    manifest = rig.manifest(rig.publish())
    assert manifest.meta.size == 9000
    lie = msgspec.structs.replace(manifest, **{part: ObjectRef("0" * 64, size)}).encode()
    with pytest.raises(DataError, match="absurd sizes"):
        TreeManifest.decode(lie, hashing.hexdigest(lie))


def test_meta_that_unpacks_to_a_thousand_times_what_is_stored_is_refused(rig: Rig) -> None:
    """A few bytes in a store would fill the memory and the cache of who looks at them."""
    manifest = rig.manifest(rig.publish())
    for size, stored, absurd in ((256 << 20, 9000, False), (257 << 20, 9000, True), (2 << 30, 30 << 20, False)):
        lie = msgspec.structs.replace(
            manifest, meta=ObjectRef("0" * 64, size), meta_stored=ObjectRef("0" * 64, stored)
        ).encode()
        with pytest.raises(DataError, match="absurd sizes") if absurd else contextlib.nullcontext():
            TreeManifest.decode(lie, hashing.hexdigest(lie))


@pytest.mark.parametrize("size", [-1, (1 << 50) + 1])
def test_absurd_data_is_refused(rig: Rig, size: int) -> None:
    lie = msgspec.structs.replace(rig.manifest(rig.publish()), data_size=size).encode()
    with pytest.raises(DataError, match="absurd sizes"):
        TreeManifest.decode(lie, hashing.hexdigest(lie))


def test_meta_that_is_something_else_takes_no_memory_and_leaves_nothing(rig: Rig) -> None:
    plain = os.urandom(6 << 20) + bytes(506 << 20)
    bomb = compress(plain, 3)
    stored = ObjectRef(hashing.hexdigest(bomb), len(bomb))
    rig.store.put(stored.key, bomb)
    meta = ObjectRef("0" * 64, len(plain))
    del plain
    lie = msgspec.structs.replace(rig.manifest(rig.publish()), meta=meta, meta_stored=stored).encode()
    digest = hashing.hexdigest(lie)
    rig.store.put(f"trees/{digest}.json", lie)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="its hash differs"):
            localize(rig.store, digest, rig.folder / "cache")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert {path.name for path in (rig.folder / "cache" / "trees" / digest).iterdir()} <= {
        "manifest.json",
        "map",
        "lock",
    }


@pytest.mark.parametrize("limit", ["MAX_META", "MAX_ENCODED"])
def test_a_tree_that_no_reader_accepts_is_not_published(rig: Rig, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"bootseer.blocks.publish.tree.{limit}", 100)
    with pytest.raises(DataError, match="too large to be mounted"):
        rig.publish()
    assert list(rig.store.list("trees")) == []
