"""Memory shared by the processes of a block server, and the channel between them."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blocks.formats.trace import first_touches
from bootseer.blocks.serving.channel import Again, Came, Channel, Wanted, request_id
from bootseer.blocks.serving.shared import UNIT, Count, Shared
from bootseer.errors import DataError, UnavailableError


@pytest.fixture
def shared() -> Shared:
    return Shared.create(10, 160, size=10 << 16, block_size=1 << 16)


def test_what_one_writes_the_other_reads(shared: Shared) -> None:
    other = Shared.attach(os.dup(shared.fd))
    assert (other.size, other.block_size, other.shift, other.blocks, other.units) == (655360, 65536, 16, 10, 160)
    shared.ready[3] = 1
    assert other.ready[:] == b"\0\0\0\1" + bytes(6)
    assert other.ready.find(b"\0", 3, 4) < 0
    other.counts[Count.READS] += 5
    assert shared.counts[Count.READS] == 5
    shared.note = b"negotiated"
    assert other.note == b"negotiated"
    shared.driver = "fanotify"
    assert other.driver == "fanotify"


def test_it_outlives_a_killed_process(shared: Shared) -> None:
    pid = os.fork()
    if not pid:
        shared.journal(17, 4096, 100, 99)
        shared.ready[9] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    ((fd, offset, length, began, by),) = shared.outstanding()
    assert (fd, offset, length, by) == (17, 4096, 100, 99)
    assert began > 0
    assert shared.ready[9] == 1
    shared.settle(17)
    assert shared.outstanding() == []


def test_nothing_to_share_is_fine() -> None:
    empty = Shared.create(0, 0)
    assert len(empty.ready) == 0
    assert empty.ready.find(b"\0") < 0
    assert empty.touch_log.since(0) == []


def test_another_file_is_refused() -> None:
    fd = os.memfd_create("other")
    with pytest.raises(DataError):
        Shared.attach(fd)
    os.close(fd)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 40 * UNIT - 1), st.integers(1, 9 * UNIT)), max_size=20))
def test_touches_are_first_touches(reads: list[tuple[int, int]]) -> None:
    size = 40 * UNIT
    shared = Shared.create(10, 40, size=size, block_size=4 * UNIT)
    rows = []
    shared.touch(0, 1, 1)
    assert shared.touch_log.since(0) == []  # not recording
    shared.counts[Count.RECORDING] = 1
    for pid, (offset, length) in enumerate(reads):
        length = min(length, size - offset)
        shared.touch(offset, length, pid)
        rows.append((0, pid, offset // UNIT, (offset + length - 1) // UNIT + 1 - offset // UNIT))
    want = [(touch.pid, touch.unit, touch.count) for touch in first_touches(rows, size)[0]]
    assert [entry[1:] for entry in shared.touch_log.since(0)] == want
    assert [entry[1:] for entry in shared.touch_log.since(2)] == want[2:]


def test_messages_cross_and_wait_for_a_new_process() -> None:
    front, fetcher = Channel.pair()
    id = request_id(3, 7)
    assert front.send(Wanted(id, 1, 2, 99))
    if not (pid := os.fork()):
        fetcher.receive(timeout=5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert fetcher.receive() is None  # it took the message with it
    fetcher.send(Again())
    assert front.receive(timeout=5) == Again()
    front.send(Wanted(id, 1, 2, 99))
    assert fetcher.receive(timeout=5) == Wanted(id, 1, 2, 99)
    fd = os.memfd_create("bytes")
    os.write(fd, b"body")
    fetcher.send(Came(id, 0, fd))
    os.close(fd)
    came = front.receive(timeout=5)
    assert isinstance(came, Came)
    assert os.pread(came.fd, 10, 0) == b"body"
    os.close(came.fd)
    fetcher.send(Came(id, 5))
    assert front.receive(timeout=5) == Came(id, 5, -1)
    fetcher.close()
    with pytest.raises(UnavailableError):
        front.receive(timeout=5)
    assert not front.send(Again())
    front.close()


def test_a_full_channel_says_so_and_there_is_much_room() -> None:
    front, fetcher = Channel.pair()
    number = 0
    while front.send(Wanted(number, 0, 0, 0)):
        number += 1
    assert number > 250
    for expected in range(number):
        assert fetcher.receive() == Wanted(expected, 0, 0, 0)
    assert fetcher.receive() is None
    front.close()
    fetcher.close()
