"""What lies in stores and caches is outside of our hands: no format takes damaged, cut or foreign bytes for its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.formats.hotpack import HotPack
from bootseer.blocks.formats.pagelist import PageList
from bootseer.blocks.formats.trace import Trace
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.chunklist import ChunkList
from bootseer.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"
TREE = "ab" * 32
PACKED = BlockMap(
    65536, 9 * 65536, [ObjectRef(TREE, 900)], [bytes(32)] * 9, [100 * block for block in range(9)], [100] * 9
)
"""The map of the golden hot pack."""


def hotpack(raw: bytes) -> object:
    size = 65843 if len(raw) > 8 else len(raw)
    return HotPack.decode(raw, size, TREE, "cd" * 32, PACKED)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "blockmap-v2": BlockMap.decode,
    "trace-v4": Trace.decode,
    "hotpack-v2": hotpack,
    "chunks-v2": ChunkList.decode,
    "pagelist-v1": lambda raw: PageList.decode(zstandard.compress(raw), TREE, 1 << 40),
}
each_format = pytest.mark.parametrize("name", DECODERS)


def golden(name: str) -> bytes:
    raw = (GOLDEN / f"{name}.bin").read_bytes()
    raw = zstandard.decompress(raw) if name.startswith("pagelist") else raw
    DECODERS[name](raw)
    return raw


@each_format
def test_any_flipped_bit_is_refused(name: str) -> None:
    raw = golden(name)
    for at in range(len(raw)):
        with pytest.raises(DataError):
            DECODERS[name](raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :])


@each_format
def test_any_other_length_is_refused(name: str) -> None:
    raw = golden(name)
    for length in range(len(raw)):
        with pytest.raises(DataError):
            DECODERS[name](raw[:length])
    if not name.startswith("hotpack"):  # its frames follow
        with pytest.raises(DataError):
            DECODERS[name](raw + b"\0")


@each_format
@given(raw=st.binary(max_size=300))
def test_noise_is_refused(name: str, raw: bytes) -> None:
    with pytest.raises(DataError):
        DECODERS[name](raw)


@given(raw=st.binary(max_size=300))
def test_noise_is_no_compressed_page_list(raw: bytes) -> None:
    with pytest.raises(DataError):
        PageList.decode(raw, TREE, 1 << 40)
