"""When a fetcher persists what came, and that it lets the prefetch go first."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bootseer.blocks.serving import fetcher_process
from support.waits import until


class Cache:
    """Counts its syncs; what ``fails`` holds is raised."""

    def __init__(self) -> None:
        self.folder = "cache"
        self.tried = self.synced = 0
        self.fails: OSError | None = None

    def sync(self) -> None:
        self.tried += 1
        if self.fails is not None:
            raise self.fails
        self.synced += 1


@contextmanager
def syncing(cache: Cache, monkeypatch: pytest.MonkeyPatch, rest: float = 0.0) -> Iterator[None]:
    """The thread at work."""
    monkeypatch.setattr(fetcher_process, "_SYNC_SECONDS", 0.01)
    monkeypatch.setattr(fetcher_process, "_REST_SECONDS", rest)
    stop = threading.Event()
    args: Any = (cache, time.monotonic(), stop)
    thread = threading.Thread(target=fetcher_process.keep_synced, args=args)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_it_rests_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    with syncing(cache, monkeypatch, rest=0.4):
        time.sleep(0.2)
        assert cache.synced == 0
        until(lambda: cache.synced > 0)


def test_trouble_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache()
    cache.fails = OSError(errno.ENOSPC, "No space left on device")
    with syncing(cache, monkeypatch):
        until(lambda: cache.tried > 5)
        assert [record.message for record in caplog.records if record.name == fetcher_process.__name__] == [
            "cannot persist the bitmap of block cache cache: [Errno 28] No space left on device"
        ]
        cache.fails = None
        until(lambda: cache.synced > 0)
