"""The FUSE server of a tree over a real mount: the test is its supervisor and its fetcher."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from bootseer.blocks.serving import fuse_server
from bootseer.blocks.serving.ipc import Came, Channel, Message, Repeat, Wanted
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.kernel import fuse, mount
from support.waits import until

pytestmark = pytest.mark.root

BLOCK = 64 << 10
COUNT = 48
SIZE = COUNT * BLOCK - 1234
DATA = random.Random(3).randbytes(SIZE)


class Tree:
    """A mounted data file, all of its blocks missing; `serve` forks a FUSE server, the methods play the fetcher."""

    def __init__(self, folder: Path, seconds: float = 30) -> None:
        self.folder = folder / "fuse"
        self.folder.mkdir()
        self.path = self.folder / "data"
        self.fd = os.open(folder / "cache", os.O_RDWR | os.O_CREAT)
        os.truncate(self.fd, SIZE)
        self.shared = SharedMemory(COUNT, size=SIZE, block_size=BLOCK)
        self.counts = self.shared.counts
        self.counts[Count.DEADLINE_MS] = int(seconds * 1000)
        self.near, self.far = Channel.pair()
        self.device = fuse_server.mount(self.folder)
        self.pid = 0

    def serve(self, supervisor: int | None = None) -> None:
        self.counts[Count.SERVER_STARTS] += 1
        supervisor = supervisor or os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                own = {self.device.fd, self.fd, self.near.fileno()}
                for fd in range(3, 256):
                    if fd not in own and "bootseer-shared" not in _target(fd):
                        with contextlib.suppress(OSError):
                            os.close(fd)
                fuse_server.FuseServer(self.shared, self.device, self.near, self.fd, supervisor).run()
                os._exit(0)
            finally:
                os._exit(1)
        until(lambda: self.counts[Count.SERVER_READY] == self.counts[Count.SERVER_STARTS])

    def receive(self, seconds: float = 0.0) -> Message | None:
        got = self.far.receive(timeout=seconds)
        return got[0] if got is not None else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def wanted(self, seconds: float = 5) -> Wanted:
        message = self.receive(seconds)
        assert isinstance(message, Wanted), message
        return message

    def fill(self, first: int, last: int) -> None:
        os.pwrite(self.fd, DATA[first * BLOCK : (last + 1) * BLOCK], first * BLOCK)
        self.shared.ready[first : last + 1] = b"\1" * (last + 1 - first)

    def read(self, offset: int, length: int) -> Future[bytes]:
        future: Future[bytes] = Future()

        def work() -> None:
            try:
                fd = os.open(self.path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead: it would ask for more blocks
                try:
                    future.set_result(os.pread(fd, length, offset))
                finally:
                    os.close(fd)
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=work, daemon=True).start()
        return future

    def close(self) -> None:
        if mount.is_mounted(self.folder):
            mount.unmount(self.folder, lazy=True, force=True)
        self.device.close()
        if self.pid:
            self.kill()
        self.near.close()
        self.far.close()
        os.close(self.fd)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    tree.serve()
    yield tree
    tree.close()


def test_ready_blocks_ask_nobody(tree: Tree) -> None:
    tree.fill(0, COUNT - 1)
    assert tree.path.read_bytes() == DATA
    for offset, length in ((5, 100), (BLOCK - 1, 3 * BLOCK), (SIZE - 10, 100)):
        assert tree.read(offset, length).result(20) == DATA[offset : offset + length]
    assert tree.receive() is None
    assert tree.counts[Count.READS] > 0
    assert tree.counts[Count.SLOW_FAULTS] == 0


def test_a_missing_block_is_asked_for_and_waited_for(tree: Tree) -> None:
    tree.fill(0, 3)
    got = tree.read(4 * BLOCK - 100, 200)
    wanted = tree.wanted()
    assert (wanted.first, wanted.last) in ((3, 4), (4, 4))
    assert wanted.pid
    assert not got.done()
    tree.fill(4, 4)
    assert tree.far.send(Came(wanted.id))
    assert got.result(20) == DATA[4 * BLOCK - 100 : 4 * BLOCK + 100]
    assert tree.counts[Count.SLOW_FAULTS] == 1
    assert tree.counts[Count.STALL_NS] > 0


def test_bytes_that_cannot_be_cached_come_along(tree: Tree) -> None:
    got = tree.read(7 * BLOCK + 4096, 4096)
    wanted = tree.wanted()
    fd = os.memfd_create("bytes")
    os.write(fd, DATA[wanted.first * BLOCK : (wanted.last + 1) * BLOCK])
    assert tree.far.send(Came(wanted.id), fd=fd)
    os.close(fd)
    assert got.result(20) == DATA[7 * BLOCK + 4096 : 7 * BLOCK + 8192]


@pytest.mark.parametrize("lie", [False, True])
def test_a_failed_block_is_an_error_and_then_asked_for_again(tree: Tree, lie: bool) -> None:
    got = tree.read(0, 4096)
    seen = []
    while not got.done():  # the kernel may repeat a failed readahead
        message = tree.receive(0.05)
        if isinstance(message, Wanted):
            seen.append(message.id)
            tree.far.send(Came(message.id, 0 if lie else errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        got.result(20)
    assert len(set(seen)) == len(seen) >= 1
    assert tree.counts[Count.FAILED_READS] == len(seen)
    got = tree.read(0, 4096)
    wanted = tree.wanted()
    tree.fill(0, 0)
    tree.far.send(Came(wanted.id))
    assert got.result(20) == DATA[:4096]


def test_a_fetcher_that_starts_anew_is_told_again(tree: Tree) -> None:
    reads = [tree.read(block * BLOCK, 100) for block in range(8)]
    lost = {tree.wanted().id for _ in range(8)}
    assert tree.far.send(Repeat())
    again = [tree.wanted() for _ in range(8)]
    assert {wanted.id for wanted in again} == lost
    tree.fill(0, 7)
    for wanted in again:
        tree.far.send(Came(wanted.id))
    assert [read.result(20) for read in reads] == [DATA[at : at + 100] for at in range(0, 8 * BLOCK, BLOCK)]


@pytest.mark.takeover
def test_a_killed_server_is_replaced_and_no_reader_notices(tree: Tree) -> None:
    reads = [tree.read(block * BLOCK, 100) for block in range(12)]
    before = {tree.wanted().id for _ in range(12)}
    tree.kill()
    reads += [tree.read(block * BLOCK, 100) for block in range(12, 16)]
    time.sleep(0.05)
    assert not any(read.done() for read in reads)
    tree.serve()
    after = [tree.wanted() for _ in range(16)]
    assert not before & {wanted.id for wanted in after}
    tree.far.send(Came(before.pop()))  # an answer to the dead one
    tree.fill(0, 15)
    for wanted in after:
        tree.far.send(Came(wanted.id))
    assert [read.result(20) for read in reads] == [DATA[at : at + 100] for at in range(0, 16 * BLOCK, BLOCK)]
    assert tree.counts[Count.TAKEN_OVER] == 12


def test_without_its_supervisor_it_ends_and_readers_get_errors(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    supervisor = os.fork()
    if supervisor == 0:
        signal.pause()
    try:
        tree.serve(supervisor)
        got = tree.read(0, 4096)
        tree.wanted()
        tree.device.close()  # as the supervisor's death would
        tree.device = fuse.Device(tree.folder, None, -1)
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        with pytest.raises(OSError, match=r"Input/output error|abort|not connected"):
            got.result(20)
        until(lambda: os.waitpid(tree.pid, os.WNOHANG)[0])
        tree.pid = 0
        with pytest.raises(OSError, match=r"abort|not connected"):
            tree.read(0, 4096).result(20)
    finally:
        tree.close()


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_block_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_server, "_SLACK", 0.1)
    tree = Tree(tmp_path, seconds=0.1)
    try:
        tree.serve()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            tree.read(0, 4096).result(20)
        assert tree.counts[Count.DENIED] >= 1
        tree.counts[Count.HOPELESS] = 1
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            tree.read(0, 4096).result(20)
    finally:
        tree.close()


@pytest.mark.parametrize("fatal", [True, False])
def test_signals_to_a_waiting_reader(tree: Tree, fatal: bool) -> None:
    """A kill frees it at once; any other signal must not turn into an error."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            fd = os.open(tree.path, os.O_RDONLY)
            # a fault of a mapping without readahead waits for its own request; read(2) waits for the page only
            mapped = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
            mapped.madvise(mmap.MADV_RANDOM)
            os.write(tell, mapped[:100])
        finally:
            os._exit(0)
    wanted = tree.wanted()
    if fatal:
        os.kill(pid, signal.SIGKILL)
        until(lambda: os.waitpid(pid, os.WNOHANG)[0])
    else:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        tree.fill(0, 0)
        tree.far.send(Came(wanted.id))
        # had the request been answered EINTR, the fault would be repeated, as one that nobody answers
        assert tree.receive(0.2) is None
        until(lambda: os.waitpid(pid, os.WNOHANG)[0])
        assert os.read(told, 200) == DATA[:100]
    os.close(told)
    os.close(tell)


def test_first_touches_are_noted(tree: Tree) -> None:
    tree.fill(0, COUNT - 1)
    tree.counts[Count.BEGAN_NS] = time.monotonic_ns()
    tree.counts[Count.RECORDING] = 1
    tree.read(5 * BLOCK, 4096).result(20)
    tree.read(9 * BLOCK, 8192).result(20)
    touches = tree.shared.trace.since(0)
    units = [unit for _, _, first, count in touches for unit in range(first, first + count)]
    assert {5 * BLOCK // 4096, 9 * BLOCK // 4096, 9 * BLOCK // 4096 + 1} <= set(units)
    assert all(pid for _, pid, _, _ in touches)
