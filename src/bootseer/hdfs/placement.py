"""Which DataNodes new blocks go to: stripes written together use all alike, and none uses one that just failed.

The NameNode chooses the DataNodes of a block; any client may name some to leave out, and some that it would like. So a
new block leaves out those that have blocks of its siblings. Where too few are left, the answer tells which DataNodes
there are in all; then those with the fewest blocks are named, which the NameNode takes even when they are busy.

Concurrency: any thread may call anything. The lock of the counts is never held during a request; `Placement.turn` is.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bootseer.hdfs import probe

if TYPE_CHECKING:
    from bootseer.hdfs.records import DataNode


SHUNNED = 60.0
"""Seconds for which new blocks avoid a DataNode after it failed in a pipeline."""
ENOUGH = 0.25
"""Seconds over which it is measured how a pipeline does; one that is slow has been so twice in a row."""
HELD_UP = 0.7
"""Share of its time that a writer waits for a slow pipeline, at least."""
SLOW = 1 / 3
"""Of the largest rate at which a DataNode has taken what is written together: a slow one takes less, of all blocks. To
leave one that is only busier than others costs more than it brings."""
ANEW = -1.0
"""In place of that share, when a run begins and what was before it does not count."""
_KNOWN = 60.0
"""Seconds for which it is believed which DataNodes there are in all."""
_RUNNING = re.compile(r"There are (\d+) datanode\(s\) running")

shunned_nodes: dict[str, tuple[float, DataNode, bool]] = {}  # until when, and whether it is only slow, by uuid
all_nodes: dict[str, tuple[float, list[DataNode]]] = {}  # until when it is believed, by the URL of the NameNode
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # a forked child may have inherited it locked


os.register_at_fork(after_in_child=_renew_lock)


def shun(nodes: Iterable[DataNode], *, slow: bool = False) -> None:
    """Leave ``nodes``, which failed or are only ``slow``, out of new blocks of this process for `SHUNNED` seconds."""
    until, nodes = time.monotonic() + SHUNNED, list(nodes)
    failed = shunned(slow=False)
    for node in nodes:
        if probe.thawed(node.uuid):  # this time it is for another reason
            probe.forget(node.uuid)
    with _lock:
        shunned_nodes.update((node.uuid, (until, node, slow and node not in failed)) for node in nodes)


def shunned(*, slow: bool = True) -> list[DataNode]:
    """The DataNodes to leave out now: those that failed and, with ``slow``, those that are only slow; none that was
    silent and has answered since."""
    now = time.monotonic()
    with _lock:
        for uuid in [uuid for uuid, (until, *_) in shunned_nodes.items() if probe.thawed(uuid) or until <= now]:
            probe.forget(uuid)
            del shunned_nodes[uuid]
        return [node for _, node, only_slow in shunned_nodes.values() if slow or not only_slow]


def too_few(cluster: str, left_out: Sequence[DataNode], given: Sequence[DataNode], why: str = "") -> None:
    """The NameNode at the URL ``cluster``, asked to leave DataNodes out, has only those that it has ``given``: they are
    all there are. Not when it says ``why`` and counts more: those are busy now, and nobody tells which they are."""
    if (running := _RUNNING.search(why)) is None or int(running[1]) <= len(left_out):
        with _lock:
            all_nodes[cluster] = time.monotonic() + _KNOWN, list(dict.fromkeys([*left_out, *given]))


def _everything(cluster: str) -> list[DataNode]:
    """All DataNodes of a small cluster; none where that is not known."""
    with _lock:
        until, nodes = all_nodes.get(cluster, (0.0, []))
    return list(nodes) if until > time.monotonic() else []


class Choice(NamedTuple):
    """DataNodes that are ``wanted`` for a new block, or ``left_out`` of it. Without either, any will do."""

    wanted: list[DataNode]
    left_out: list[DataNode]


Idle = Callable[[], Callable[[], bool] | None]
"""A weak reference to what says whether DataNodes have acknowledged all that they were given of a file."""


class Placement:
    """Shared by files that are written at the same time, so that they burden all DataNodes alike. A ``file`` is any
    number for one of them. ``turn``: who asks for a new block holds it until `begin`, so that the next one knows."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._placed: dict[int, tuple[DataNode, ...]] = {}  # by file: who has its block
        self._idle: dict[int, Idle] = {}  # by file
        self._copies: dict[int, DataNode] = {}  # by file: to whom its last block is being copied
        self._free: dict[int, tuple[set[str], set[str]]] = {}  # by file that was held up: who was idle, who was late
        self._slow: set[str] = set()  # by uuid
        self._taken = Counter[str]()  # bytes, by uuid
        self._runs: dict[int, tuple[float, Counter[str], dict[str, float]]] = {}  # by file: when, what was taken, rates
        self._best = 0.0  # bytes per second of one DataNode, twice in a row
        self._lock = threading.Lock()

    def choose(self, file: int, cluster: str, replicas: int) -> Choice:
        """Where a new block of ``file`` goes: anywhere while no other file has one and nobody is avoided; not where
        the others have theirs; or, where all DataNodes of ``cluster`` are known, on those with the fewest replicas.

        Racks as HDFS chooses them: the second replica on another rack than the first, the third beside the second.
        Rather two that have no other block together: when they hold up two files, nobody tells which of them does.
        """
        everything, avoided = _everything(cluster), set(shunned())
        able = [node for node in everything if node not in avoided]
        random.shuffle(able)  # else every process would begin with the same ones
        chosen: list[DataNode] = []
        with self._lock:
            self._placed.pop(file, None)
            used = Counter(node for nodes in (*self._placed.values(), self._copies.values()) for node in nodes)
            if not everything or (not used and len(able) == len(everything)):
                return Choice([], list(used))
            while able and len(chosen) < replicas:
                beside = Counter(node for nodes in self._placed.values() if set(chosen) & set(nodes) for node in nodes)
                chosen.append(min(able, key=lambda node: (not _fits(node, chosen), used[node], beside[node])))
                able.remove(chosen[-1])
        return Choice(chosen, [])

    def begin(self, file: int, cluster: str, nodes: tuple[DataNode, ...], idle: Idle = lambda: None) -> None:
        """``nodes`` of ``cluster`` are to take part in a new pipeline of ``file``; they count until that asks for
        the next, or `give_up`: a short file may end before the last of its siblings has begun.

        Whoever was slow is measured anew: nobody else may have been there.
        """
        with _lock:  # one that was busy when all were told
            known = all_nodes.get(cluster, (0.0, []))[1]
            known += [node for node in nodes if node not in known]
        with self._lock:
            self._placed[file], self._idle[file] = nodes, idle
            self._runs.pop(file, None)
            self._begin_run(file)
            self._slow.difference_update(node.uuid for node in nodes)

    def end(self, file: int) -> None:
        """The block of ``file`` is whole: its DataNodes have nothing to do for it, until `begin`."""
        with self._lock:
            if file in self._idle:
                self._idle[file] = _always

    def give_up(self, file: int) -> None:
        """The block of ``file`` is given up."""
        with self._lock:
            self._placed.pop(file, None)
            self._idle.pop(file, None)
            self._free.pop(file, None)
            self._runs.pop(file, None)

    def copy(self, file: int, to: DataNode | None) -> None:
        """The last block of ``file`` is being copied ``to`` a DataNode; None: no longer."""
        with self._lock:
            self._copies.pop(file, None)
            if to is not None:
                self._copies[file] = to

    def took(self, nodes: Sequence[DataNode], length: int) -> None:
        """Each of ``nodes`` has so many bytes more of a file."""
        with self._lock:
            self._taken.update(dict.fromkeys([node.uuid for node in nodes], length))

    def slow(self, file: int, nodes: Sequence[DataNode], waited: float | None) -> list[DataNode]:
        """Those of ``nodes``, which have the block of ``file``, that it had better leave. ``waited``: the share of the
        time since it was asked last that it waited for them, if that was measured, or `ANEW`.

        They hold it up, and others that are written with it are idle meanwhile. Files that are written together get
        their bytes in turn, so the slowest pipeline sets the pace of all. Nobody tells which DataNode of it is slow,
        but one that has nothing to do in another pipeline, or had nothing a run ago, is not; and one had nothing twice.
        Nor is one that takes much of all files together: links are not shared alike by what goes over them. And a copy
        of a block may leave hardly anything of a link for others, so nobody is found while there is one.
        """
        if waited is not None and (waited == ANEW or self._copies):
            with self._lock:
                self._begin_run(file)
        elif waited is not None:
            with self._lock:
                others = [(idle, self._placed.get(other, ())) for other, idle in self._idle.items() if other != file]
            free = {node.uuid for idle, theirs in others if (ask := idle()) and ask() for node in theirs}
            with self._lock:
                rates = self._rates(file)
                free_before, late_before = self._free.pop(file, (set(), set()))
                if waited >= HELD_UP:
                    late = {node.uuid for node in nodes if rates.get(node.uuid, 0.0) < SLOW * self._best} - free
                    self._free[file] = free, late
                    if free & free_before and late & late_before:
                        self._slow |= late & late_before
                        self._best = 0.0  # of those that are left
        with self._lock:
            return [node for node in nodes if node.uuid in self._slow]

    def _begin_run(self, file: int) -> None:
        """It is measured anew who holds ``file`` up: what was before does not count."""
        self._free.pop(file, None)
        rates = self._runs[file][2] if file in self._runs else {}
        self._runs[file] = time.monotonic(), self._taken.copy(), rates

    def _rates(self, file: int) -> dict[str, float]:
        """Bytes per second that each DataNode has taken since ``file`` asked last. What was on its way for another one
        comes in bursts, so twice in a row counts."""
        now = time.monotonic()
        since, taken, before = self._runs.get(file, (now, self._taken, {}))
        seconds = max(now - since, 1e-3)
        rates = {uuid: (count - taken[uuid]) / seconds for uuid, count in self._taken.items()}
        self._best = max([self._best, *(min(rate, before.get(uuid, 0.0)) for uuid, rate in rates.items())])
        self._runs[file] = now, self._taken.copy(), rates
        return rates


def _always() -> Callable[[], bool]:
    return lambda: True


def _fits(node: DataNode, chosen: Sequence[DataNode]) -> bool:
    """Whether the rack of ``node`` is right for the next replica after ``chosen``."""
    if len(chosen) == 1:
        return node.rack != chosen[0].rack
    return len(chosen) != 2 or chosen[0].rack == chosen[1].rack or node.rack == chosen[1].rack
