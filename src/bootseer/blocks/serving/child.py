"""A forked process that its parent watches through a pidfd and may have to start again."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_SHORTEST = 0.02
_LONGEST = 5.0


class Child:
    """Process ``name``, running ``body`` after ``prepare``; its exit code is what ``body`` returns.

    ``before`` is the one it replaces: failures in a row are counted on, and `wait_seconds` grows with them. Call
    `succeeded` once it does its work: a later death is not its start's fault. One that could not be forked (no memory,
    too many processes) has ``pid`` 0 and counts as dead.
    """

    def __init__(
        self, name: str, body: Callable[[], int], prepare: Callable[[], None], before: Child | None = None
    ) -> None:
        self.name = name
        self.failures: int = 1 if before is None else before.failures + 1
        self._begun = time.monotonic()
        self.pid, self.pidfd = 0, -1
        self._status: int | None = None
        if before is not None:
            before.forget()
        try:
            pid = os.fork()
        except OSError as exc:
            log.error("cannot start a %s: %s", name, exc)
            return
        if not pid:
            code = 70
            try:
                prepare()
                code = body()
            except BaseException:
                log.exception("%s %d failed", name, os.getpid())
            finally:
                logging.shutdown()
                os._exit(code)
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError as exc:
            log.error("cannot watch the %s, killing it: %s", name, exc)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        self.pid = pid

    @classmethod
    def adopt(cls, name: str, pid: int) -> Child:
        """A process that somebody else started, of our own process group. One that is gone already counts as dead."""
        self = cls.__new__(cls)
        self.name, self.pid, self.failures, self._begun = name, pid, 0, time.monotonic()
        self.pidfd, self._status = -1, None
        with contextlib.suppress(ProcessLookupError):
            self.pidfd = os.pidfd_open(pid)
            if os.getpgid(pid) != os.getpgid(0):
                self.forget()
        return self

    @property
    def dead(self) -> bool:
        if self.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(0):
            return False
        self._reap()
        return True

    def _reap(self) -> None:
        """Take the exit code of a process that has ended, so that no zombie stays."""
        if self._status is None:
            with contextlib.suppress(ChildProcessError):  # adopted
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = status

    @property
    def code(self) -> int:
        """Exit code of a dead one, minus the signal's number when it was killed; 0 when nobody knows."""
        return os.waitstatus_to_exitcode(self._status) if self._status is not None else 0

    @property
    def ending(self) -> str:
        if self._status is None:
            return "nobody saw how"
        return f"killed by signal {-self.code}" if self.code < 0 else f"exit code {self.code}"

    def succeeded(self) -> None:
        self.failures = 0

    @property
    def wait_seconds(self) -> float:
        """How long to wait until another may be started in place of this dead one; bounds the rate."""
        pause = _SHORTEST if not self.failures else min(_SHORTEST * 4**self.failures, _LONGEST)
        return max(0.0, self._begun + pause - time.monotonic())

    @property
    def due(self) -> bool:
        return self.wait_seconds <= 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def end(self, seconds: float, number: int = 0) -> None:
        """Send signal ``number``, give it ``seconds`` to end, then kill it and see that it is gone."""
        if number:
            self.kill(number)
        if self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(int(seconds * 1000)):
                if seconds:
                    log.warning("%s %d does not end; killing it", self.name, self.pid)
                self.kill()
                poll.poll(5000)
            if poll.poll(0):
                self._reap()
        self.forget()

    def forget(self) -> None:
        """Close the pidfd; the process is not watched any more."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
