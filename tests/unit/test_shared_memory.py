"""Memory shared by the processes of a block server, and the channels between them."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.formats.trace import UNIT
from bootseer.blocks.serving.ipc import Came, Channel, Finish, Repeat, Wanted, request_id
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.errors import DataError, UnavailableError
from bootseer.ranges import runs


@pytest.fixture
def shared() -> SharedMemory:
    return SharedMemory(10, size=10 << 16, block_size=1 << 16)


def test_it_is_shared_and_outlives_a_killed_process(shared: SharedMemory) -> None:
    assert (shared.size, shared.block_size, shared.shift) == (655360, 65536, 16)
    pid = os.fork()
    if not pid:
        shared.ready[9] = 1
        shared.counts[Count.READS] += 5
        shared.negotiated.write(b"negotiated")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert shared.ready[:] == bytes(9) + b"\1"
    assert shared.counts[Count.READS] == 5
    assert shared.negotiated.read() == b"negotiated"
    with pytest.raises(ValueError, match="too long"):
        shared.negotiated.write(bytes(5000))


def test_a_note_is_the_old_or_the_new_one_whenever_its_writer_dies(shared: SharedMemory) -> None:
    note, lines = shared.users, []
    note.write(b"of the first")

    def trace(frame: object, event: str, arg: object) -> object:
        lines.append(note.read())
        return trace

    for text in (b"of the second, which is longer", b"3rd"):
        before = note.read()
        lines.clear()
        sys.settrace(trace)  # what is there before each line of the writer
        try:
            note.write(text)
        finally:
            sys.settrace(None)
        assert len(lines) > 3
        assert set(lines) <= {before, text}
        assert note.read() == text
    for byte in (b"a", b"b", b"c"):  # as long as there is room
        most = len(note._memory) // 2 - 8
        note.write(byte * most)
        assert note.read() == byte * most
        with pytest.raises(ValueError, match="too long"):
            note.write(byte * (most + 1))


def test_ready_ranges(shared: SharedMemory) -> None:
    shared.ready[3:5] = b"\1\1"
    assert shared.is_ready(3 << 16, 2 << 16)
    assert not shared.is_ready((3 << 16) - 1, 2)
    assert not shared.is_ready(5 << 16, 1)
    shared.ready[9] = 1
    assert shared.is_ready((10 << 16) - 1, 4096)  # what is behind the end does not count


def test_nothing_to_share_is_fine() -> None:
    empty = SharedMemory(0, size=0, block_size=0)
    assert len(empty.ready) == 0
    assert empty.trace.since(0) == []


@given(st.lists(st.tuples(st.integers(0, 40 * UNIT - 1), st.integers(1, 9 * UNIT)), max_size=20))
def test_touches_are_first_touches(reads: list[tuple[int, int]]) -> None:
    size = 40 * UNIT
    shared = SharedMemory(10, size=size, block_size=4 * UNIT)
    want: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    shared.trace.touch(0, 1, 1)
    assert shared.trace.since(0) == []  # not recording
    shared.counts[Count.RECORDING] = 1
    for pid, (offset, length) in enumerate(reads):
        length = min(length, size - offset)
        shared.trace.touch(offset, length, pid)
        new = set(range(offset // UNIT, (offset + length - 1) // UNIT + 1)) - seen
        want += [(pid, first, count) for first, count in runs(new)]
        seen |= new
    assert [entry[1:] for entry in shared.trace.since(0)] == want
    assert [entry[1:] for entry in shared.trace.since(2)] == want[2:]


def test_messages_cross_and_wait_for_a_new_process() -> None:
    near, fetcher = Channel.pair()
    id = request_id(3, 7)
    assert near.send(Wanted(id, 1, 2, 99))
    if not (pid := os.fork()):
        fetcher.receive(timeout=5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert fetcher.receive() is None  # it took the message with it
    for message in (
        Repeat(),
        Came(id, 5),
        Finish(),
    ):
        fetcher.send(message)
        assert near.receive(timeout=5) == (message, -1)
    fd = os.memfd_create("bytes")
    os.write(fd, b"body")
    fetcher.send(Came(id, 0), fd=fd)
    os.close(fd)
    got = near.receive(timeout=5)
    assert got is not None
    assert got[0] == Came(id, 0)
    assert os.pread(got[1], 10, 0) == b"body"
    os.close(got[1])
    fetcher.close()
    with pytest.raises(UnavailableError):
        near.receive(timeout=5)
    assert not near.send(Repeat())
    near.close()


def test_what_is_no_message_is_refused() -> None:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        one.send(b"\xc1nonsense")
        with pytest.raises(DataError):
            Channel(two).receive(timeout=1)


def test_a_full_channel_says_so_and_there_is_much_room() -> None:
    near, fetcher = Channel.pair()
    number = 0
    while near.send(Wanted(number, 0, 0, 0)):
        number += 1
    assert number > 250
    for expected in range(number):
        assert fetcher.receive() == (Wanted(expected, 0, 0, 0), -1)
    assert fetcher.receive() is None
    near.close()
    fetcher.close()
