"""The doubles that other tests and benchmarks rely on do what they say."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bootseer.blocks.fetch.source import StoreSource
from bootseer.errors import DataError, UnavailableError
from bootseer.objects.folder import FolderStore
from support.stores import FlakyStore, RateLimitedStore
from support.waits import together


@pytest.fixture
def inner(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path / "store")
    store.put("a/b", bytes(range(256)) * 4096)
    return store


def test_flaky_store(inner: FolderStore) -> None:
    store = FlakyStore(inner)
    with store.open("a/b") as reader:
        assert reader.size == 1 << 20
        store.fail_next(1)
        with pytest.raises(UnavailableError):
            reader.read(0, 4)
        store.flip("a/b", 2, times=1)
        assert reader.read(0, 4) == b"\0\1\3\3"
        assert reader.read(0, 4) == b"\0\1\2\3"
        store.down = True
        with pytest.raises(UnavailableError):
            reader.read(0, 4)
    with pytest.raises(UnavailableError):
        store.get("a/b", most=1 << 30)
    assert store.reads == [("a/b", 0, 4)] * 4


def test_the_rate_holds_over_threads(inner: FolderStore) -> None:
    store = RateLimitedStore(inner, rate=10 << 20)
    began = time.monotonic()
    with store.open("a/b") as reader:
        together(lambda _: reader.read(0, 1 << 20), range(3))
    assert 0.28 < time.monotonic() - began < 0.6
    assert (store.bytes, store.requests) == (3 << 20, 3)


def test_a_small_request_gets_its_share(inner: FolderStore) -> None:
    store = RateLimitedStore(inner, rate=4 << 20)
    with store.open("a/b") as reader:
        large = threading.Thread(target=reader.read, args=(0, 1 << 20))
        large.start()
        time.sleep(0.05)
        began = time.monotonic()
        reader.read(0, 4096)
        assert time.monotonic() - began < 0.1
        large.join()


def test_latency(inner: FolderStore) -> None:
    store = RateLimitedStore(inner, rate=1 << 40, latency=0.1)
    began = time.monotonic()
    store.get("a/b", most=1 << 30)
    assert 0.1 <= time.monotonic() - began < 0.3


def test_a_source_opens_late_and_again(inner: FolderStore) -> None:
    store = FlakyStore(inner)
    store.down = True
    source = StoreSource(store, "a/b")
    with pytest.raises(UnavailableError):
        source.read(0, 0, 3)
    store.down = False
    assert source.read(0, 0, 3) == b"\0\1\2"
    with pytest.raises(DataError):
        source.read(0, (1 << 20) - 1, 2)
    assert source.read(0, 1, 2) == b"\1\2"
    source.close()
    source.close()
    with pytest.raises(UnavailableError):
        source.read(0, 0, 1)
