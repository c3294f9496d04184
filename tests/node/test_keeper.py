"""A keeper and the one that takes over, over one marked file: the test is holder and fetcher."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.blocks.serving import takeover
from bootseer.blocks.serving.channel import Again, Came, Channel, Wanted
from bootseer.blocks.serving.keeper import Keeper
from bootseer.blocks.serving.shared import Count, Shared
from bootseer.errors import BootseerError
from bootseer.kernel import fanotify
from bootseer.testing.waits import until

pytestmark = pytest.mark.root

BLOCK = 64 << 10
COUNT = 8
DATA = random.Random(5).randbytes(COUNT * BLOCK)


class Tree:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "data"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        os.truncate(self.fd, len(DATA))
        self.shared = Shared.create(COUNT, len(DATA) // 4096, size=len(DATA), block_size=BLOCK)
        self.counts = self.shared.counts
        self.counts[Count.DEADLINE_MS] = 30_000
        self.near, self.far = Channel.pair()
        self.group = fanotify.Group.open()
        self.group.mark(self.fd)
        self.pool = ThreadPoolExecutor(8)
        self.pids: list[int] = []

    def start(self, body: Callable[[], object]) -> int:
        pid = os.fork()
        if not pid:
            try:
                body()
            finally:
                os._exit(0)
        self.pids.append(pid)
        return pid

    def keep(self) -> int:
        self.counts[Count.FRONT_STARTS] += 1
        me = os.getpid()
        pid = self.start(lambda: Keeper(self.shared, self.group, self.near, me, lambda: 0).run())
        until(lambda: self.counts[Count.FRONT_READY] == self.counts[Count.FRONT_STARTS])
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.pids.remove(pid)

    def take_and_die(self, kill_at: str) -> None:
        """A keeper that reads one batch of events and dies at once, or right after the journal has it."""
        self.counts[Count.FRONT_STARTS] += 1

        def body() -> None:
            poll = select.poll()
            poll.register(self.group.fileno(), select.POLLIN)
            poll.poll(5000)
            time.sleep(0.05)  # for all that are on their way
            for event in self.group.events(self.shared.events):
                if kill_at == "journal":
                    self.shared.journal(event.fd, event.offset, event.length, event.pid)
            os.kill(os.getpid(), signal.SIGKILL)

        pid = self.start(body)
        os.waitpid(pid, 0)
        self.pids.remove(pid)

    def read(self, block: int) -> Future[bytes]:
        def work() -> bytes:
            fd = os.open(self.path, os.O_RDONLY)
            try:
                return os.pread(fd, 5000, block * BLOCK)
            finally:
                os.close(fd)

        return self.pool.submit(work)

    def fill(self, block: int) -> None:
        os.pwrite(self.fd, DATA[block * BLOCK : (block + 1) * BLOCK], block * BLOCK)
        self.shared.ready[block] = 1

    def wanted(self) -> Wanted:
        message = self.far.receive(timeout=5)
        assert isinstance(message, Wanted)
        return message

    def close(self) -> None:
        for pid in list(self.pids):
            self.kill(pid)
        self.group.unmark(self.fd)
        self.group.close()  # lets everybody go
        self.pool.shutdown()
        self.near.close()
        self.far.close()
        self.shared.close()
        os.close(self.fd)


def right(block: int) -> bytes:
    return DATA[block * BLOCK : block * BLOCK + 5000]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    yield tree
    tree.close()


def test_ready_is_allowed_and_missing_waits(tree: Tree) -> None:
    tree.fill(1)
    tree.keep()
    assert tree.read(1).result(5) == right(1)
    waits = tree.read(2)
    wanted = tree.wanted()
    assert (wanted.first, wanted.last) == (2, 2)
    assert wanted.pid > 0
    (one,) = tree.shared.outstanding()
    assert one.offset == 2 * BLOCK
    tree.fill(2)
    tree.far.send(Came(wanted.id))
    assert waits.result(5) == right(2)
    until(lambda: tree.shared.outstanding() == [])
    assert tree.counts[Count.SLOW_FAULTS] == 1
    until(lambda: tree.shared.events[:64] == bytes(64))


@pytest.mark.parametrize("answer", [errno.EIO, 0])
def test_what_does_not_come_is_an_error(tree: Tree, answer: int) -> None:
    """Also when the fetcher says that it came and it is not there."""
    tree.keep()
    waits = tree.read(2)
    tree.far.send(Came(tree.wanted().id, answer))
    with pytest.raises(OSError, match="Input/output"):
        waits.result(5)


def test_a_fetcher_that_starts_anew_hears_again_what_is_wanted(tree: Tree) -> None:
    tree.keep()
    waits = tree.read(3)
    first = tree.wanted()
    tree.far.send(Again())
    assert tree.wanted() == first
    tree.fill(3)
    tree.far.send(Came(first.id))
    tree.far.send(Came(first.id))
    assert waits.result(5) == right(3)
    assert tree.read(3).result(5) == right(3)


def test_no_hope_is_an_error_at_once(tree: Tree) -> None:
    tree.keep()
    waits = tree.read(3)
    tree.wanted()
    tree.counts[Count.DOOMED] = 1
    with pytest.raises(OSError, match="Input/output"):
        waits.result(5)
    with pytest.raises(OSError, match="Input/output"):
        tree.read(4).result(5)


@pytest.mark.parametrize("kill_at", ["read", "journal"])
def test_an_event_of_a_dead_keeper_is_answered_by_the_next(tree: Tree, kill_at: str) -> None:
    waits = tree.read(1)
    tree.take_and_die(kill_at)
    tree.fill(1)
    tree.keep()
    assert waits.result(5) == right(1)
    assert tree.counts[Count.TAKEN_OVER] == 1
    assert tree.counts[Count.DENIED] == 0


@pytest.mark.parametrize("kill_at", ["read", "journal"])
def test_events_of_old_and_new_keepers_are_never_mixed_up(tree: Tree, kill_at: str) -> None:
    """Both would get the same descriptor numbers, and the answer for one would let the other's reader see zeros."""
    old = [tree.read(block) for block in (1, 4, 5)]
    time.sleep(0.2)
    tree.take_and_die(kill_at)
    tree.keep()
    wanted = {message.first: message for message in (tree.wanted() for _ in old)}
    young = [tree.read(block) for block in (2, 3)]
    wanted |= {message.first: message for message in (tree.wanted() for _ in young)}
    numbers = [one.fd for one in tree.shared.outstanding()]
    assert len(set(numbers)) == 5
    for blocks, futures in (((2, 3), young), ((5, 4, 1), old[::-1])):
        for block, future in zip(blocks, futures, strict=True):
            assert not future.done()
            tree.fill(block)
            tree.far.send(Came(wanted[block].id))
            assert future.result(5) == right(block)


def test_what_nobody_knows_of_is_denied(tree: Tree) -> None:
    waits = tree.read(1)
    tree.take_and_die("read")
    takeover.clear_events(tree.shared)
    tree.keep()
    with pytest.raises(OSError, match="Input/output"):
        waits.result(5)
    assert tree.counts[Count.DENIED] == 1


def test_no_keeper_at_all_denies_everything(tree: Tree) -> None:
    one = tree.read(1)
    tree.take_and_die("journal")
    two = tree.read(2)
    takeover.deny_all(tree.shared, tree.group, 0.3)
    for future in (one, two):
        with pytest.raises(OSError, match="Input/output"):
            future.result(5)


def test_a_keeper_told_to_end_answers_first(tree: Tree) -> None:
    pid = tree.keep()
    waits = tree.read(1)
    wanted = tree.wanted()
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert not waits.done()
    tree.fill(1)
    tree.far.send(Came(wanted.id))
    assert waits.result(5) == right(1)
    os.waitpid(pid, 0)
    tree.pids.remove(pid)


def test_first_touches_are_noted(tree: Tree) -> None:
    tree.counts[Count.RECORDING] = 1
    tree.counts[Count.BEGAN_NS] = time.monotonic_ns()
    tree.fill(1)
    tree.keep()
    tree.read(1).result(5)
    tree.read(1).result(5)
    touches = tree.shared.touch_log.since(0)
    assert touches[0][2] == BLOCK // 4096
    assert touches[0][1] > 0


def test_a_damaged_buffer_is_swept(tree: Tree) -> None:
    tree.shared.events[:4] = (7).to_bytes(4, "little")
    assert takeover.unanswered(tree.shared) == {}
    with pytest.raises(BootseerError):
        fanotify.parse(tree.shared.events, 7)
