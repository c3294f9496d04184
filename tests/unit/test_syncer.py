"""What came is persisted, again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.chunks import cachefile, keeping
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.chunklist import ChunkList
from support.waits import until


@contextmanager
def syncing(sync: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The thread at work."""
    monkeypatch.setattr(keeping, "_SYNC_SECONDS", 0.01)
    stop = threading.Event()
    thread = threading.Thread(target=keeping.keep_synced, args=(sync, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


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
