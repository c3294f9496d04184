"""Packing: the stored blob gives back every block; the same input gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard

from bootseer.blocks import _hash
from bootseer.blocks.pack import compress, decompress, pack
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.testing import lazy


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 50 * 4096 + 17])
def test_every_block_comes_back(tmp_path: Path, size: int) -> None:
    data = lazy.content(size)
    (tmp_path / "data").write_bytes(data)
    packed = pack(tmp_path / "data", tmp_path / "blob", block_size=4096, threads=3)
    blob = (tmp_path / "blob").read_bytes()
    assert packed.digest == _hash.hexdigest(blob)
    assert packed.map.stored_size == len(blob)
    out = b""
    for block in range(packed.map.count):
        length = packed.map.length_of(block)
        start = packed.map.offsets[block]
        frame = blob[start : start + packed.map.lengths[block]]
        piece = decompress(frame, length) if frame else bytes(length)
        assert packed.map.matches(block, piece)
        out += piece
    assert out == data


def test_deterministic_whatever_the_threads(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(lazy.content(100 * 4096))
    one = pack(tmp_path / "data", tmp_path / "one", block_size=4096, threads=1)
    many = pack(tmp_path / "data", tmp_path / "many", block_size=4096, threads=8)
    assert one.map == many.map
    assert one.digest == many.digest


def test_zero_blocks_store_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(40960))
    packed = pack(tmp_path / "data", tmp_path / "blob", block_size=4096)
    assert packed.map.stored_size == 0
    assert all(packed.map.is_zero(block) for block in range(10))


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(lazy.content(100 * 4096))
    seen: list[tuple[int, int]] = []
    pack(tmp_path / "data", tmp_path / "blob", block_size=4096, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (409600, 409600)


def test_missing_input_and_existing_output(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        pack(tmp_path / "absent", tmp_path / "blob")
    (tmp_path / "data").write_bytes(b"x")
    (tmp_path / "blob").write_bytes(b"old")
    with pytest.raises(BootseerError):
        pack(tmp_path / "data", tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == b"old"


def test_a_frame_that_promises_too_much_is_refused_before_it_is_opened() -> None:
    bomb = compress(bytes(64 << 20), 3)
    with pytest.raises(DataError, match="content size"):
        decompress(bomb, 4096)


@pytest.mark.parametrize("frame", [b"", b"x", b"\x28\xb5\x2f\xfd", b"\0" * 40])
def test_garbage_is_refused(frame: bytes) -> None:
    with pytest.raises(DataError):
        decompress(frame, 4096)


def test_a_frame_without_a_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 4096)
    with pytest.raises(DataError):
        decompress(frame, 4096)


def test_a_truncated_frame_is_refused() -> None:
    frame = compress(lazy.content(4096, zeros=0), 3)
    with pytest.raises(DataError):
        decompress(frame[:-1], 4096)
