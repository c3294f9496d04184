"""Bytes cut in pieces, and the checksums of pieces: the same as of the bytes in one piece."""

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hdfs import checksum
from bootseer.hdfs.pieces import cut, kept

chunks = st.lists(st.binary(max_size=40), max_size=8)


@given(parts=chunks, length=st.integers(0, 400))
def test_cut(parts, length):
    whole = b"".join(parts)
    length = min(length, len(whole))
    first, rest = cut([memoryview(part) for part in parts], length)
    assert b"".join(first) == whole[:length]
    assert b"".join(rest) == whole[length:]


@given(parts=chunks, step=st.integers(1, 70))
def test_checksums_do_not_depend_on_the_pieces(parts, step):
    whole = b"".join(parts)
    expected = [crc32c(whole[at : at + step]) for at in range(0, len(whole), step)]
    assert checksum.of([memoryview(part) for part in parts], step) == struct.pack(f">{len(expected)}I", *expected)


def test_only_bytes_are_kept_without_a_copy():
    data = b"x" * 100
    assert kept(memoryview(data)[10:20]).obj is data
    for changing in (bytearray(data), memoryview(bytearray(data)).toreadonly(), memoryview(data).cast("I")[:8]):
        view = kept(changing)
        assert bytes(view) == bytes(memoryview(changing).cast("B"))
        assert isinstance(view.obj, bytes)
        if isinstance(changing, bytearray):
            changing[0] = 0
            assert view[0] == ord("x")


@pytest.mark.parametrize("shape", [(4, 25), (2, 50)])
def test_memory_of_several_dimensions_is_bytes(shape):
    view = memoryview(bytes(range(100))).cast("B", shape)
    assert bytes(kept(view)) == bytes(range(100))
