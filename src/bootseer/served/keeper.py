"""Processes of a server that keep each other: a supervisor restarts the others, and one of those, as its heir, has
another supervisor start when the first has died. A supervisor has one thread. It holds every descriptor that must
outlive the others, and does nothing that may wait."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable

from bootseer.errors import logged
from bootseer.kernel.child import Child, Watch, ended, keep_beating, watched

log = logging.getLogger(__name__)

PID, STARTS, READY, BEAT = range(4)
"""Cells of `Kept`."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Tell a supervisor to end; those that go to the whole process group are its business alone."""
_PAUSE = 0.25
_SHORTEST, _LONGEST = 0.1, 5.0
"""Seconds between two tries to replace a supervisor."""


class Kept:
    """Process ``name`` of a server, as its supervisor keeps it: ``body`` runs in it and returns its exit code. Four
    ``cells`` of shared memory tell of it to the next supervisor: its number; how many there were; which of them was the
    last that did its work (the process itself says so); its heartbeat. ``silence``: seconds without a heartbeat after
    which it is killed. ``adopt``: it runs already."""

    def __init__(
        self, name: str, body: Callable[[], int], cells: memoryview, silence: float, *, adopt: bool = False
    ) -> None:
        self._name, self._body, self.cells = name, body, cells
        self.child = Child.adopt(name, cells[PID] if adopt else 0)
        self.watch = Watch(cells, BEAT, silence)

    def start(self) -> None:
        """Start it, or another one in its place."""
        if self.cells[STARTS]:
            log.warning("the %s ended (%s); starting another", self._name, self.child.ending)
        self.cells[STARTS] += 1
        self.child = Child(self._name, self._run, self.child)
        if self.child.pid:
            self.cells[PID] = self.child.pid
        self.watch.restart()

    def _run(self) -> int:
        # Before anything else: the supervisor may die before it writes the number, and the next one starts a second.
        mine = self.cells[PID] = os.getpid()
        keep_beating(self.cells, BEAT, lambda: self.cells[PID] != mine)
        return self._body()

    def dead(self) -> bool:
        """Whether it has ended. One that gives no sign of life is killed."""
        child = self.child
        if self.cells[READY] == self.cells[STARTS]:
            child.succeeded()
        if child.dead:
            return True
        if self.watch.silent():
            log.error("%s %d has given no sign of life for %g s; killing it", child.name, child.pid, self.watch.limit)
            child.kill()
            self.watch.restart()
        return False


def supervise(what: str, step: Callable[[], bool], end: Callable[[], object]) -> None:
    """Call ``step`` until it says that all is over, and ``end`` at a signal. Nobody else would restart the processes of
    ``what``: so exceptions do not end it."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: end())
    while True:
        try:
            if step():
                break
        except Exception:
            log.exception("the supervisor of %s goes on after this", what)
            time.sleep(_PAUSE)
    log.info("the server of %s ends", what)


class Heir:
    """In a process that the supervisor ``pid`` keeps: after its end ``start`` starts another, and says its number."""

    def __init__(self, pid: int, start: Callable[[], int]) -> None:
        self._start, self._fd = start, -1
        self._next, self._pause = 0.0, _SHORTEST
        self._watch(pid)

    def _watch(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(ProcessLookupError):
            self._fd = watched(pid)

    def register(self, poll: select.poll) -> float | None:
        """Have ``poll`` end with the supervisor, or in so many milliseconds."""
        if self._fd < 0:
            return 20
        poll.register(self._fd, select.POLLIN)
        return None

    def look(self) -> None:
        """Replace a supervisor that has ended; where that cannot be now, another call does. Raises what ``start``
        does, but for `OSError`."""
        if self._fd >= 0:
            if not ended(self._fd):
                return
            os.close(self._fd)
            self._fd = -1
        now = time.monotonic()
        if now < self._next:
            return
        self._pause = _SHORTEST if now - self._next > _LONGEST else min(2 * self._pause, _LONGEST)
        self._next = now + self._pause
        log.warning("the supervisor %d has died; starting another", self._pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)
        with logged(log.critical, "no other supervisor can be started now", kinds=OSError):
            self._watch(self._start())
