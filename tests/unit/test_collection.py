"""The collection of a store: what is needed stays, what is not goes, in two steps, beside publications and mounts."""

from __future__ import annotations

import os
import random
import subprocess
import time

import msgspec
import pytest
import zstandard

from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.manifest import TreeManifest, tree_key
from bootseer.errors import DataError, NotFoundError, NotWritableError
from bootseer.image import record
from bootseer.objects import Store, open_store, uses, withdrawn
from bootseer.upkeep import account, collection
from support.records import record_of
from support.steppedstore import SteppedStore

BLOCK = 4096
DAY = 86_400.0


def publish(store: Store, folder, content: bytes, image: str) -> str:
    """A tree of blocks, and the record of an image that has it."""
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    with TreeWriter(store, folder, block_size=BLOCK) as out:
        for at in range(0, len(content), BLOCK):
            out.packs.next_pack()  # each block is an object of its own, which trees have in common
            out.packs.write(content[at : at + BLOCK])
        made = out.seal(b"meta of " + content[:8])
    record.save(store, record_of(image, made.digest), overwrite=True)
    return made.digest


def remove(store: Store, image: str) -> None:
    store.delete(record.key_of(f"sha256:{image * 64}", "linux/amd64"))


def lost(store: SteppedStore, tree: str) -> list[str]:
    """What is missing of a tree."""
    if tree_key(tree) not in store.place.files:
        return [tree_key(tree)]
    manifest = TreeManifest.decode(store.place.files[tree_key(tree)][0], tree)
    keys = [manifest.map.key, manifest.meta_stored.key]
    if manifest.map.key in store.place.files:
        keys += [pack.key for pack in BlockMap.decode(store.place.files[manifest.map.key][0]).packs]
    return [key for key in keys if key not in store.place.files]


def content(*blocks: int) -> bytes:
    return b"".join(random.Random(number).randbytes(BLOCK) for number in blocks)


def collect(store: SteppedStore) -> collection.Collected:
    return collection.collect(store, settle=0.0)


def test_what_nothing_needs_goes_after_the_grace_time_and_what_is_shared_stays(tmp_path):
    store = SteppedStore()
    one, two = publish(store, tmp_path / "w", content(1, 2), "a"), publish(store, tmp_path / "w", content(2, 3), "b")
    remove(store, "a")
    store.place.now += 10 * DAY
    before = dict(store.place.files)
    first = collect(store)
    assert not first.removed
    assert first.condemned.objects == 4  # manifest, metadata, map and the pack of block 1
    assert before.items() <= store.place.files.items()
    assert not collect(store).removed  # the grace time is not over
    store.place.now += 4 * DAY
    assert collection.collect(store, dry_run=True).removed.keys() <= {"trees", "blobs"}
    done = collect(store)
    assert {kind: row.objects for kind, row in done.removed.items()} == {"blobs": 3, "trees": 1}
    assert lost(store, one)
    assert not lost(store, two)
    store.place.now += 4 * DAY
    assert collect(store).removed.keys() <= {"uses"}


def test_a_note_of_use_keeps_a_tree_for_its_life_and_one_from_the_future_does_not(tmp_path):
    store = SteppedStore()
    tree = publish(store, tmp_path / "w", content(1), "a")
    remove(store, "a")
    for _ in range(10):
        store.place.now += DAY
        uses.note(store, tree)
        collect(store)
        assert not lost(store, tree)
    (key,) = (key for key in store.place.files if key.startswith("uses/"))
    store.place.files[key] = store.place.files[key][0], store.place.now + 1000 * DAY
    for _ in range(3):
        store.place.now += 4 * DAY
        collect(store)
    assert lost(store, tree)


def test_a_tree_published_by_itself_stays(tmp_path):
    store = SteppedStore()
    tree = publish(store, tmp_path / "w", content(1), "a")
    store.put(f"{uses.PUBLISHED}/{tree}", b"")
    remove(store, "a")
    for _ in range(4):
        store.place.now += 40 * DAY
        collect(store)
    assert not lost(store, tree)


def test_a_record_that_is_not_understood_stops_the_collection_and_a_hostile_list_condemns_nothing(tmp_path, caplog):
    store = SteppedStore()
    tree = publish(store, tmp_path / "w", content(1), "a")
    raw = msgspec.json.encode(dict.fromkeys(store.place.files, -1e9))
    store.put("collection/condemned", zstandard.ZstdCompressor().compress(raw))
    store.place.now += 10 * DAY
    assert not collect(store).removed.keys() - {"uses"}
    assert not lost(store, tree)
    store.put(f"images/{'b' * 64}-linux-amd64.json", b"{}")
    with pytest.raises(DataError):
        collect(store)
    remove(store, "b")
    for rubbish in (b"rubbish", zstandard.ZstdCompressor().compress(b'{"a":0}')):  # many short keys took 7 GB
        store.put("collection/condemned", rubbish, overwrite=True)
        caplog.clear()
        assert not collect(store).removed
        assert "is written anew" in caplog.text


def test_notes_and_withdrawn_objects_of_a_neighbour_stop_nothing_and_keep_nothing_for_good(tmp_path):
    store = SteppedStore()
    tree, gone = (publish(store, tmp_path / "w", content(number), "ab"[number]) for number in (0, 1))
    remove(store, "b")
    broken = TreeManifest.decode(store.get(tree_key(gone), most=1 << 20), gone)
    broken = msgspec.structs.replace(broken, map=ObjectRef("f" * 64, 5)).encode()
    digest = hashing.hexdigest(broken)
    store.put(tree_key(digest), broken)
    for number in range(8):
        store.put(f"uses/{digest}.{'0' * 16}", b"", overwrite=True)
        store.put(f"uses/{'e' * 64}.{number:016}", b"")
        for name in ("images,evil.json", "..,..,etc,passwd", f"blobs,ff,{'f' * 64}", "x"):
            store.put(f"{withdrawn.FOLDER}/{'0' * 16}/{name}", b"forged", overwrite=True)
        collect(store)
        store.place.now += 2 * DAY
    assert not lost(store, tree)
    assert lost(store, gone)
    assert tree_key(digest) not in store.place.files
    assert not [key for key in store.place.files if "evil" in key and key.startswith("images/")]
    assert f"blobs/ff/{'f' * 64}" not in store.place.files
    assert len([key for key in store.place.files if key.startswith("uses/")]) < 8


def test_what_was_withdrawn_by_a_killed_collection_is_read_and_comes_back(tmp_path):
    store = SteppedStore()
    tree = publish(store, tmp_path / "w", content(1, 2), "a")
    keys = [key for key in store.place.files if withdrawn.may_go(key)]
    store.withdraw(keys, "0" * 16)
    assert not store.place.files.keys() & set(keys)
    assert not lost_to_readers(store, keys)
    collect(store)
    assert not lost(store, tree)
    assert not [key for key in store.place.files if key.startswith(withdrawn.FOLDER)]


def lost_to_readers(store: Store, keys: list[str]) -> list[str]:
    return [key for key in keys if not store.open(key).size]


def test_strange_objects_stay(tmp_path):
    store = SteppedStore()
    for key in ("mine/file", "profiles/what", "images.txt", "env/other/x", "blobs/x", "trees/x"):
        store.put(key, b"x")
    for _ in range(3):
        store.place.now += 10 * DAY
        collect(store)
    assert {"mine/file", "profiles/what", "images.txt", "env/other/x", "blobs/x", "trees/x"} <= store.place.files.keys()


def test_links_and_pipes_in_a_folder_lead_a_collection_nowhere(tmp_path):
    store, outside = open_store(tmp_path / "store"), tmp_path / "outside"
    tree = publish(store, tmp_path / "w", content(1, 2), "a")
    outside.mkdir()
    (outside / ("e" * 64 + "." + "0" * 16)).write_bytes(b"a file of somebody")
    (tmp_path / "store/leases").symlink_to(outside)
    (tmp_path / "store/blobs/ee").mkdir()
    (tmp_path / f"store/blobs/ee/{'e' * 64}").symlink_to(outside / ("e" * 64 + "." + "0" * 16))
    (tmp_path / f"store/blobs/ee/ee{'0' * 62}").symlink_to(outside)
    os.mkfifo(tmp_path / f"store/trees/{'e' * 64}.json")
    store.put(f"uses/{'e' * 64}.{'0' * 16}", b"")
    (tmp_path / "store/collection/withdrawn").mkdir(parents=True)
    (tmp_path / f"store/collection/withdrawn/{'0' * 16}").symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    for _ in range(3):
        for path in [*(tmp_path / "store").rglob("*"), *outside.iterdir()]:
            os.utime(path, (1e9, 1e9), follow_symlinks=False)
        if store.exists("collection/condemned"):
            since = zstandard.ZstdDecompressor().decompress(store.get("collection/condemned", most=1 << 20))
            raw = msgspec.json.encode(dict.fromkeys(msgspec.json.decode(since), 1e9))
            store.put("collection/condemned", zstandard.ZstdCompressor().compress(raw), overwrite=True)
        collect(store)
    assert {path: path.read_bytes() for path in outside.iterdir()} == before
    assert not (tmp_path / f"store/blobs/ee/{'e' * 64}").is_symlink()
    assert not (tmp_path / f"store/trees/{'e' * 64}.json").exists()
    assert store.exists(tree_key(tree))


def test_du_says_what_goes_with_each_image(tmp_path):
    store = open_store(tmp_path / "store")
    publish(store, tmp_path / "w", content(1, 2), "a")
    publish(store, tmp_path / "w", content(2, 3), "b")
    found = account.take(store)
    assert {one.name for one in found.takers} == {"localhost/a:1", "localhost/b:1"}
    assert all(BLOCK < one.alone < one.all for one in found.takers)
    assert found.unneeded == 0
    assert found.kinds["trees"].objects == 2


def test_du_of_20_000_objects(tmp_path):
    for number in range(20_000):
        path = tmp_path / f"blobs/{number % 256:02x}"
        if number < 256:
            path.mkdir(parents=True)
        os.close(os.open(path / f"{number:064x}", os.O_CREAT | os.O_WRONLY))
    began = time.process_time()
    assert account.take(open_store(tmp_path)).kinds["blobs"].objects == 20_000
    assert time.process_time() - began < 2.0


def test_only_what_is_ours_is_tidied(tmp_path):
    """Old notes, leases and indexes go; what others keep in these folders stays."""
    store = open_store(str(tmp_path / "store"))
    ours = [f"uses/{'a' * 64}.{'b' * 16}", "leases/convert/x/3", f"env/index/{'a' * 64}/{7:012d}-{'b' * 64}-{'c' * 64}"]
    theirs = ["uses/README.txt", "leases/README.txt", "leases/convert/x/007", "env/index/notes.txt", "env/index/a/b"]
    store.put("blobs/aa/" + "a" * 64, b"x")
    for key in (*ours, *theirs):
        store.put(key, b"x")
        os.utime(tmp_path / "store" / key, (time.time() - 90 * DAY,) * 2)
    collection.collect(store, settle=0)
    since = zstandard.ZstdDecompressor().decompress(store.get("collection/condemned", most=1 << 20))
    earlier = {key: at - 9 * DAY for key, at in msgspec.json.decode(since).items()}
    store.put("collection/condemned", zstandard.ZstdCompressor().compress(msgspec.json.encode(earlier)), overwrite=True)
    collection.collect(store, settle=0)
    left = {info.key for info in store.list("")}
    assert set(theirs) <= left
    assert not set(ours) & left


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    for call in (collection.collect, lambda store: collection.unused(store, 1.0)):
        with pytest.raises(NotFoundError, match="there is no store"):
            call(open_store(str(tmp_path / "mistyped")))
    assert not (tmp_path / "mistyped").exists()


def test_folders_in_folders_stop_no_look(tmp_path):
    deep = tmp_path / "store" / "uses"
    deep.mkdir(parents=True)
    here = os.open(deep, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    store = open_store(str(tmp_path / "store"))
    store.put("blobs/aa/" + "a" * 64, b"x")
    assert account.take(store).kinds["blobs"].objects == 1
    collection.collect(store, settle=0)
    subprocess.run(["rm", "-rf", deep], check=True)  # Python's own removal gives up


def test_what_is_needed_comes_back_before_anything_is_refused(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "store"))
    tree = publish(store, tmp_path / "w", random.Random(1).randbytes(4 * BLOCK), "a")
    other = "blobs/00/" + "0" * 64
    store.put(other, b"x")
    keys = [info.key for info in store.list("") if withdrawn.may_go(info.key)]
    store.withdraw(keys, "0" * 16)

    def refuse(key):
        raise NotWritableError(f"not {key}")

    monkeypatch.setattr(store, "delete", refuse)
    with pytest.raises(NotWritableError):
        collection.collect(store, settle=0)
    assert all(store.exists(key) for key in keys if key != other), tree
