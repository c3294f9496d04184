"""Which DataNodes new blocks go to: stripes written together use all alike, and none uses one that just failed.

The NameNode chooses the DataNodes of a block; a client may name those that it would like, and some to leave out.

Concurrency: any thread may call anything. The lock of the counts is never held during a request; that of the list of
DataNodes is.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import BootseerError

if TYPE_CHECKING:
    from bootseer.hdfs.namenode import NameNode
    from bootseer.hdfs.records import DataNode

_log = logging.getLogger(__name__)

SHUNNED = 60.0
"""Seconds for which new blocks avoid a DataNode after it failed in a pipeline."""
ENOUGH = 0.5
"""Seconds over which it is measured how a pipeline does; one that is slow has been so twice in a row."""
HELD_UP, FREE = 0.7, 0.3
"""Shares of its time that a writer waits for its pipeline: for a slow one at least, for a quick one at most."""
SLOW = 1 / 3
"""Of the largest rate that a pipeline of the same files has had: a slow one has less. To leave a DataNode that is only
busier than others costs more than it brings."""
_ASK = 5.0
_KNOWN = 60.0
"""Seconds for which a list of the DataNodes is good enough."""

shunned_nodes: dict[str, tuple[float, DataNode, bool]] = {}  # until when, and whether it is only slow, by uuid
live_nodes: dict[str, tuple[float, list[DataNode]]] = {}  # since when, by the URL of the NameNode
_lock, _asking = threading.Lock(), threading.Lock()


def _renew_locks() -> None:
    global _lock, _asking
    _lock, _asking = threading.Lock(), threading.Lock()  # a forked child may have inherited them locked


os.register_at_fork(after_in_child=_renew_locks)


def shun(nodes: Iterable[DataNode], *, slow: bool = False) -> None:
    """Leave ``nodes``, which failed or are only ``slow``, out of new blocks of this process for `SHUNNED` seconds."""
    until = time.monotonic() + SHUNNED
    failed = shunned(slow=False)
    with _lock:
        shunned_nodes.update((node.uuid, (until, node, slow and node not in failed)) for node in nodes)


def shunned(*, slow: bool = True) -> list[DataNode]:
    """The DataNodes to leave out now: those that failed and, with ``slow``, those that are only slow."""
    now = time.monotonic()
    with _lock:
        return [node for until, node, only_slow in shunned_nodes.values() if until > now and (slow or not only_slow)]


def live(namenode: NameNode) -> list[DataNode]:
    """The DataNodes that ``namenode`` counts as alive; none where it tells only its superuser, or does not answer.

    One thread asks while the others wait, at most `_ASK` seconds: the stripes of a process's first file begin together,
    and without a list two would share a DataNode.
    """
    with _asking:
        since, nodes = live_nodes.get(namenode.url, (0.0, []))
        if not since or time.monotonic() - since >= _KNOWN:
            try:
                nodes = namenode.live_nodes(deadline=_ASK)
            except BootseerError as exc:
                _log.info("blocks go wherever the NameNode says: %s", exc)
                nodes = []
            live_nodes[namenode.url] = time.monotonic(), nodes
        return nodes


class Run(NamedTuple):
    """How a pipeline did for a while: the share of it that its writer ``waited``, and its ``rate`` in bytes per second.

    ``backlog``: the share of the window that is not acknowledged; a full one hides for now that a pipeline is slow.
    """

    nodes: tuple[DataNode, ...]
    waited: float
    rate: float
    backlog: float

    @property
    def quick(self) -> bool:
        return self.waited <= FREE and self.backlog <= FREE


class Placement:
    """Shared by files that are written at the same time, so that they burden all DataNodes alike.

    What the NameNode tells of its DataNodes needs superuser rights; without them, and ``alone`` (one file), it chooses.
    A ``file`` is any number that stands for one of them.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._placed: dict[int, tuple[DataNode, ...]] = {}  # by file: who has its block, or is wished to have it
        self._runs: dict[int, Run] = {}  # by file
        self._slow: set[str] = set()  # by uuid
        self._best = 0.0  # bytes per second of one pipeline
        self._lock = threading.Lock()

    def wish(self, file: int, namenode: NameNode, replicas: int) -> list[DataNode]:
        """The DataNodes with the fewest replicas now; they count for ``file`` from now on.

        Racks as HDFS chooses them: the second replica on another rack than the first, the third beside the second.
        Rather two that have no other block together: when they hold up two files, nobody tells which of them does.
        """
        if self._alone:
            return []
        avoided = {node.uuid for node in shunned()}
        able = [node for node in live(namenode) if node.uuid not in avoided]
        random.shuffle(able)  # else every process would begin with the same ones
        chosen: list[DataNode] = []
        with self._lock:
            self._placed.pop(file, None)
            used = Counter(node.uuid for nodes in self._placed.values() for node in nodes)
            while able and len(chosen) < replicas:
                beside = Counter(
                    node.uuid for nodes in self._placed.values() if set(chosen) & set(nodes) for node in nodes
                )
                chosen.append(min(able, key=lambda node: (not _fits(node, chosen), used[node.uuid], beside[node.uuid])))
                able.remove(chosen[-1])
            self._placed[file] = tuple(chosen)
        return chosen

    def begin(self, file: int, nodes: tuple[DataNode, ...]) -> None:
        """``nodes`` take part in a new pipeline of ``file``; they count until `end`.

        Whoever was slow is measured anew: nobody else may have been there.
        """
        with self._lock:
            self._placed[file] = nodes
            self._slow.difference_update(node.uuid for node in nodes)

    def end(self, file: int) -> None:
        """The block of ``file`` is written, or given up."""
        with self._lock:
            self._placed.pop(file, None)
            self._runs.pop(file, None)

    def slow(self, file: int, nodes: Sequence[DataNode], run: Run | None) -> list[DataNode]:
        """Those of ``nodes``, which have the block of ``file``, that it had better leave. ``run``: how it does, if that
        was measured since it was asked last.

        They hold it up, and others that are written with it are quick. Files that are written together get their bytes
        in turn, so the slowest pipeline sets the pace of all. Nobody tells which DataNode of it is slow, but one that
        takes part in a quick pipeline is not.
        """
        with self._lock:
            if run is not None:
                before, self._runs[file] = self._runs.get(file), run
                self._best = max(self._best, run.rate)
                if before is not None and self._holds_up(before) and self._holds_up(run):
                    quick = {node.uuid for other in self._runs.values() if other.quick for node in other.nodes}
                    self._slow |= {node.uuid for node in run.nodes if quick and node.uuid not in quick}
            return [node for node in nodes if node.uuid in self._slow]

    def _holds_up(self, run: Run) -> bool:
        return run.waited >= HELD_UP and run.rate < SLOW * self._best


def _fits(node: DataNode, chosen: Sequence[DataNode]) -> bool:
    """Whether the rack of ``node`` is right for the next replica after ``chosen``."""
    if len(chosen) == 1:
        return node.rack != chosen[0].rack
    return len(chosen) != 2 or chosen[0].rack == chosen[1].rack or node.rack == chosen[1].rack
