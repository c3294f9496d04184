"""The trace format and the recorder."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks import _hash
from bootseer.blocks.trace import UNIT, Recorder, Touch, Trace
from bootseer.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks" / "trace-v1.bin"
TREE = "ab" * 32


def sample() -> Trace:
    return Trace(TREE, 10 * UNIT + 1, 1700000000, True, "fuse", (Touch(0, 7, 3, 2), Touch(15, 4000000000, 10, 1)))


def test_golden_file() -> None:
    assert sample().encode() == GOLDEN.read_bytes()
    assert Trace.decode(GOLDEN.read_bytes()) == sample()


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 900), st.integers(1, 99))),
    st.booleans(),
)
def test_round_trip(touches: list[tuple[int, int, int, int]], complete: bool) -> None:
    trace = Trace(TREE, 999 * UNIT, 5, complete, "fuse", tuple(Touch(*fields) for fields in touches))
    assert Trace.decode(trace.encode()) == trace


@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    raw = bytearray(sample().encode())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(DataError):
        Trace.decode(bytes(raw))


def test_any_truncation_is_refused() -> None:
    raw = sample().encode()
    for length in range(len(raw)):
        with pytest.raises(DataError):
            Trace.decode(raw[:length])


@given(st.binary(max_size=200))
def test_noise_is_refused(raw: bytes) -> None:
    with pytest.raises(DataError):
        Trace.decode(raw)


@pytest.mark.parametrize(("unit", "count"), [(11, 1), (10, 2), (0, 0), (2**64 - 1, 1)])
def test_a_sealed_touch_beyond_the_end_is_refused(unit: int, count: int) -> None:
    body = sample().encode()[:72] + struct.pack("<IIQI", 0, 0, unit, count) * 2
    with pytest.raises(DataError, match="beyond"):
        Trace.decode(body + _hash.digest(body))


def test_first_touches_only() -> None:
    recorder = Recorder(TREE, 100 * UNIT)
    recorder.touch(0, 1, 1)
    recorder.touch(10, UNIT, 2)
    recorder.touch(0, 2 * UNIT, 3)
    recorder.touch(5 * UNIT, UNIT, 4)
    recorder.touch(4 * UNIT - 1, 3 * UNIT, 5)
    found = [(touch.pid, touch.unit, touch.count) for touch in recorder.stop().touches]
    assert found == [(1, 0, 1), (2, 1, 1), (4, 5, 1), (5, 3, 2), (5, 6, 1)]


def test_stopped_recorder_is_deaf() -> None:
    recorder = Recorder(TREE, 100 * UNIT)
    recorder.touch(0, UNIT, 1)
    first = recorder.stop()
    recorder.touch(UNIT, UNIT, 1)
    assert recorder.stop().touches == first.touches
    assert first.complete


def test_the_limit_makes_it_incomplete() -> None:
    recorder = Recorder(TREE, 100 * UNIT, limit=3)
    for unit in range(10):
        recorder.touch(2 * unit * UNIT, 1, 1)
    trace = recorder.stop()
    assert len(trace.touches) == 3
    assert not trace.complete


def test_a_warm_mount_is_incomplete() -> None:
    recorder = Recorder(TREE, UNIT)
    recorder.mark_incomplete()
    assert not Trace.decode(recorder.stop().encode()).complete


def test_threads_never_record_a_unit_twice() -> None:
    recorder = Recorder(TREE, 2000 * UNIT)

    def run() -> None:
        for unit in range(0, 2000, 4):
            recorder.touch(unit * UNIT, 4 * UNIT, 1)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    units = [unit for touch in recorder.stop().touches for unit in range(touch.unit, touch.unit + touch.count)]
    assert sorted(units) == list(range(2000))
