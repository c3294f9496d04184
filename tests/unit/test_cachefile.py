"""The cache file: what it promises after a crash, with a damaged bitmap, and to a second owner."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.chunks.cachefile import CacheFile, in_use
from bootseer.errors import UnavailableError
from support import lazy
from support.lazy import LazyBlob


@pytest.fixture
def blob(tmp_path: Path) -> LazyBlob:
    return lazy.make(tmp_path / "blob", lazy.content(20 * 4096 + 100))


def piece(blob: LazyBlob, block: int) -> bytes:
    return blob.content[block * 4096 : (block + 1) * 4096]


def real_blocks(blob: LazyBlob) -> list[int]:
    return [block for block in range(blob.map.count) if not blob.map.is_zero(block)]


def test_zero_blocks_are_ready_from_the_start(tmp_path: Path, blob: LazyBlob) -> None:
    with blob.open_cache(tmp_path / "c") as cache:
        for block in range(blob.map.count):
            assert cache.is_ready(block, block) == blob.map.is_zero(block)
            if blob.map.is_zero(block):
                assert cache.read(block * 4096, blob.map.length_of(block)) == piece(blob, block)
        assert not cache.complete


def test_written_blocks_are_there_after_reopening(tmp_path: Path, blob: LazyBlob) -> None:
    some = real_blocks(blob)[::2]
    with blob.open_cache(tmp_path / "c") as cache:
        for block in some:
            cache.write(block, piece(blob, block))
    with blob.open_cache(tmp_path / "c") as cache:
        for block in real_blocks(blob):
            assert cache.is_ready(block, block) == (block in some)
        for block in some:
            assert cache.read(block * 4096, blob.map.length_of(block)) == piece(blob, block)


def test_complete(tmp_path: Path, blob: LazyBlob) -> None:
    with blob.open_cache(tmp_path / "c") as cache:
        for block in real_blocks(blob):
            cache.write(block, piece(blob, block))
            cache.write(block, piece(blob, block))
        assert cache.complete
        assert cache.read(0, len(blob.content)) == blob.content
        assert cache.is_ready(0, blob.map.count - 1)


@given(data=st.data())
def test_a_damaged_bitmap_means_starting_over(
    tmp_path: Path, blob: LazyBlob, data: st.DataObject, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "c"
    block = real_blocks(blob)[0]
    with blob.open_cache(folder) as cache:
        cache.write(block, piece(blob, block))
    raw = bytearray((folder / "bitmap").read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "bitmap").write_bytes(raw)
    with blob.open_cache(folder) as cache:
        assert not cache.is_ready(block, block)
        assert cache.read(block * 4096, 4096) == bytes(4096), "old bytes must be gone: zero blocks are holes"
    assert "damaged" in caplog.text


def test_a_data_file_of_the_wrong_length_means_starting_over(tmp_path: Path, blob: LazyBlob) -> None:
    block = real_blocks(blob)[0]
    with blob.open_cache(tmp_path / "c") as cache:
        cache.write(block, piece(blob, block))
    os.truncate(tmp_path / "c" / "data", 4096)
    with blob.open_cache(tmp_path / "c") as cache:
        assert not cache.is_ready(block, block)


@pytest.mark.parametrize("size", [8192, 4096])
def test_a_ready_block_whose_bytes_are_a_hole_means_starting_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """A copy that was interrupted, or a file system that lost what it had confirmed."""
    blob = lazy.make(tmp_path / "blob", lazy.content(20 * 8192, zeros=0), block_size=8192)
    kept, lost = 3, 7
    with blob.open_cache(tmp_path / "c") as cache:
        for block in (kept, lost):
            cache.write(block, blob.content[block * 8192 : (block + 1) * 8192])
    data = str(tmp_path / "c" / "data")
    subprocess.run(["fallocate", "-p", "-o", str(lost * 8192), "-l", str(size), data], check=True)
    with blob.open_cache(tmp_path / "c") as cache:
        assert not cache.is_ready(kept, kept)
        assert not cache.is_ready(lost, lost)
    assert "has holes" in caplog.text


def test_zeros_of_a_block_that_a_tool_made_holes_are_right(tmp_path: Path) -> None:
    content = b"x" * 4096 + bytes(4096) + b"y" * 8192
    blob = lazy.make(tmp_path / "sparse", content, block_size=8192)
    with blob.open_cache(tmp_path / "c") as cache:
        cache.write(0, content[:8192])
        cache.write(1, content[8192:])
    subprocess.run(["fallocate", "--dig-holes", str(tmp_path / "c" / "data")], check=True)
    with blob.open_cache(tmp_path / "c") as cache:
        assert cache.complete


def test_a_bitmap_of_another_map_is_not_believed(tmp_path: Path, blob: LazyBlob) -> None:
    block = real_blocks(blob)[0]
    with blob.open_cache(tmp_path / "c") as cache:
        cache.write(block, piece(blob, block))
    with CacheFile.open(tmp_path / "c", blob.map, b"x" * 32) as cache:
        assert not cache.is_ready(block, block)


def test_one_owner(tmp_path: Path, blob: LazyBlob) -> None:
    with blob.open_cache(tmp_path / "c"), pytest.raises(UnavailableError, match=f"in use by process {os.getpid()}"):
        blob.open_cache(tmp_path / "c")
    blob.open_cache(tmp_path / "c").close()


def test_a_cut_file_is_an_error_not_zeros(tmp_path: Path, blob: LazyBlob) -> None:
    with blob.open_cache(tmp_path / "c") as cache:
        os.truncate(tmp_path / "c" / "data", 10)
        with pytest.raises(OSError, match="cut short") as caught:
            cache.read(0, 4096)
        assert caught.value.errno == errno.EIO


def test_neighbours_are_written_at_once(tmp_path: Path, blob: LazyBlob) -> None:
    """Also those that came another way meanwhile, and the short one at the end."""
    blocks = blob.map
    last = blocks.count - 1
    with blob.open_cache(tmp_path / "c") as cache:
        cache.write(last - 1, piece(blob, last - 1))
        cache.write(last - 3, blob.content[(last - 3) * 4096 :])
        assert cache.is_ready(last - 3, last)
        assert cache.read((last - 3) * 4096, 3 * 4096 + 100) == blob.content[(last - 3) * 4096 :]
        assert not any(cache.is_ready(block, block) for block in real_blocks(blob) if block < last - 3)


def test_a_failed_sync_is_never_repeated_and_believed(
    tmp_path: Path, blob: LazyBlob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, lost, late = real_blocks(blob)[:3]
    with blob.open_cache(tmp_path / "c") as cache:
        cache.write(kept, piece(blob, kept))
        cache.sync()
        cache.write(lost, piece(blob, lost))
        monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.fdatasync=enospc")
        with pytest.raises(OSError, match="No space"):
            cache.sync()
        monkeypatch.delenv("BOOTSEER_FAULTS")
        assert cache.broken
        assert not (tmp_path / "c/bitmap").exists()
        assert [cache.is_ready(block, block) for block in (kept, lost)] == [True, False]
        with pytest.raises(OSError, match="lost data"):
            cache.write(late, piece(blob, late))
        with pytest.raises(OSError, match="lost data"):
            cache.read(lost * 4096, 10)
        assert cache.read(kept * 4096, 10) == piece(blob, kept)[:10]
        cache.sync()
    assert not (tmp_path / "c/bitmap").exists()
    assert caplog.text.count("nothing is kept in it") == 1
    with blob.open_cache(tmp_path / "c") as cache:
        assert not cache.is_ready(lost, lost), "the next start begins anew"
        cache.write(lost, piece(blob, lost))


def test_what_is_ready_now_can_be_read_after_the_end(tmp_path: Path, blob: LazyBlob) -> None:
    first, second, *_ = real_blocks(blob)
    with blob.open_cache(tmp_path / "c") as cache:
        cache.write(first, piece(blob, first))
        now = cache.blocks_now()
        cache.write(second, piece(blob, second))
    assert now.is_ready(first, first)
    assert not now.is_ready(second, second), "it came later"
    assert now.read(first * 4096, 4096) == piece(blob, first)
    with blob.open_cache(tmp_path / "c") as again:
        assert in_use(again.fileno())
        now.close()
        now.close()
        assert not in_use(again.fileno())


def test_what_is_ready_now_may_be_cut_short_later(tmp_path: Path, blob: LazyBlob) -> None:
    with blob.open_cache(tmp_path / "c") as cache:
        now = cache.blocks_now()
    os.truncate(tmp_path / "c/data", 100)
    with pytest.raises(OSError, match="cut short"):
        now.read(0, 4096)
    now.close()


@pytest.mark.parametrize("broken", [False, True])
def test_another_process_goes_on_with_it(tmp_path: Path, blob: LazyBlob, broken: bool) -> None:
    first, second = real_blocks(blob)[:2]
    with blob.open_cache(tmp_path / "c") as cache:
        cache.write(first, piece(blob, first))
        cache.sync()
        heard: list[int] = []
        cache.resume(broken=False, broke=lambda: heard.append(1))
        cache.write(second, piece(blob, second))
        cache.resume(broken=broken, broke=lambda: heard.append(1))
        assert cache.is_ready(first, first)
        assert cache.is_ready(second, second) == (not broken), "what the disk lost is not ready, and stays so"
        assert heard == []
