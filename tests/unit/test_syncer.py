"""When what came is persisted, and that it lets the prefetch go first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.chunks import cachefile, keeping
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.chunklist import ChunkList
from support.waits import until


@contextmanager
def syncing(sync: Callable[[], None], monkeypatch: pytest.MonkeyPatch, rest: float = 0.0) -> Iterator[None]:
    """The thread at work."""
    monkeypatch.setattr(keeping, "_SYNC_SECONDS", 0.01)
    stop = threading.Event()
    thread = threading.Thread(target=keeping.keep_synced, args=(sync, stop), kwargs={"rest": rest})
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_it_rests_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[float] = []
    with syncing(lambda: synced.append(time.monotonic()), monkeypatch, rest=0.4):
        time.sleep(0.2)
        assert not synced
        until(lambda: len(synced) > 1)


def test_trouble_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[bytes] = []
    with CacheFile.open(tmp_path / "cache", ChunkList(bytes(32), 4096, 4096, [0]), bytes(32)) as cache:
        cache.write(0, bytes(4096))
        monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.bitmap=enospc")

        def persist() -> None:
            cache.persist()
            tried.append(cache.durable)

        with syncing(persist, monkeypatch):
            until(lambda: len(tried) > 5)
            (told,) = [record.message for record in caplog.records if record.name == cachefile.__name__]
            assert told.startswith(f"cannot persist the bitmap of block cache {cache.folder}: [Errno 28] No space left")
            assert cache.durable == b"\0"
            monkeypatch.delenv("BOOTSEER_FAULTS")
            until(lambda: cache.durable == b"\1")
