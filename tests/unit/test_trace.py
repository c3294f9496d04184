"""The trace format."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.chunks import hashing
from bootseer.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"
TREE = "ab" * 32
HEAD = 104


def bare() -> Trace:
    return Trace(TREE, 10 * UNIT + 1, 1700000000, True, (Touch(0, 7, 3, 2), Touch(15, 4000000000, 10, 1)))


def sample() -> Trace:
    return msgspec.structs.replace(bare(), left_out=2, source="cd" * 32)


def test_golden_file() -> None:
    assert sample().encode() == (GOLDEN / "trace-v4.bin").read_bytes()
    assert Trace.decode((GOLDEN / "trace-v4.bin").read_bytes()) == sample()


@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 900), st.integers(1, 99)),
        max_size=10,
    ),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_round_trip(touches: list[tuple[int, int, int, int]], left_out: int, complete: bool) -> None:
    trace = Trace(TREE, 999 * UNIT, 5, complete, tuple(Touch(*fields) for fields in touches), left_out)
    assert Trace.decode(trace.encode()) == trace


def sealed(body: bytes) -> bytes:
    return body + hashing.digest(body)


@given(st.binary(max_size=64), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_any_sealed_touches_are_parsed_or_refused(table: bytes, touches: int, left_out: int) -> None:
    head = bytearray(sample().encode()[:HEAD])
    struct.pack_into("<I", head, 32, touches % 3)
    struct.pack_into("<I", head, 68, left_out)
    try:
        trace = Trace.decode(sealed(bytes(head) + table))
    except DataError:
        return
    assert trace.encode() == sealed(bytes(head) + table)


@pytest.mark.parametrize(("unit", "count"), [(11, 1), (10, 2), (0, 0), (2**64 - 1, 1)])
def test_a_sealed_touch_beyond_the_end_is_refused(unit: int, count: int) -> None:
    body = bare().encode()[:HEAD] + struct.pack("<IIQI", 0, 0, unit, count) * 2
    with pytest.raises(DataError, match="beyond"):
        Trace.decode(sealed(body))


def test_units_touched_twice_are_refused() -> None:
    whole = Trace("00" * 32, 1 << 20, 0, True, tuple(Touch(0, 1, 0, 256) for _ in range(2)))
    with pytest.raises(DataError, match="twice"):
        Trace.decode(whole.encode())
