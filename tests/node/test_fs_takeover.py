"""The mount of a striped store whose processes are killed, again and again, while it is read."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.config import Config
from bootseer.errors import BootseerError, NotWritableError
from bootseer.fsmount import FsMount, client
from bootseer.fsmount.record import state_folder
from bootseer.kernel import mount as mounts
from bootseer.kernel.child import BEAT_SECONDS, born
from bootseer.stripefs import StripeFS, open_fs
from support.waits import later, together, until

pytestmark = [pytest.mark.root, pytest.mark.takeover]

READERS = 16
DATA = os.urandom((2 << 20) + 321)


@pytest.fixture
def fs(tmp_path: Path) -> StripeFS:
    fs = open_fs(str(tmp_path / "store"))
    for number in range(READERS):
        with fs.create(f"run/striped-{number}", width=3, unit=1 << 16, striped=True) as out:
            out.write(DATA[number:])
        Path(fs.url, f"run/plain-{number}").write_bytes(DATA[number:])
    return fs


@pytest.fixture
def mounted(fs: StripeFS, tmp_path: Path, config: Config) -> Iterator[FsMount]:
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config)
    yield made
    made.unmount()


def kill_server(made: FsMount) -> None:
    """SIGKILL, and wait until another one serves."""
    before = made.status().server_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: made.status().server_pid != before, what="another server")


def drop(file: int) -> None:
    """The next reads of an open file ask the server."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def test_readers_see_nothing_of_killed_servers_and_supervisors(mounted: FsMount) -> None:
    """Each reader has a file open, and opens another again and again. Each next supervisor, which the server has
    started, keeps the mount as the first one did."""
    stop = threading.Event()
    rounds = [0] * READERS

    def read(number: int) -> None:
        held = os.open(mounted.mountpoint / f"run/striped-{number}", os.O_RDONLY)
        for turn in itertools.count():
            drop(held)
            for offset in range(0, len(DATA) - number, 1 << 20):
                assert os.pread(held, 1 << 20, offset) == DATA[number + offset : number + offset + (1 << 20)]
            kind = ("plain", "striped")[turn % 2]
            fresh = os.open(mounted.mountpoint / f"run/{kind}-{number}", os.O_RDONLY)
            drop(fresh)
            digest = hashlib.sha256()
            while piece := os.read(fresh, 1 << 19):
                digest.update(piece)
            assert digest.digest() == hashlib.sha256(DATA[number:]).digest()
            assert len(os.listdir(mounted.mountpoint / "run")) == 2 * READERS
            os.close(fresh)
            rounds[number] = turn
            if stop.is_set():
                break
        os.close(held)

    readers = later(lambda: together(read, range(READERS)))
    for turn in range(8):
        seen = list(rounds)
        until(lambda seen=seen: readers.done() or any(now > then for now, then in zip(rounds, seen, strict=True)), 60)
        assert not readers.done()
        if turn in (2, 5):
            before = mounted.pid
            os.kill(before, signal.SIGKILL)
            until(lambda before=before: mounted.pid != before, what="another supervisor")
        kill_server(mounted)
    stop.set()
    readers.result(120)
    status = mounted.status()
    assert (status.alive, status.restarts, status.supervisor_restarts) == (True, 8, 2)
    assert [file.path for file in mounted.accessed().files if "plain-3" in file.path]
    assert status.bytes_read > READERS * len(DATA)


def test_a_stopped_server_is_replaced(
    fs: StripeFS, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers wait and see nothing of it; what is being written is lost later, and its writer is told."""
    monkeypatch.setattr(client, "SILENCE", (3.0, 7.0))
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config, writable=True)

    def stop_server() -> float:
        before, began = made.status().server_pid, time.monotonic()
        os.kill(before, signal.SIGSTOP)
        content = later((made.mountpoint / "run/striped-3").read_bytes)
        until(lambda: made.status().server_pid != before, 120, "another server")
        assert content.result(120) == DATA[3:]
        return time.monotonic() - began

    try:
        with open(made.mountpoint / "run/striped-2", "rb", buffering=0) as held:
            stop_server()
            drop(held.fileno())
            assert held.read(1 << 19) == DATA[2:][: 1 << 19]
        (made.mountpoint / "run/new").write_bytes(b"old")
        file = os.open(made.mountpoint / "run/new", os.O_WRONLY | os.O_TRUNC)
        os.write(file, b"unfinished")
        until(lambda: made.status().unfinished == 1)
        assert stop_server() >= 7 - BEAT_SECONDS  # since the last beat, which is so old
        for refused in (os.fsync, os.close):
            with pytest.raises(OSError, match="Input/output error"):
                refused(file)
        until(lambda: made.status().unfinished == 0)
        assert Path(fs.url, "run/new").read_bytes() == b"old" == (made.mountpoint / "run/new").read_bytes()
        log = state_folder(config.state_dir, made.mountpoint).with_suffix(".log").read_text()
        for seconds in (3, 7):
            assert f"has given no sign of life for {seconds} s; killing it" in log
        assert "unfinished files that are lost with the server: 1" in log
    finally:
        made.unmount()


def test_what_is_open_over_a_takeover_is_the_same_or_fails(mounted: FsMount, fs: StripeFS) -> None:
    replaced = os.open(mounted.mountpoint / "run/striped-0", os.O_RDONLY)
    gone = os.open(mounted.mountpoint / "run/plain-1", os.O_RDONLY)
    same = os.open(mounted.mountpoint / "run/striped-2", os.O_RDONLY)
    names = iter(os.scandir(mounted.mountpoint / "run"))
    first = next(names).name
    with fs.create("run/striped-0", width=3, unit=1 << 16, striped=True) as out:
        out.write(DATA[::-1])
    os.unlink(f"{fs.url}/run/plain-1")
    kill_server(mounted)
    for fd in (replaced, gone):
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(fd, 1000, 1 << 20)
        os.close(fd)
    assert os.pread(same, 1000, 1 << 20) == DATA[2 + (1 << 20) :][:1000]
    assert os.fstat(same).st_size == len(DATA) - 2
    os.close(same)
    assert {first, *(entry.name for entry in names)} >= {f"striped-{number}" for number in range(READERS)}
    until(lambda: (mounted.mountpoint / "run/striped-0").read_bytes() == DATA[::-1], what="the new content")


def test_numbers_of_nodes_are_never_given_twice(mounted: FsMount, fs: StripeFS) -> None:
    def numbers() -> set[int]:
        return {entry.stat().st_ino for entry in os.scandir(mounted.mountpoint / "run")}

    first = numbers()
    kill_server(mounted)
    assert numbers() == first
    for number in range(READERS):
        with fs.create(f"run/striped-{number}", striped=True) as out:
            out.write(b"new")
    until(lambda: len(numbers() & first) == READERS, what="other numbers for other contents")


def test_a_server_that_dies_at_once_again_and_again_is_given_up(fs: StripeFS, tmp_path: Path, config: Config) -> None:
    made = fsmount.start(fs.url, tmp_path / "mnt", config=config)
    log = Path(config.state_dir, "fs").glob("*.log").__next__()
    try:
        until_dead = time.monotonic() + 60
        while made.status().alive:
            assert time.monotonic() < until_dead
            pid = made.status().server_pid
            if born(pid):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        with pytest.raises(OSError) as caught:  # noqa: PT011  the errno says it
            os.listdir(made.mountpoint)
        assert caught.value.errno == errno.ENOTCONN
        assert "no server stays alive: readers get errors from now on" in log.read_text()
    finally:
        made.unmount()


def test_a_supervisor_that_was_started_by_a_server_ends_with_the_mount(
    fs: StripeFS, tmp_path: Path, config: Config
) -> None:
    for how in ("unmount", "sigterm"):
        made = fsmount.start(fs.url, tmp_path / "mnt", config=config)
        first = made.pid
        os.kill(first, signal.SIGKILL)
        until(lambda made=made, first=first: made.pid != first, what="another supervisor")
        supervisor = made.pid
        if how == "sigterm":
            os.kill(supervisor, signal.SIGTERM)
            until(lambda made=made: not made.status().alive, 20, "the end of the server")
        made.unmount()
        assert not born(supervisor)
        assert not mounts.is_mounted(made.mountpoint)
    assert not list(Path(config.state_dir, "fs").iterdir())


def test_two_starts_at_once_are_one_mount(fs: StripeFS, tmp_path: Path, config: Config) -> None:
    def start(_: int) -> FsMount | BootseerError:
        try:
            return fsmount.start(fs.url, tmp_path / "mnt", config=config)
        except BootseerError as exc:
            return exc

    found = together(start, range(4))
    (made,) = [one for one in found if isinstance(one, FsMount)]
    try:
        assert all(isinstance(one, FsMount | NotWritableError) for one in found)
        assert len([entry for entry in mounts.entries() if entry.target == str(made.mountpoint)]) == 1
        assert made.status().alive
    finally:
        made.unmount()
    assert not list(Path(config.state_dir, "fs").iterdir())


def test_sigterm_ends_all_processes_also_without_a_server(fs: StripeFS, tmp_path: Path, config: Config) -> None:
    for kill in (False, True):
        made = fsmount.start(fs.url, tmp_path / "mnt", config=config)
        status = made.status()
        if kill:
            os.kill(status.server_pid, signal.SIGKILL)
        os.kill(status.pid, signal.SIGTERM)
        until(lambda made=made: not made.status().alive, 20, "the end of the supervisor")
        assert not born(status.server_pid)
        assert not mounts.is_mounted(made.mountpoint)
        made.unmount()
