"""The block map's format: golden file, round trips, and everything a hostile map may try."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks import _hash
from bootseer.blocks.blockmap import MAX_BLOCK, BlockMap, frame_bound
from bootseer.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks" / "blockmap-v1.bin"


def sample() -> BlockMap:
    """Three blocks of 4 KiB: data, zeros, a short tail."""
    hashes = [_hash.digest(b"a" * 4096), _hash.digest(bytes(4096)), _hash.digest(b"tail")]
    return BlockMap(4096, 2 * 4096 + 4, 60, hashes, [0, 0, 40], [40, 0, 20])


def sealed(body: bytes) -> bytes:
    return body + _hash.digest(body)


def test_golden_file() -> None:
    assert sample().encode() == GOLDEN.read_bytes()
    assert BlockMap.decode(GOLDEN.read_bytes()) == sample()


def test_fields_survive() -> None:
    again = BlockMap.decode(sample().encode())
    assert (again.block_size, again.size, again.stored_size, again.count) == (4096, 8196, 60, 3)
    assert again.is_zero(1)
    assert not again.is_zero(2)
    assert [again.length_of(block) for block in range(3)] == [4096, 4096, 4]
    assert again.matches(2, b"tail")
    assert not again.matches(2, b"tale")
    assert not again.matches(0, b"a" * 4095)


def test_empty_data_has_no_blocks() -> None:
    empty = BlockMap(4096, 0, 0, [], [], [])
    assert BlockMap.decode(empty.encode()) == empty


@given(
    st.integers(12, 16).map(lambda power: 1 << power),
    st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(1, 4096)), max_size=40),
    st.integers(0, 4095),
)
def test_round_trip(block_size: int, entries: list[tuple[bytes, int]], short: int) -> None:
    size = max(0, len(entries) * block_size - (short if entries else 0))
    offsets, end = [], 0
    for _, length in entries:
        offsets.append(end)
        end += length
    blocks = BlockMap(block_size, size, end, [h for h, _ in entries], offsets, [n for _, n in entries])
    assert BlockMap.decode(blocks.encode()) == blocks


@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    raw = bytearray(sample().encode())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(DataError):
        BlockMap.decode(bytes(raw))


def test_any_truncation_is_refused() -> None:
    raw = sample().encode()
    for length in range(len(raw)):
        with pytest.raises(DataError):
            BlockMap.decode(raw[:length])
    with pytest.raises(DataError):
        BlockMap.decode(raw + b"\0")


@given(st.binary(max_size=300))
def test_noise_is_refused(raw: bytes) -> None:
    with pytest.raises(DataError):
        BlockMap.decode(raw)


def header(**change: int) -> bytes:
    fields = {
        "version": 1,
        "hash": 1,
        "codec": 1,
        "zero1": 0,
        "block": 4096,
        "zero2": 0,
        "size": 4096,
        "stored": 10,
        "count": 1,
    }
    fields.update(change)
    return b"BSBLKMAP" + struct.pack("<HHHHIIQQQ16x", *fields.values())


def entry(offset: int = 0, length: int = 10, digest: bytes = b"h" * 32) -> bytes:
    return struct.pack("<32sQI", digest, offset, length)


def test_the_handmade_map_is_good() -> None:
    assert BlockMap.decode(sealed(header() + entry())).count == 1


@pytest.mark.parametrize(
    "body",
    [
        header(version=2) + entry(),
        header(hash=9) + entry(),
        header(codec=9) + entry(),
        header(zero1=1) + entry(),
        header(zero2=1) + entry(),
        header(block=0) + entry(),
        header(block=5000) + entry(),
        header(block=2048) + entry(),
        header(block=2 * MAX_BLOCK) + entry(),
        header(size=1 << 60) + entry(),
        header(size=4097) + entry(),
        header(count=2, size=8192) + entry(),
        header(count=1 << 60) + entry(),
        header(stored=1 << 60) + entry(),
        header(stored=9) + entry(),
        header() + entry(offset=1),
        header() + entry(offset=(1 << 64) - 1),
        header(stored=1 << 30) + entry(length=frame_bound(4096) + 1),
        header() + entry(length=0),
        header() + entry(length=0, offset=5, digest=_hash.digest(bytes(4096))),
    ],
)
def test_a_well_sealed_lie_is_refused(body: bytes) -> None:
    with pytest.raises(DataError):
        BlockMap.decode(sealed(body))


def test_a_huge_count_allocates_nothing() -> None:
    with pytest.raises(DataError, match="bytes for"):
        BlockMap.decode(sealed(header(count=(1 << 64) - 1)))
