"""When the sync thread persists, and that it lets the prefetch go first."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.blocks.serving import syncer
from bootseer.blocks.serving.shared_memory import Count
from support.waits import until


class Cache:
    """Counts its syncs; what ``fails`` holds is raised."""

    def __init__(self) -> None:
        self.folder = "cache"
        self.broken = self.durable = False
        self.synced = 0
        self.fails: OSError | None = None

    def sync(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.synced += 1


@contextmanager
def syncing(cache: Cache, monkeypatch: pytest.MonkeyPatch, rest: float = 0.0) -> Iterator[Any]:
    """The thread at work; gives its counts and how often it has looked."""
    monkeypatch.setattr(syncer, "_SYNC_SECONDS", 0.01)
    monkeypatch.setattr(syncer, "_REST_SECONDS", rest)
    seen = SimpleNamespace(counts=memoryview(bytearray(8 << 10)).cast("q"), looks=0)
    seen.counts[Count.BEGAN_NS] = time.monotonic_ns()

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            seen.looks += 1
            return super().wait(timeout)

    stop = Stop()
    args: Any = (cache, seen.counts, stop)
    thread = threading.Thread(target=syncer.keep_synced, args=args)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def test_it_rests_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    with syncing(cache, monkeypatch, rest=0.4):
        time.sleep(0.2)
        assert cache.synced == 0
        until(lambda: cache.synced > 0)


def test_what_is_durable_is_not_synced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    cache.durable = True
    with syncing(cache, monkeypatch) as seen:
        until(lambda: seen.looks > 5)
    assert cache.synced == 0


def test_trouble_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache()
    cache.fails = OSError(errno.ENOSPC, "No space left on device")
    with syncing(cache, monkeypatch) as seen:
        until(lambda: seen.looks > 5)
        assert [record.message for record in caplog.records if record.name == syncer.__name__] == [
            "cannot persist the bitmap of block cache cache: [Errno 28] No space left on device"
        ]
        cache.fails = None
        until(lambda: cache.synced > 0)
        assert not seen.counts[Count.BROKEN]


def test_a_broken_cache_is_counted_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    cache.broken = True
    with syncing(cache, monkeypatch) as seen:
        until(lambda: seen.counts[Count.BROKEN] == 1)
        until(lambda: seen.looks > 5)
    assert cache.synced == 0
