"""From the touch log of a front to a trace."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.profiles.layout import Part
from bootseer.blocks.profiles.recording import Recording
from bootseer.blocks.serving.shared_memory import Count, SharedMemory

TREE = "ab" * 32


def test_a_recording_follows_the_access_trace() -> None:
    shared = SharedMemory(4, size=64 * UNIT, block_size=16 * UNIT)
    shared.counts[Count.RECORDING] = 1
    shared.counts[Count.BEGAN_NS] = time.monotonic_ns()
    recording = Recording(shared.trace.since, TREE, 64 * UNIT, began=1700000000, layout=list)
    shared.trace.touch(0, 2 * UNIT, 7)
    assert len(recording.trace().touches) == 1
    shared.trace.touch(0, 3 * UNIT, 7)
    shared.trace.touch(9 * UNIT, 1, 1 << 21)
    trace = recording.trace()
    assert [(t.pid, t.unit, t.count) for t in trace.touches] == [
        (7, 0, 2),
        (7, 2, 1),
        (1 << 21, 9, 1),
    ]
    assert trace.complete
    assert not recording.trace(complete=False).complete
    assert Trace.decode(trace.encode()) == trace


MIB = (1 << 20) // UNIT


def recorded(rows: list[tuple[int, int, int, int]], size: int) -> Trace:
    """The trace of ``rows``, of a tree with files of 1 MiB."""
    parts = [Part(at, MIB, b"%d" % at, 0) for at in range(0, size // UNIT, MIB)]
    return Recording(lambda start: rows[start:], TREE, size, began=0, layout=lambda: parts).trace()


def test_a_process_that_reads_nearly_all_files_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pid = os.getpid()
    rows = [(1, pid, 0, 20 * MIB), (2, 3, 20 * MIB, MIB), (3, pid, 21 * MIB, 79 * MIB)]
    trace = recorded(rows, 100 << 20)
    assert trace.touches == (Touch(2, 3, 20 * MIB, MIB),)
    name = Path("/proc/self/comm").read_text().strip()
    assert f"left out of the recording: process {pid} ({name}), 103 MB" in caplog.text
    assert trace.left_out == 1
    assert trace.complete
    assert Trace.decode(trace.encode()) == trace


def test_one_that_reads_much_of_fewer_files_is_a_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for much in (26, 60, 90):
        trace = recorded([(1, 3, 10 * MIB, much * MIB)], 100 << 20)
        assert trace.touches == (Touch(1, 3, 10 * MIB, much * MIB),)
    assert "left out" not in caplog.text


def test_many_processes_that_scan_together_are_left_out() -> None:
    rows = [(pid, pid, pid * 5 * MIB, 5 * MIB) for pid in range(20)]
    trace = recorded(rows, 100 << 20)
    assert trace.touches == ()
    assert trace.left_out == 20
    rows[3:6] = []
    assert len(recorded(rows, 100 << 20).touches) == 17, "not nearly all files"


def test_one_that_has_ended_is_named_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trace = recorded([(1, 1 << 30, 0, 95 * MIB), (2, 3, 96 * MIB, 1)], 100 << 20)
    assert "left out of the recording: process 1073741824, 99 MB" in caplog.text
    assert trace.touches == (Touch(2, 3, 96 * MIB, 1),)


def test_in_a_small_tree_nobody_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trace = recorded([(1, 2, 0, 64 * MIB)], 64 << 20)
    assert trace.touches == (Touch(1, 2, 0, 64 * MIB),)
    assert "left out" not in caplog.text
