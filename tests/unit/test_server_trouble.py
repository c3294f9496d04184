"""Troubles of a block server's parts that no kernel feature is needed for."""

from __future__ import annotations

import errno
import os
import select
import threading
from pathlib import Path

import pytest

from bootseer.blocks.formats.pagelist import PageList, PageRange
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.serving import child
from bootseer.blocks.serving.child import Child, Watch
from bootseer.blocks.serving.readahead import Readahead
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.store.folder import FolderStore


def test_a_lock_held_at_a_fork_does_not_hold_up_the_child() -> None:
    one = SharedMemory(10, size=40960, block_size=4096)
    one.counts[Count.RECORDING] = 1
    with one.trace._lock:  # as by a thread that is in `touch`
        pid = os.fork()
        if not pid:
            one.trace.forked()
            thread = threading.Thread(target=one.trace.touch, args=(0, 4096, 1), daemon=True)
            thread.start()
            thread.join(3.0)
            os._exit(thread.is_alive())
    assert os.waitpid(pid, 0)[1] == 0
    assert len(one.trace) == 1


def test_a_failed_fork_is_a_dead_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", fail)
        dead = Child("part", lambda: 0)
    assert dead.dead
    assert (dead.pid, dead.failures) == (0, 1)
    assert dead.wait_seconds > 0
    dead.kill()
    again = Child("part", lambda: 3, dead)
    assert again.failures == 2
    select.select([again.fileno()], [], [], 5.0)
    assert again.dead
    assert (again.code, again.ending) == (3, "exit code 3")
    again.end()


def test_a_child_that_cannot_be_watched_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    forked, fork = [], os.fork

    def note() -> int:
        forked.append(fork())
        return forked[0]

    monkeypatch.setattr(os, "pidfd_open", fail)
    monkeypatch.setattr(os, "fork", note)
    assert Child("part", lambda: len(select.select([], [], [], 60))).dead
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(child.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    counts = memoryview(bytearray(16)).cast("Q")
    watch = Watch(counts, 1, 3.0)

    def silent(seconds: float = 1.0) -> bool:
        clock[0] += seconds
        return watch.silent()

    assert not any(silent() for _ in range(20))  # it never was up
    for _ in range(10):
        counts[1] += 1
        assert not silent()
    assert [silent() for _ in range(3)] == [False, False, True]
    watch.restart()
    assert not silent(1000.0)  # the watcher itself did not run for long
    assert [silent(), silent()] == [False, True]


@pytest.mark.parametrize("still", [False, True])
def test_a_readahead_that_is_to_keep_still_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: bool
) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    shared = SharedMemory(1, size=4096, block_size=4096)
    shared.ready[0] = 1
    shared.counts[Count.STILL] = still
    pages = PageList("ab" * 32, "fuse", 1, [PageRange(b"file", 0, 0, 4096)])
    monkeypatch.setattr(Readahead, "_list", lambda self: pages)
    monkeypatch.setattr(Readahead, "_mounted", lambda self: True)
    store = FolderStore(tmp_path / "store")
    Readahead(store, ProfileKey("train"), shared, str(tmp_path), "ab" * 32, lambda: "").run()
    assert shared.counts[Count.READ_AHEAD] == (0 if still else 4096)
    assert not shared.counts[Count.READAHEAD_TID]
