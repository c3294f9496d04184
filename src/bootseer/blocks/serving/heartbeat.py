"""Heartbeats: cells of shared memory that a process counts up while it runs, and who watches them.

A process that was stopped (SIGSTOP, a debugger) does not end, so no pidfd tells; its readers would wait for ever.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 0.5
_LONGEST_STEP = 1.5
_MASK = (1 << 64) - 1


class Watch:
    """Watches the process that beats in ``cell`` of ``counts``. Ask `silent` about once a second.

    A watcher that was itself not running (a frozen cgroup, a paused machine) counts 1.5 s of that at most, so that it
    does not take others for dead that were not running either.
    """

    def __init__(self, counts: memoryview, cell: int, seconds: float) -> None:
        self._counts, self._cell, self._limit = counts, cell, seconds
        self.restart()

    def restart(self) -> None:
        """There is a new process to watch."""
        self._seen = self._counts[self._cell]
        self._asked = time.monotonic()
        self._quiet = 0.0

    def silent(self) -> bool:
        """Whether there has been no heartbeat for too long."""
        now, seen = time.monotonic(), self._counts[self._cell]
        passed, self._asked = now - self._asked, now
        if seen != self._seen or not seen:  # 0: the first one is still starting, and its starter waits for it
            self._seen, self._quiet = seen, 0.0
            return False
        self._quiet += min(passed, _LONGEST_STEP)
        return self._quiet >= self._limit


def keep_beating(counts: memoryview, cell: int, superseded: Callable[[], bool] = lambda: False) -> None:
    """Beat from a thread of this process until it ends, and end the process when it is ``superseded``."""

    def run() -> None:
        while not superseded():
            counts[cell] = (counts[cell] + 1) & _MASK
            time.sleep(BEAT_SECONDS)
        os._exit(0)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
