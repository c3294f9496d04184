"""What every store promises, held against real HDFS."""

import os
import subprocess
import sys
import threading
import uuid

import pytest

from bootseer.errors import ConfigError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.store import ObjectInfo, Store, open_store
from bootseer.testing import hadoop

pytestmark = pytest.mark.hdfs


@pytest.fixture
def store() -> Store:
    return open_store(f"{hadoop.shared().url}/{uuid.uuid4().hex}")


def test_put_then_read_whole_and_in_ranges(store, tmp_path):
    data = os.urandom(9 << 20)
    (tmp_path / "big").write_bytes(data)
    assert store.put("a/b", b"hello")
    assert store.put("a/c", tmp_path / "big")
    assert store.put("a/empty", b"")
    assert store.get("a/b") == b"hello"
    assert store.get("a/c") == data
    assert store.get("a/empty") == b""
    with store.open("a/c") as reader:
        assert reader.size == len(data)
        assert reader.read(5_000_000, 1000) == data[5_000_000:5_001_000]
        with pytest.raises(DataError, match="ends at"):
            reader.read(len(data) - 1, 2)
    assert store.stat("a/c") == ObjectInfo("a/c", len(data))


def test_one_reader_serves_many_threads(store):
    data = os.urandom(4 << 20)
    store.put("k", data)
    wrong = []
    with store.open("k") as reader:

        def read(seed: int) -> None:
            for step in range(20):
                offset = (seed * 7919 + step * 104729) % (len(data) - 5000)
                if reader.read(offset, 5000) != data[offset : offset + 5000]:
                    wrong.append(offset)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_the_first_publication_wins(store):
    assert store.put("k", b"one")
    assert not store.put("k", b"two")
    assert store.get("k") == b"one"
    assert store.put("k", b"three", overwrite=True)
    assert store.get("k") == b"three"
    outcomes: list[bool] = []
    threads = [threading.Thread(target=lambda i=i: outcomes.append(store.put("race", b"%d" % i))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(True) == 1
    assert [info.key for info in store.list("")] == ["k", "race"]


def test_missing_keys_and_names_in_the_way(store):
    for call in (store.get, store.open, store.stat):
        with pytest.raises(NotFoundError, match="no object nothing/here"):
            call("nothing/here")
    assert list(store.list("nothing")) == []
    store.delete("nothing/here")
    store.put("a/b", b"x")
    with pytest.raises(NotFoundError):
        store.stat("a")
    with pytest.raises(NotWritableError):
        store.put("a/b/c", b"x")
    with pytest.raises(NotWritableError):
        store.put("a", b"x", overwrite=True)
    with pytest.raises(ConfigError):
        store.get("../x")
    store.delete("a/b")
    assert not store.exists("a/b")


def test_a_failed_or_killed_publication_is_unseen(store, monkeypatch):
    monkeypatch.setenv("BOOTSEER_FAULTS", "store.put.before-publish=eio")
    with pytest.raises(Exception, match="cannot write k"):
        store.put("k", b"x")
    monkeypatch.delenv("BOOTSEER_FAULTS")
    code = f"from bootseer.store import open_store; open_store({store.url!r}).put('k', b'x' * 3000000)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BOOTSEER_FAULTS": "store.put.before-publish=kill"},
        timeout=60,
    )
    assert done.returncode == -9
    assert not store.exists("k")
    assert list(store.list("")) == []
    assert store.put("k", b"y")


def test_no_server_is_one_line_at_once():
    with pytest.raises(UnavailableError, match="Connection refused"):
        open_store("hdfs://127.0.0.1:9/x").get("k")
    with pytest.raises(ConfigError, match="not an HDFS URL"):
        open_store("hdfs:///x")
