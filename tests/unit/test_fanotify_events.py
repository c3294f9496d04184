"""Parsing of fanotify events: a pipe plays the kernel."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import DataError
from bootseer.kernel import fanotify

HEAD = struct.Struct("=IBBHQii")
RANGE = struct.Struct("=BBHIQQ")


def _event(
    fd: int = 5, pid: int = 6, mask: int = fanotify.FAN_PRE_ACCESS, version: int = 3, records: bytes | None = None
) -> bytes:
    records = RANGE.pack(6, 0, 24, 0, 4096, 512) if records is None else records
    return HEAD.pack(24 + len(records), version, 0, 24, mask, fd, pid) + records


@pytest.fixture
def pipe() -> Iterator[tuple[fanotify.Group, int]]:
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    group = fanotify.Group(ours)
    yield group, theirs
    group.close()
    os.close(theirs)


def _parse(pipe: tuple[fanotify.Group, int], data: bytes) -> list[fanotify.Event]:
    os.write(pipe[1], data)
    return pipe[0].events(bytearray(65536))


def test_one_and_many(pipe: tuple[fanotify.Group, int]) -> None:
    assert pipe[0].events(bytearray(100)) == []
    assert len(_event()) == fanotify.EVENT_SIZE
    assert _parse(pipe, _event()) == [(5, 6, 4096, 512)]
    other = RANGE.pack(6, 0, 24, 0, 1 << 40, (1 << 64) - 1)
    assert _parse(pipe, _event() + _event(7, 0, records=other)) == [(5, 6, 4096, 512), (7, 0, 1 << 40, (1 << 64) - 1)]


def test_records_of_other_kinds_are_skipped(pipe: tuple[fanotify.Group, int]) -> None:
    records = struct.pack("=BBHI", 9, 0, 8, 0) + RANGE.pack(6, 0, 24, 0, 1, 2)
    assert _parse(pipe, _event(records=records)) == [(5, 6, 1, 2)]


@pytest.mark.parametrize(
    "records",
    [b"", b"\6\0", RANGE.pack(6, 0, 20, 0, 1, 2), struct.pack("=BBHI", 9, 0, 0, 0), RANGE.pack(9, 0, 24, 0, 1, 2)],
)
def test_events_without_a_range_are_told_apart(pipe: tuple[fanotify.Group, int], records: bytes) -> None:
    """One of them does not take the others along: each of their readers waits for an answer."""
    assert _parse(pipe, _event(4, records=records) + _event()) == [(4, 6, -1, -1), (5, 6, 4096, 512)]


def test_other_versions_are_not_understood(pipe: tuple[fanotify.Group, int]) -> None:
    assert _parse(pipe, _event(version=4)) == [(5, 6, -1, -1)]


def test_overflow(pipe: tuple[fanotify.Group, int]) -> None:
    assert _parse(pipe, _event(-1, 0, fanotify.FAN_Q_OVERFLOW, records=b"")) == [(-1, 0, -1, -1)]


@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_no_bytes_make_it_fail_otherwise(junk: bytes, after: bool) -> None:
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    try:
        found = _parse((fanotify.Group(ours), theirs), (_event() if after else b"") + junk)
    except DataError:
        return
    finally:
        os.close(ours)
        os.close(theirs)
    assert all(event.offset >= -1 for event in found)
