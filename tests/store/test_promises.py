"""What every store promises, held against each kind of real one."""

from __future__ import annotations

import os
import time
import tracemalloc
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bootseer.backends.fsspec import FsspecBackend
from bootseer.blocks.publish.tree import publish
from bootseer.chunks.manifest import tree_key
from bootseer.errors import ConfigError, DataError, NotFoundError, UnsupportedError
from bootseer.objects import ObjectInfo, Store, open_store, uses, withdrawn
from bootseer.objects.folder import FolderStore
from bootseer.objects.on_backend import ObjectStore
from bootseer.upkeep import collection
from support import forked, hadoop
from support.objectserver import BUCKET, ObjectServer
from support.waits import together


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectServer]:
    with ObjectServer() as running:
        yield running


@pytest.fixture(
    params=[
        "folder",
        "memory",
        "s3",
        pytest.param("registry", marks=pytest.mark.registry),
        pytest.param("hdfs", marks=pytest.mark.hdfs),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty one."""
    name = uuid.uuid4().hex
    if request.param == "hdfs":
        return open_store(f"{hadoop.shared().url}/{name}")
    if request.param == "registry":
        return open_store(f"registry://{request.getfixturevalue('registry').address}/r{name}")
    if request.param == "s3":
        url = f"s3://{BUCKET}/{name}"
        return ObjectStore(url, FsspecBackend(url, request.getfixturevalue("objects").options))
    return open_store(f"memory://{name}" if request.param == "memory" else str(tmp_path / name))


def test_put_then_read_whole_and_in_ranges(store: Store, tmp_path: Path) -> None:
    data = os.urandom(9 << 20)
    (tmp_path / "big").write_bytes(data)
    assert store.put("a/b", b"hello")
    assert store.put("a/c", tmp_path / "big")
    assert store.put("a/empty", b"")
    assert store.get("a/b", most=1 << 30) == b"hello"
    assert store.get("a/c", most=1 << 30) == data
    assert store.get("a/empty", most=1 << 30) == b""
    with store.open("a/c") as reader:
        assert reader.size == len(data)
        assert reader.read(5_000_000, 1000) == data[5_000_000:5_001_000]
        assert reader.read(len(data), 0) == b""
        with pytest.raises(DataError, match="ends at"):
            reader.read(len(data) - 1, 2)
    found = store.stat("a/c")
    assert found == ObjectInfo("a/c", len(data), found.mtime)
    assert not store.dated or abs(found.mtime - time.time()) < 60


def test_one_reader_serves_many_threads(store: Store) -> None:
    data = os.urandom(1 << 20)
    store.put("k", data)
    with store.open("k") as reader:

        def read(seed: int) -> None:
            for step in range(20):
                offset = (seed * 7919 + step * 104729) % (len(data) - 5000)
                assert reader.read(offset, 5000) == data[offset : offset + 5000]

        together(read, range(8))


def test_the_first_publication_wins(store: Store) -> None:
    assert store.put("k", b"one")
    assert not store.put("k", b"two")
    assert store.get("k", most=1 << 30) == b"one"
    assert store.put("k", b"three", overwrite=True)
    assert store.get("k", most=1 << 30) == b"three"
    won = together(lambda i: store.put("race", b"%d" % i * 1000), range(6))
    assert won.count(True) == 1
    assert store.get("race", most=1 << 30) == b"%d" % won.index(True) * 1000
    assert [info.key for info in store.list("")] == ["k", "race"]


def test_a_store_that_is_not_there_is_told_from_an_empty_one(store: Store) -> None:
    with pytest.raises(NotFoundError, match=r"there is no store .*check its name"):
        store.check_there()
    if store.dated:
        with pytest.raises(NotFoundError, match="there is no store"):
            collection.collect(store)
    assert list(store.list("")) == []  # and it was not made
    with pytest.raises(NotFoundError, match="there is no store"):
        store.check_there()
    store.put("a/b", b"x")
    store.check_there()
    if isinstance(store, FolderStore) or store.url.startswith("hdfs:"):
        with pytest.raises(NotFoundError, match="there is no store"):
            open_store(f"{store.url}/a/b").check_there()
        store.delete("a/b")
        store.check_there()


def test_missing_keys_and_bad_ones(store: Store) -> None:
    calls = (partial(store.get, most=9), store.open, store.stat)
    for call in calls:
        with pytest.raises(NotFoundError, match="no object nothing/here"):
            call("nothing/here")
    assert list(store.list("nothing")) == []
    store.delete("nothing/here")
    store.put("a/b", b"x")
    for call in calls:
        for key in ("a", "a/b/c"):
            with pytest.raises(NotFoundError):
                call(key)
    for key in ("", "/a", "a/../b", "../x", "a//b", ".", "a/\0"):
        with pytest.raises(ConfigError):
            store.put(key, b"")
        with pytest.raises(ConfigError):
            store.get(key, most=1 << 30)
    store.delete("a/b")
    assert not store.exists("a/b")
    assert store.put("a/b", b"x")
    assert store.get("a/b", most=1 << 30) == b"x"


def test_an_object_that_is_larger_than_its_kind_may_be_is_not_read(store: Store) -> None:
    """Its size is the word of who made it, and of holes it costs nothing; whoever reads it would pay with memory."""
    store.put("k", b"12345")
    assert store.get("k", most=5) == b"12345"
    with pytest.raises(DataError, match=r"k in store .* has 5 bytes, more than the 4"):
        store.get("k", most=4)
    large = 64 << 20
    if isinstance(store, FolderStore):
        os.truncate(store.root / "k", 1 << 40)
    else:
        store.put("k", b"\0" * large, overwrite=True)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than the 100"):
            store.get("k", most=100)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_replacement_sees_that_the_object_is_another_one(store: Store) -> None:
    """Also when it is larger: then none of it is read."""
    store.put("k", b"one")
    assert store.replace("k", b"two", old=b"one")
    store.put("k", b"x" * 1000, overwrite=True)
    for old in (b"two", b"one more", b"y" * 1000):
        assert not store.replace("k", b"three", old=old)
    assert store.get("k", most=1000) == b"x" * 1000


def test_list_is_in_key_order_and_deep(store: Store) -> None:
    deep = "/".join(f"Level {number}" for number in range(12))
    for key in ("b/2", "b/1", "a", "b/c/3", deep):
        store.put(key, key.encode())
    assert [info.key for info in store.list("b")] == ["b/1", "b/2", "b/c/3"]
    assert [info.key for info in store.list("/".join(deep.split("/")[:9]))] == [deep]
    sizes = {info.key: info.size for info in store.list("")}
    assert sizes == {"a": 1, "b/1": 3, "b/2": 3, "b/c/3": 5, deep: len(deep)}
    store.delete("b/1")
    assert [info.key for info in store.list("b")] == ["b/2", "b/c/3"]


def test_a_killed_publication_is_unseen(store: Store) -> None:
    if store.url.partition("://")[0] in ("memory", "s3"):
        pytest.skip("its publication is one step")
    code = f"from bootseer.objects import open_store; open_store({store.url!r}).put('k', b'x' * 3000000)"
    point = "registry.publish.before-tag" if store.url.startswith("registry") else "store.put.before-publish"
    environ = {**os.environ, "BOOTSEER_FAULTS": f"{point}=kill"}
    assert forked.run("-c", code, env=environ).returncode == -9
    assert not store.exists("k")
    assert list(store.list("")) == []
    assert store.put("k", b"y")
    assert store.get("k", most=1 << 30) == b"y"


def test_what_is_withdrawn_is_read_until_it_is_put_back_or_deleted(store: Store) -> None:
    if not store.dated:
        pytest.skip("nothing is collected in a registry")
    small, large = (f"blobs/{name[:2]}/{name}" for name in ("a" * 64, "b" * 64))
    written = {small: b"small", large: os.urandom(9 << 20)}
    for key, data in written.items():
        store.put(key, data)
    store.withdraw([*written, f"blobs/cc/{'c' * 64}"], "0" * 16)
    assert not store.exists(small)
    assert {info.key for info in store.list("")} == {withdrawn.place_of("0" * 16, key) for key in written}
    for key, data in written.items():
        assert store.get(key, most=1 << 30) == data
    assert store.put_back(large)
    assert store.stat(large).size == 9 << 20
    store.delete(withdrawn.place_of("0" * 16, small))
    assert not store.put_back(small)
    with pytest.raises(NotFoundError):
        store.get(small, most=100)
    store.withdraw([large], "1" * 16)
    assert store.get(large, most=1 << 30) == written[large]


def test_a_collection_on_each_kind_of_store(store: Store, tmp_path: Path) -> None:
    if not store.dated:
        with pytest.raises(UnsupportedError):
            collection.collect(store)
        return
    (tmp_path / "meta").write_bytes(b"meta")
    (tmp_path / "data").write_bytes(os.urandom(1 << 20))
    kept = publish(store, tmp_path / "meta", tmp_path / "data")
    (tmp_path / "data").write_bytes(os.urandom(1 << 20))
    gone = publish(store, tmp_path / "meta", tmp_path / "data")
    store.delete(f"{uses.PUBLISHED}/{gone.digest}")
    store.delete(uses.key_of(gone.digest))
    for _ in range(3):
        time.sleep(1.1)
        collection.collect(store, grace=1.0, settle=0.0)
    assert {info.key for info in store.list("trees")} == {tree_key(kept.digest)}
    assert not [*store.list(withdrawn.FOLDER)]
    assert len([*store.list("blobs")]) == kept.packs + 2
