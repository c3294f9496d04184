"""Reads through a lazy file equal reads of the data, or fail; never anything else."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.lazyfile import LazyFile
from bootseer.blocks.source import StoreSource
from bootseer.blocks.trace import UNIT, Recorder
from bootseer.testing import lazy
from bootseer.testing.source import FlakyStore

SIZE = 40 * 4096 + 123


class Rig:
    def __init__(self, folder: Path) -> None:
        self.blob = lazy.make(folder / "blob", lazy.content(SIZE))
        self.store = FlakyStore(self.blob.store)
        self.cache = self.blob.open_cache(folder / "cache")
        self.fetcher = Fetcher(self.cache, [StoreSource(self.store, self.blob.key)], streams=2, window=4096, deadline=1)
        self.recorder = Recorder("ab" * 32, SIZE)
        self.file = LazyFile(self.cache, self.fetcher, self.recorder)

    def close(self) -> None:
        self.fetcher.close()
        self.cache.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, SIZE + 5000), length=st.integers(0, 40000))
def test_any_read_is_right(rig: Rig, offset: int, length: int) -> None:
    assert rig.file.pread(offset, length) == rig.blob.content[offset : offset + length]
    found = rig.file.locate(offset, length)
    if isinstance(found, tuple):
        found = os.pread(found[0], length, found[1])
    assert found == rig.blob.content[offset : offset + length]


def test_a_ready_block_asks_the_store_no_more(rig: Rig) -> None:
    rig.file.pread(0, SIZE)
    assert rig.file.stats.slow_faults == 1
    before = len(rig.store.reads)
    rig.store.down = True
    assert rig.file.pread(0, SIZE) == rig.blob.content
    assert isinstance(rig.file.locate(4096, 100), tuple)
    assert len(rig.store.reads) == before
    assert rig.file.stats.slow_faults == 1
    assert rig.file.stats.stall_seconds > 0


def test_no_bytes_is_eio_and_counted(rig: Rig) -> None:
    rig.store.down = True
    with pytest.raises(OSError, match="did not come") as caught:
        rig.file.pread(0, SIZE)
    assert caught.value.errno == errno.EIO
    assert rig.file.stats.failed_reads == 1


def test_reads_are_recorded_once_ready_or_not(rig: Rig) -> None:
    rig.file.pread(0, 10, pid=5)
    rig.file.locate(0, 2 * UNIT, pid=6)
    rig.file.pread(SIZE - 1, 4096, pid=7)
    rig.file.pread(SIZE, 4096, pid=8)
    found = [(touch.pid, touch.unit, touch.count) for touch in rig.recorder.stop().touches]
    assert found == [(5, 0, 1), (6, 1, 1), (7, 40, 1)]


def test_a_full_cache_still_gives_right_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.file.pread(5 * 4096, 3 * 4096)
    monkeypatch.setenv("BOOTSEER_FAULTS", "blocks.cache.write=enospc")
    for offset, length in [(100, 50000), (0, SIZE), (SIZE - 10, 100), (4 * 4096 - 1, 2)]:
        assert rig.file.pread(offset, length) == rig.blob.content[offset : offset + length]
