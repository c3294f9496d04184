"""The trace format."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.formats.trace import UNIT, Process, Touch, Trace
from bootseer.chunks import hashing
from bootseer.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"
TREE = "ab" * 32
HEAD = 104


def bare() -> Trace:
    return Trace(TREE, 10 * UNIT + 1, 1700000000, True, (Touch(0, 7, 3, 2), Touch(15, 4000000000, 10, 1)))


def sample() -> Trace:
    processes = (Process(7, "python3", 0, "/system.slice/job.scope"), Process(4000000000, "pt_main_thröad"))
    return msgspec.structs.replace(bare(), processes=processes, source="cd" * 32)


def test_golden_file() -> None:
    assert sample().encode() == (GOLDEN / "trace-v3.bin").read_bytes()
    assert Trace.decode((GOLDEN / "trace-v3.bin").read_bytes()) == sample()


NAMES = st.text(max_size=16)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 900), st.integers(1, 99)),
        max_size=10,
    ),
    st.dictionaries(st.integers(0, 2**32 - 1), st.tuples(NAMES, st.integers(-1, 2**31 - 1), NAMES), max_size=9),
    st.booleans(),
)
def test_round_trip(
    touches: list[tuple[int, int, int, int]], processes: dict[int, tuple[str, int, str]], complete: bool
) -> None:
    table = tuple(Process(pid, *fields) for pid, fields in sorted(processes.items()))
    trace = Trace(TREE, 999 * UNIT, 5, complete, tuple(Touch(*fields) for fields in touches), table)
    assert Trace.decode(trace.encode()) == trace


def sealed(body: bytes) -> bytes:
    return body + hashing.digest(body)


@pytest.mark.parametrize(
    "table",
    [
        struct.pack("<IiHH", 7, 0, 0, 0),
        struct.pack("<IiHH", 7, 0, 0, 0) * 2,
        struct.pack("<IiHH", 7, 0, 0, 0) + struct.pack("<IiHH", 6, 0, 0, 0),
        struct.pack("<IiHH", 7, 0, 0, 0) + struct.pack("<IiHH", 8, -2, 0, 0),
        struct.pack("<IiHH", 7, 0, 0, 0) + struct.pack("<IiHH", 8, 0, 65, 0) + b"a" * 65,
        struct.pack("<IiHH", 7, 0, 0, 0) + struct.pack("<IiHH", 8, 0, 4, 9) + b"abcd",
        struct.pack("<IiHH", 7, 0, 0, 0) + struct.pack("<IiHH", 8, 0, 1, 0) + b"\xff",
        struct.pack("<IiHH", 7, 0, 0, 0) + struct.pack("<IiHH", 8, 0, 0, 0) + b"\0",
    ],
)
def test_a_sealed_but_senseless_process_table_is_refused(table: bytes) -> None:
    head = sample().encode()[: HEAD + 2 * 20]
    with pytest.raises(DataError, match="process"):
        Trace.decode(
            sealed(head + table + bytes(max(0, 24 - len(table)))) if len(table) == 12 else sealed(head + table)
        )


@given(st.binary(max_size=64), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_any_sealed_table_is_parsed_or_refused(table: bytes, touches: int, processes: int) -> None:
    head = bytearray(sample().encode()[:HEAD])
    struct.pack_into("<I", head, 32, touches % 3)
    struct.pack_into("<I", head, 68, processes % 4)
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
