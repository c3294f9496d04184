"""Troubles of a block server's parts that no kernel feature is needed for."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.formats.pagelist import PageList, PageRange
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.serving.fuse_server import FuseServer, PendingReads
from bootseer.blocks.serving.ipc import Came, Channel, Wanted
from bootseer.blocks.serving.readahead import Readahead
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.blocks.serving.supervisor import Supervisor
from bootseer.kernel import child, fuse
from bootseer.kernel.child import Child, Watch
from bootseer.objects.folder import FolderStore
from bootseer.served.keeper import Kept


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


WITHOUT_PIDFDS = """
import ctypes, errno, os, signal, struct, sys, time
number = int(sys.argv[1])
filter = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 434, 6, 0, 0, 0x50000 | number, 6, 0, 0, 0x7FFF0000)
held = ctypes.create_string_buffer(filter, len(filter))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(held)))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0)  # no new privileges
assert not libc.prctl(22, 2, ctypes.byref(program))
try:
    os.pidfd_open(os.getpid())
except OSError as exc:
    assert exc.errno == number
from bootseer.kernel.child import Child, ended, wait, watched
from bootseer.oci import programs
one = Child("part", lambda: time.sleep(1) or 3)
assert not one.dead
wait([one], 20)
assert one.dead and one.code == 3
one.kill()  # nobody
two = Child("part", lambda: time.sleep(60))
three = Child("part", lambda: time.sleep(60))
adopted = Child.adopt("part", two.pid)
adopted.terminate()
wait([two], 20)
assert two.dead and two.code == -signal.SIGTERM and not three.dead
three.end()
assert not os.path.exists(f"/proc/{three.pid}")
assert Child.adopt("part", three.pid).dead
assert programs.ask("it", ["sh", "-c", "sleep 0.2; cat; exit 4"], b"text", 20.0) == (4, b"text", b"")
before = os.listdir("/proc/self/fd")
for _ in range(20):
    assert ended(fd := watched(os.fork() or os._exit(0)), 20)
    os.close(fd)
until = time.monotonic() + 20
while len(os.listdir("/proc/self/fd")) > len(before):
    assert time.monotonic() < until
print("all")
"""


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_children_are_watched_where_seccomp_refuses_pidfds(number: int) -> None:
    """As container runtimes did that knew no pidfds."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PIDFDS, str(number)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("all\n", "")


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
def test_a_readahead_waits_until_its_blocks_have_come_and_opens_nothing_when_it_is_to_keep_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: bool
) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    shared = SharedMemory(1, size=4096, block_size=4096)
    shared.counts[Count.STILL] = still
    asked = []

    def until(so: Callable[[], bool], timeout: float) -> bool:
        asked.append(so())
        shared.ready[0] = len(asked) == 3
        return so()

    pages = PageList("ab" * 32, 1, [PageRange(b"file", 0, 0, 4096)])
    monkeypatch.setattr(Readahead, "_list", lambda self: pages)
    monkeypatch.setattr(Readahead, "_mounted", lambda self: True)
    store = FolderStore(tmp_path / "store")
    Readahead(store, ProfileKey("train"), shared, str(tmp_path), "ab" * 32, lambda: "", until).run()
    assert asked == [False] * (0 if still else 3)
    assert shared.counts[Count.READ_AHEAD] == (0 if still else 4096)
    assert not shared.counts[Count.READAHEAD_OPEN]


def test_a_readahead_ends_when_it_is_known_that_there_is_no_pack(tmp_path: Path) -> None:
    shared = SharedMemory(1, size=4096, block_size=4096)
    shared.counts[Count.HOT_KNOWN] = 1
    store = FolderStore(tmp_path / "store")
    began = time.monotonic()
    Readahead(store, ProfileKey("train"), shared, str(tmp_path), "ab" * 32, str, lambda so, timeout: so()).run()
    assert time.monotonic() - began < 5


class Rig:
    """The FUSE server of a tree of 4096 blocks whose kernel is the test, which also plays the fetcher, at ``far``."""

    def __init__(self, folder: Path, room: int = 1 << 20) -> None:
        self.shared = SharedMemory(4096, size=4096 << 12, block_size=4096)
        self.shared.counts[Count.DEADLINE_MS] = 60_000
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        self.near, self.far = Channel(near), Channel(far)
        self.answers: list[Any] = []
        self.fd = os.open(folder / "data", os.O_RDWR | os.O_CREAT)
        os.truncate(self.fd, 4096 << 12)
        self.now = 0
        """Seconds."""
        self.pending = self.start()

    def start(self) -> PendingReads:
        """Those of a FUSE server, the first one or one that takes over."""
        self.shared.counts[Count.SERVER_STARTS] += 1
        return PendingReads(
            self.shared, self.near, self.fd, answer=lambda ctx, result: self.answers.append(result), rouse=lambda: None,
            clock=lambda: self.now * 10**9,
        )  # fmt: skip

    def close(self) -> None:
        self.near.close()
        self.far.close()
        os.close(self.fd)


def context(pid: int, offset: int = 0) -> fuse.Context:
    made = fuse.Context(1, 1, pid)
    made.offset, made.size = offset, 4096
    return made


def test_more_readers_than_requests_have_room_are_all_asked_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, room=4096)
    for block in range(2000):
        assert rig.pending.miss(block, block, context(7, block << 12)) is fuse.LATER
    assert rig.pending._unsent
    asked: set[int] = set()
    for _ in range(2000):
        while (got := rig.far.receive()) is not None:  # until none is left: no event tells that there is room now
            assert isinstance(got[0], Wanted)
            rig.shared.ready[got[0].first] = 1
            asked.add(got[0].first)
            rig.far.send(Came(got[0].id))
            rig.pending.take_messages()
        if not rig.pending._unsent:
            break
        assert rig.pending.timeout() == 20
        rig.pending.send()
    assert asked == set(range(2000))
    assert len(rig.answers) == 2000
    assert not any(isinstance(answer, OSError) for answer in rig.answers)
    assert rig.pending.timeout() is None
    rig.close()


def test_seconds_in_which_several_readers_wait_count_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    counts = rig.shared.counts

    def miss(now: int, block: int) -> int:
        rig.now = now
        rig.pending.miss(block, block, context(7, block << 12))
        got = rig.far.receive()
        assert got is not None
        assert isinstance(got[0], Wanted)
        return got[0].id

    def came(now: int, id: int) -> None:
        rig.now = now
        rig.far.send(Came(id))
        rig.pending.take_messages()

    def waited() -> tuple[int, int]:
        return counts[Count.WAITED_NS] // 10**9, counts[Count.WAITING_SINCE_NS] // 10**9

    one, two = miss(10, 1), miss(12, 2)
    came(14, one)
    assert waited() == (0, 10)
    three = miss(15, 3)
    came(17, two)
    came(18, three)
    assert waited() == (8, 0)
    assert counts[Count.STALL_NS] == (4 + 5 + 3) * 10**9
    came(20, three)  # told twice: nobody waits
    assert waited() == (8, 0)
    miss(30, 4)
    rig.now = 95
    rig.pending.expire()
    assert waited() == (8 + 65, 0)
    miss(100, 5)
    rig.now = 103
    rig.pending = rig.start()  # the server has died; the reader has waited until now at least
    assert waited() == (73 + 3, 0)
    miss(110, 6)
    rig.now = 111
    rig.pending.fail_all()
    assert waited() == (76 + 1, 0)
    rig.close()


@pytest.mark.parametrize("tid", [0, 5])
def test_a_miss_by_a_process_of_another_pid_namespace_is_fetched(tmp_path: Path, tid: int) -> None:
    rig = Rig(tmp_path)
    server = FuseServer.__new__(FuseServer)
    server._shared, server._pending = rig.shared, rig.pending
    rig.shared.counts[Count.READAHEAD_TID] = tid
    assert server._read(0, 4096, context(pid=0)) is fuse.LATER
    if tid:
        with pytest.raises(OSError, match="read ahead"):
            server._read(0, 4096, context(pid=tid))
    rig.close()


def test_the_thread_of_a_dead_fetcher_is_nobody() -> None:
    """Its number may be another's a moment later, whose misses are to be fetched."""
    counts = SharedMemory(1, size=4096, block_size=4096).counts
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._counts, supervisor._server = counts, None
    supervisor._fetcher = Kept("fetcher", lambda: 0, counts[Count.FETCHER_PID :][:4], 1.0, adopt=True)
    counts[Count.FETCHER_STARTS] = counts[Count.READAHEAD_OPEN] = 1
    counts[Count.READAHEAD_TID] = 77
    supervisor._fetcher.child._begun = time.monotonic() + 60.0  # it is too early for another
    supervisor._restart()
    assert (counts[Count.READAHEAD_TID], counts[Count.READAHEAD_OPEN]) == (0, 0)
