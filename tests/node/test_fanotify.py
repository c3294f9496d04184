"""Pre-content events of the real kernel: what they carry, what answers do, and what a dead reader leaves behind."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError, UnsupportedError
from bootseer.kernel import fanotify
from bootseer.testing.waits import read_later

pytestmark = pytest.mark.root

SIZE = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    path = Path("/var/tmp") / f"bootseer-fanotify-{os.getpid()}"  # tmp_path may lie on tmpfs
    path.write_bytes(os.urandom(SIZE))
    try:
        fanotify.try_pre_content(path)
    except UnsupportedError as exc:
        pytest.skip(str(exc))
    yield path
    path.unlink()


@contextmanager
def _marked(place: Path) -> Iterator[fanotify.Group]:
    group = fanotify.Group.open()
    group.mark(place)
    try:
        yield group
    finally:
        group.close()


def _next(group: fanotify.Group, seconds: float = 5) -> list[fanotify.Event]:
    readable, _, _ = select.select([group], [], [], seconds)
    return group.events(bytearray(4096)) if readable else []


def test_a_reader_waits_for_its_answer(place: Path) -> None:
    with _marked(place) as group:
        assert group.events(bytearray(4096)) == []
        got = read_later(place, 8200, 5000)
        (event,) = _next(group)
        assert (event.pid, event.offset, event.length) == (os.getpid(), 8192, 8192)  # whole pages
        assert not got.done()
        assert group.allow(event.fd)
        os.close(event.fd)
        group.unmark(place)
        assert got.result(5) == place.read_bytes()[8200:13200]


@pytest.mark.parametrize("number", sorted(fanotify.ERRNOS))
def test_a_denial_carries_its_errno(place: Path, number: int) -> None:
    with _marked(place) as group:
        got = read_later(place, 0, 100)
        (event,) = _next(group)
        assert group.deny(event.fd, number)
        os.close(event.fd)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            got.result(5)
        assert caught.value.errno == number


def test_an_errno_the_kernel_would_refuse_becomes_eio(place: Path) -> None:
    with _marked(place) as group:
        got = read_later(place, 0, 100)
        (event,) = _next(group)
        assert group.deny(event.fd, errno.ENOTCONN)
        os.close(event.fd)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            got.result(5)


def test_an_answer_nobody_waits_for(place: Path) -> None:
    with _marked(place) as group:
        assert not group.allow(12345)
        assert not group.deny(12345)
        got = read_later(place, 0, 100)
        (event,) = _next(group)
        assert group.allow(event.fd)
        assert not group.allow(event.fd)
        os.close(event.fd)
        assert len(got.result(5)) == 100


def test_many_events_in_one_call(place: Path) -> None:
    with _marked(place) as group:
        reads = [read_later(place, number * 4096, 4096) for number in range(20)]
        seen: dict[int, fanotify.Event] = {}
        while len(seen) < 20:
            found = _next(group)
            assert found
            seen.update((event.offset, event) for event in found)
        assert sorted(seen) == [number * 4096 for number in range(20)]
        for event in seen.values():
            assert group.allow(event.fd)
            os.close(event.fd)
        group.unmark(place)
        right = place.read_bytes()
        assert [each.result(5) for each in reads] == [right[at : at + 4096] for at in range(0, 20 * 4096, 4096)]


def test_unmarked_files_and_older_descriptors_are_not_asked_about(place: Path) -> None:
    before = os.open(place, os.O_RDWR)
    with _marked(place) as group:
        assert len(os.pread(before, 100, 0)) == 100  # else the filler of the file would wait for itself
        os.pwrite(before, b"x", 0)
        group.unmark(place)
        group.unmark(place)
        assert len(read_later(place, 0, 100).result(5)) == 100
        group.mark(before)  # by descriptor: whatever the file is called now
        got = read_later(place, 0, 100)
        (event,) = _next(group)
        group.allow(event.fd)
        assert len(os.pread(event.fd, 100, 0)) == 100
        os.close(event.fd)
        assert len(got.result(5)) == 100
    os.close(before)


def test_events_of_a_dead_reader_are_answered_by_their_number(place: Path) -> None:
    """Another holder keeps the group alive, so the reader waits; only an answer to the old number ends that."""
    with _marked(place) as group:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:  # takes the event, says its number, and dies with it
            (event,) = _next(fanotify.Group(group.fileno()))
            os.write(tell, str(event.fd).encode())
            signal.pause()
        got = read_later(place, 0, 100)
        number = int(os.read(told, 20))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)
        assert _next(group, 0.2) == []  # it is not given out again
        assert not got.done()
        assert group.deny(number, errno.EIO)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            got.result(5)


def test_closing_the_last_descriptor_lets_readers_go_on(place: Path) -> None:
    """The control: this is why a second holder is needed."""
    place.write_bytes(b"")
    os.truncate(place, SIZE)
    group = fanotify.Group.open()
    group.mark(place)
    got = read_later(place, 0, 4096)
    (event,) = _next(group)
    group.close()
    os.close(event.fd)
    assert got.result(5) == bytes(4096)


def test_where_it_does_not_work(tmp_path: Path) -> None:
    group = fanotify.Group.open()
    try:
        with pytest.raises(NotFoundError):
            group.mark(tmp_path / "none")
        with pytest.raises(UnsupportedError, match="has no pre-content events"):
            group.mark(Path("/proc/self/maps"))
    finally:
        group.close()
