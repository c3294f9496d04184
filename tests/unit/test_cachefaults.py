"""Every write of the cache file fails or is the last one: afterwards each byte is right, or there is an error."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from bootseer import faults
from bootseer.chunks.cachefile import CacheFile
from bootseer.errors import BootseerError
from support import forked, lazy
from support.lazy import LazyBlob

SIZE = 24 * 4096 + 100
SITES = [
    "chunks.begin",
    "chunks.truncate",
    "chunks.extend",
    "chunks.write",
    "chunks.write@7",
    "chunks.fdatasync",
    "chunks.fdatasync@2",
    "chunks.bitmap",
    "chunks.bitmap@2",
    "chunks.bitmap.write@2",
    "chunks.bitmap.fsync",
    "chunks.bitmap.fsync@2",
    "chunks.bitmap.before-rename",
    "chunks.bitmap.before-rename@2",
]


@pytest.fixture
def blob(tmp_path: Path) -> LazyBlob:
    return lazy.make(tmp_path / "blob", lazy.content(SIZE))


def look(blob: LazyBlob, cache: CacheFile) -> int:
    """How many blocks are ready; each is right."""
    for block in range(blob.map.count):
        if cache.is_ready(block, block):
            data = cache.read(block * 4096, blob.map.length_of(block))
            assert data == blob.content[block * 4096 : (block + 1) * 4096], f"block {block} is wrong"
    return bytes(cache.ready[:]).count(1)


def fill(blob: LazyBlob, folder: Path) -> None:
    """Open, write all, sync now and then, close; goes on after errors, as a fetcher does."""
    with contextlib.suppress(BootseerError), blob.open_cache(folder) as cache:
        for block in range(blob.map.count):
            with contextlib.suppress(OSError):
                cache.write(block, blob.content[block * 4096 : (block + 1) * 4096])
            if block % 6 == 0:
                with contextlib.suppress(OSError):
                    cache.sync()
            look(blob, cache)


def old_data(blob: LazyBlob, folder: Path) -> None:
    """A cache of other bytes, whose bitmap nobody believes: it must be begun anew."""
    folder.mkdir()
    (folder / "data").write_bytes(b"x" * len(blob.content))
    (folder / "bitmap").write_bytes(b"not a bitmap")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("action", ["enospc", "eio"])
@pytest.mark.parametrize("site", SITES)
def test_a_write_that_fails(
    tmp_path: Path, blob: LazyBlob, site: str, action: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    if old:
        old_data(blob, folder)
    name, _, nth = site.partition("@")
    faults.visits.clear()
    monkeypatch.setenv("BOOTSEER_FAULTS", f"{name}={action}@{nth or 1}")
    fill(blob, folder)
    assert faults.visits[name] >= int(nth or 1), "the fault was never met"
    monkeypatch.delenv("BOOTSEER_FAULTS")
    with blob.open_cache(folder) as cache:
        look(blob, cache)
    fill(blob, folder)
    with blob.open_cache(folder) as cache:
        assert look(blob, cache) == blob.map.count


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_every_write_fails_all_the_time(
    tmp_path: Path, blob: LazyBlob, action: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for site in {site.partition("@")[0] for site in SITES}:
        folder = tmp_path / site
        if old:
            old_data(blob, folder)
        monkeypatch.setenv("BOOTSEER_FAULTS", f"{site}={action}")
        fill(blob, folder)
        fill(blob, folder)
        monkeypatch.delenv("BOOTSEER_FAULTS")
        with blob.open_cache(folder) as cache:
            look(blob, cache)


_FILL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cachefaults import SIZE, fill
from support import lazy
fill(lazy.make(Path(sys.argv[2]) / "again", lazy.content(SIZE)), Path(sys.argv[2]) / "c")
"""


@pytest.mark.parametrize("site", [site for site in SITES if not site.endswith("@7")])
def test_a_write_that_is_the_last_one(tmp_path: Path, blob: LazyBlob, site: str) -> None:
    old_data(blob, tmp_path / "c")
    name, _, nth = site.partition("@")
    environ = {**os.environ, "BOOTSEER_FAULTS": f"{name}=kill@{nth or 1}"}
    assert forked.run("-c", _FILL, Path(__file__).parent, tmp_path, env=environ).returncode == -9
    with blob.open_cache(tmp_path / "c") as cache:
        look(blob, cache)
    fill(blob, tmp_path / "c")
    with blob.open_cache(tmp_path / "c") as cache:
        assert look(blob, cache) == blob.map.count


def test_a_write_that_stops_halfway(tmp_path: Path, blob: LazyBlob, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = os.pwrite, [0]

    def half(fd: int, data: bytes, offset: int) -> int:
        count[0] += 1
        if len(data) < 100 or count[0] % 3:
            return real(fd, bytes(data)[: max(1, len(data) // 2)], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half)
    fill(blob, tmp_path / "c")
    monkeypatch.undo()
    with blob.open_cache(tmp_path / "c") as cache:
        assert look(blob, cache) < blob.map.count


def test_the_control_a_bitmap_before_its_data_is_seen(
    tmp_path: Path, blob: LazyBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: CacheFile, block: int, data: bytes) -> None:
        self.ready[block] = 1

    monkeypatch.setattr(CacheFile, "write", nothing)
    with pytest.raises(AssertionError, match="is wrong"):
        fill(blob, tmp_path / "c")
