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
RATIO_AGAIN = 2.0
"""The same, on a DataNode that held up another block: than any pipeline without such a one."""


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
            if run.elapsed < AGAIN or run.waited < FREE * run.elapsed:
                return ()
            return self._slow_again(key, run) or self._slow_now(key, run)

    def _slow_again(self, key: int, run: Run) -> list[DataNode]:
        """Who held up another file before needs less proof: while that one was left, the writer of this one had nothing
        to wait for. But it may have recovered, or have been in bad company.
        """
        for name, other in self._now.items():
            if name != key and _quick(other, run):
                self._slow.difference_update(node.uuid for node in other.nodes)
        known = [node for node in run.nodes if node.uuid in self._slow]
        if not known:
            return []
        rates = [
            other.rate
            for other in self._others(key)
            if _settled(other) and self._slow.isdisjoint(node.uuid for node in other.nodes)
        ]
        if rates:
            return known if max(rates) >= RATIO_AGAIN * run.rate else []
        return known if run.waited >= HELD_UP * run.elapsed else []

    def _slow_now(self, key: int, run: Run) -> list[DataNode]:
        if run.elapsed < ENOUGH or run.waited < HELD_UP * run.elapsed:
            return []
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


def _settled(other: Run) -> bool:
    """Whether its rate says something: with a full window it only hides for now that it is slow, too."""
    return other.elapsed >= ENOUGH / 2 and other.backlog <= FREE


def _quick(other: Run, run: Run) -> bool:
    return _settled(other) and other.waited <= FREE * other.elapsed and other.rate >= RATIO * run.rate
