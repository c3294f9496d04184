"""Troubles of a block server's parts that no kernel feature is needed for."""

from __future__ import annotations

import errno
import os
import resource
import select
import threading
from pathlib import Path

import pytest

from bootseer.blocks.cache import eviction
from bootseer.blocks.cache.locks import OwnedFolder, take_lock
from bootseer.blocks.serving import driver, pulse, takeover
from bootseer.blocks.serving.child import Child
from bootseer.blocks.serving.guarded import guard_in_use
from bootseer.blocks.serving.pulse import Watch, beat
from bootseer.blocks.serving.shared import Count, Shared
from bootseer.kernel.fanotify import Buffer, Event, Group


def shared() -> Shared:
    return Shared.create(10, 100, size=40960, block_size=4096)


def test_a_lock_held_at_a_fork_does_not_hold_up_the_child() -> None:
    one = shared()
    one.counts[Count.RECORDING] = 1
    with one.touch_log._lock:  # as by a thread that is in `touch`
        pid = os.fork()
        if not pid:
            one.forked()
            thread = threading.Thread(target=one.touch, args=(0, 4096, 1), daemon=True)
            thread.start()
            thread.join(3.0)
            os._exit(thread.is_alive())
    assert os.waitpid(pid, 0)[1] == 0
    assert len(one.touch_log) == 1
    one.close()


def test_a_failed_fork_is_a_dead_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", fail)
        child = Child("part", lambda: 0, lambda: None)
    assert child.dead
    assert (child.pid, child.failures) == (0, 1)
    assert child.wait_seconds > 0
    child.kill()
    again = Child("part", lambda: 3, lambda: None, child)
    assert again.failures == 2
    again.end(5.0)
    assert again.code == 3


def test_a_child_that_cannot_be_watched_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    forked, fork = [], os.fork

    def note() -> int:
        forked.append(fork())
        return forked[0]

    monkeypatch.setattr(os, "pidfd_open", fail)
    monkeypatch.setattr(os, "fork", note)
    assert Child("part", lambda: len(select.select([], [], [], 60)), lambda: None).dead
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    counts = memoryview(bytearray(16)).cast("Q")
    watch = Watch(counts, 1, 3.0)

    def silent(seconds: float = 1.0) -> bool:
        clock[0] += seconds
        return watch.silent()

    assert not any(silent() for _ in range(20))  # it never was up
    for _ in range(10):
        beat(counts, 1)
        assert not silent()
    assert [silent() for _ in range(3)] == [False, False, True]
    watch.restart()
    assert not silent(1000.0)  # the watcher itself did not run for long
    assert [silent(), silent()] == [False, True]
    counts[1] = (1 << 64) - 1
    beat(counts, 1)


class FullGroup(Group):
    """A group whose events can no more be read or denied for want of descriptors."""

    asked = 0

    def events(self, buffer: Buffer) -> list[Event]:
        self.asked += 1
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    def deny(self, fd: int, number: int = 0) -> bool:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_denying_goes_on_without_descriptors() -> None:
    one, (read_fd, write_fd) = shared(), os.pipe()
    os.write(write_fd, b".")
    group = FullGroup(read_fd)
    takeover.deny_all(one, group, 0.1)
    assert group.asked > 1
    assert one.counts[Count.DENIED] == group.asked
    group.close()
    os.close(write_fd)
    one.close()


def test_a_low_limit_of_descriptors() -> None:
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        most = takeover.raise_descriptor_limit()
        os._exit(0 if most == resource.getrlimit(resource.RLIMIT_NOFILE)[1] else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_folder_in_a_cache_folder_goes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / ("ab" * 32)
    (folder / ".canary-x").mkdir(parents=True)
    (folder / ".canary-x" / "data").touch()
    for name in ("lock", "data", "bitmap"):
        (folder / name).touch()
    eviction.remove_blocks(OwnedFolder(folder, -1))
    assert not folder.exists()


def test_who_guards_nothing() -> None:
    assert not guard_in_use([os.getpid()])
    pid = os.fork()
    if not pid:
        os._exit(0)
    fd = os.pidfd_open(pid)
    select.select([fd], [], [], 5.0)
    os.close(fd)
    assert not guard_in_use([pid])
    os.waitpid(pid, 0)
    assert not guard_in_use([pid])


def test_room_that_others_count_on(tmp_path: Path) -> None:
    for name in ("own", "used", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        with open(tmp_path / name / "data", "wb") as data:
            data.write(bytes(range(256)) * 256)
            data.truncate(5 << 20)
            os.fsync(data.fileno())
    (tmp_path / "broken").mkdir()
    locks = [take_lock(tmp_path / name) for name in ("own", "used")]
    assert (5 << 20) - (128 << 10) <= driver.promised_bytes(tmp_path / "own") <= (5 << 20) - (64 << 10)
    for lock in locks:
        os.close(lock)
    assert driver.promised_bytes(tmp_path / "own") == 0
