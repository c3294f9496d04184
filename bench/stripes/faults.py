"""Reads while one DataNode is frozen, killed or slow: before the read begins, or when a third of it is done.

Writes while one is frozen or slow, from when a third is done.
"""

from __future__ import annotations

import time
from functools import partial

from bench.stripes.client import Task
from bench.stripes.runner import Runner
from support.shapedhdfs import ShapedHadoop

SHARE = 0.1
"""What is left of a slow DataNode's link."""
_SETTLE = 0.5


class Faults:
    """Rounds of faults, on one DataNode after another. ``task``: the read, or write, that is disturbed."""

    def __init__(self, site: ShapedHadoop, runner: Runner, task: Task) -> None:
        self._site, self._runner, self._task = site, runner, task

    def round(self, n: int, healthy: float) -> None:
        """The three faults of a read once each, on DataNode ``n`` modulo 4; before it in even rounds, else on the way.

        ``healthy``: seconds that a read without a fault takes.
        """
        index = n % 4
        after = healthy / 3 if n % 2 else 0.0
        cluster = self._site.cluster
        self.frozen("frozen", index, after)
        self.slowed("slow", index, after)
        try:
            self._run("killed", index, after, partial(cluster.kill, index))
        finally:
            cluster.restart(index)

    def frozen(self, name: str, index: int, after: float) -> float | None:
        """A run of variant ``name`` with DataNode ``index`` frozen ``after`` seconds from its start. As `record`."""
        cluster = self._site.cluster
        try:
            return self._run(name, index, after, partial(cluster.pause, index))
        finally:
            cluster.resume(index)
            time.sleep(_SETTLE)  # what it kept in its queues crosses its link now

    def slowed(self, name: str, index: int, after: float) -> float | None:
        """A run of variant ``name`` with DataNode ``index`` slow ``after`` seconds from its beginning. As `record`."""
        try:
            return self._run(name, index, after, partial(self._site.slow, index, SHARE))
        finally:
            self._site.slow(index, 1)
            time.sleep(_SETTLE)

    def _run(self, name: str, index: int, after: float, fault: partial[None]) -> float | None:
        return self._runner.record(
            name,
            lambda: self._runner.client(self._task, fault=fault, after=after),
            datanode=index,
            when="on the way" if after else "before",
        )
