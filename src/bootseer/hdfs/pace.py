"""Which DataNode holds up files that are written together.

Stripes get their bytes in turn, so the slowest pipeline sets the pace of all, and in bytes per second all are alike.
What tells them apart is how long each made its writer wait, and how much it has not acknowledged. An acknowledgement
does not say which DataNode of a pipeline was slow; but one that takes part in a quick pipeline was not.

Policy only: times and amounts are told by the callers, in seconds and bytes. Concurrency: any thread; a lock guards the
table.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bootseer.hdfs.records import DataNode

ENOUGH = 3.0
"""Seconds that a block is written before it may be called slow."""
AGAIN = 1.0
"""The same, on a DataNode that held up another block."""
HELD_UP, FREE = 0.7, 0.3
"""Shares of the time that the writer waits for a pipeline: for a slow one at least, for a quick one at most."""
RATIO = 4.0
"""How many times slower than a quick pipeline, in bytes per second of waiting, one must be."""


class Run(NamedTuple):
    """How a pipeline does: its DataNodes; since it was set up seconds, bytes, and seconds that its writer waited."""

    nodes: tuple[DataNode, ...]
    elapsed: float
    length: int
    waited: float
    backlog: float = 0.0  # share of the window that is not acknowledged

    @property
    def rate(self) -> float:
        return self.length / max(self.waited, 0.001)


class Pace:
    """The pipelines of files that are written together. ``key`` names a file."""

    def __init__(self) -> None:
        self._now: dict[int, Run] = {}
        self._before: dict[int, Run] = {}
        self._slow: set[str] = set()
        self._lock = threading.Lock()

    def report(self, key: int, run: Run) -> Sequence[DataNode]:
        """Note how far the file ``key`` is; the DataNodes because of which it is slow, if others are much quicker."""
        with self._lock:
            self._now[key] = run
            # who held up another needs less proof: while that one was left, this one's writer had nothing to wait for
            known = [node for node in run.nodes if node.uuid in self._slow]
            enough, held_up = (AGAIN, FREE) if known else (ENOUGH, HELD_UP)
            if run.elapsed < enough or run.waited < held_up * run.elapsed:
                return ()
            if known:
                return known
            fine = {node.uuid for other in self._others(key) if _quick(other, run) for node in other.nodes}
            slow = [node for node in run.nodes if node.uuid not in fine] if fine else []
            self._slow.update(node.uuid for node in slow)
            return slow

    def _others(self, key: int) -> list[Run]:
        found = []
        for other in self._now.keys() - {key}:
            run = self._now[other]
            # a block that has just begun says nothing yet; the one before it does
            found.append(run if run.elapsed >= ENOUGH / 2 else self._before.get(other, run))
        return found

    def ended(self, key: int) -> None:
        """The block of the file ``key`` is written."""
        with self._lock:
            if (run := self._now.get(key)) is not None and run.elapsed >= ENOUGH / 2:
                self._before[key] = run

    def closed(self, key: int) -> None:
        """The file ``key`` is written."""
        with self._lock:
            self._now.pop(key, None)
            self._before.pop(key, None)


def _quick(other: Run, run: Run) -> bool:
    if other.elapsed < ENOUGH / 2 or other.backlog > FREE or other.waited > FREE * other.elapsed:
        return False  # the second: its window only hides for now that it is slow, too
    return other.rate >= RATIO * run.rate
