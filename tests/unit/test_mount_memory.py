"""What a server of a striped mount leaves for the next one."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from bootseer.fsmount.memory import Count, Known, MountMemory
from bootseer.fsmount.nodes import Nodes
from bootseer.kernel import fuse

ATTR = fuse.Attr(mode=0o100644, size=5)
ROOT = Known(fuse.ROOT, b"", "", "", ATTR)


def successor(memory: MountMemory) -> tuple[list[Known], Nodes]:
    """The nodes as the next server finds them, in a process of its own."""
    other = MountMemory([os.dup(fd) for fd in memory.fds])
    known = other.journal.read()
    return known, Nodes(None, known=known, journal=other.journal, generation=1)


def test_the_next_server_knows_the_nodes_that_the_kernel_may_know() -> None:
    memory = MountMemory()
    nodes = Nodes(ROOT, journal=memory.journal)
    old = nodes.enter(b"a", "one", "1", ATTR)
    new = nodes.enter(b"a", "two", "2", ATTR)
    gone = nodes.enter(b"b", "three", "1", ATTR)
    nodes.forget(gone, 1)
    nodes.change(new, backing=7)
    known, after = successor(memory)
    assert [node.number for node in known] == [fuse.ROOT, old, new]
    assert after.backings() == {new: 7}
    found = after.find(b"a", "2")
    assert found is not None
    assert found.number == new
    assert after.enter(b"c", "four", "1", ATTR) not in (old, new, gone)


def test_a_long_journal_is_written_anew_and_says_the_same() -> None:
    memory = MountMemory()
    nodes = Nodes(ROOT, journal=memory.journal)
    old, new = nodes.enter(b"a", "one", "1", ATTR), nodes.enter(b"a", "two", "2", ATTR)
    longest = 0
    for size in range(25_000):
        nodes.change(old, attr=ATTR._replace(size=size))
        longest = max(longest, memory.counts[Count.JOURNAL] % (1 << 40))
    assert memory.counts[Count.JOURNAL] % (1 << 40) < longest / 2
    known, after = successor(memory)
    assert {node.number: node.attr.size for node in known} == {fuse.ROOT: 5, old: 24_999, new: 5}
    assert after[new].content == "two"


def test_what_was_told_in_part_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MountMemory()
    nodes = Nodes(ROOT, journal=memory.journal)
    write = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[: len(data) // 2], at))  # memory is full
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            nodes.enter(b"a", "one", "1", ATTR)
    assert [node.number for node in successor(memory)[0]] == [fuse.ROOT]
    number = nodes.enter(b"a", "one", "1", ATTR)
    assert [node.number for node in successor(memory)[0]] == [fuse.ROOT, number]


def test_a_limit_of_the_size_of_files_does_not_matter() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    memory = MountMemory()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        Nodes(ROOT, journal=memory.journal).enter(b"a", "one", "1", ATTR)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(successor(memory)[0]) == 2
