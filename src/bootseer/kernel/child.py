"""A forked process that its parent watches and may have to start again. A pidfd tells that it has ended. One that was
stopped does not end, so it counts up a cell of shared memory while it runs, its heartbeat."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bootseer.kernel import libc

log = logging.getLogger(__name__)

_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 5.0
BEAT_SECONDS = 0.5
_LOOK_SECONDS = 0.05
_LONGEST_STEP = 1.5
_MASK = (1 << 64) - 1


class Child:
    """Process ``name``, running ``body``; its exit code is what ``body`` returns.

    ``before`` is the one it replaces: failures in a row are counted on, and `wait_seconds` grows with them. Call
    `succeeded` once it does its work: a later death is not its start's fault. One that could not be forked (no memory,
    too many processes) has ``pid`` 0 and counts as dead."""

    def __init__(self, name: str, body: Callable[[], int], before: Child | None = None) -> None:
        self.name = name
        self.failures: int = 1 if before is None else before.failures + 1
        self._begun = time.monotonic()
        self.pid, self._pidfd = 0, -1
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
                code = body()
            except SystemExit as exc:
                code = exc.code if isinstance(exc.code, int) else 1
            except BaseException:
                log.exception("%s %d failed", name, os.getpid())
            finally:
                logging.shutdown()
                os._exit(code)
        try:
            self._pidfd = watched(pid)
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
        self._pidfd, self._status = -1, None
        if pid:
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = watched(pid)
                if os.getpgid(pid) != os.getpgid(0):
                    self.forget()
        return self

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended; -1 when that was seen already."""
        return self._pidfd

    @property
    def dead(self) -> bool:
        if self._pidfd < 0:
            return True
        if not ended(self._pidfd):
            return False
        if self._status is None:
            with contextlib.suppress(ChildProcessError):  # adopted
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = status
        return True

    @property
    def code(self) -> int:
        """Exit code of a dead one, minus the signal's number when it was killed; 0 when nobody knows."""
        return os.waitstatus_to_exitcode(self._status) if self._status is not None else 0

    @property
    def ended_well(self) -> bool:
        """Whether a dead one is known to have returned 0."""
        return self._status is not None and self.code == 0

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
        pause = _SHORTEST_PAUSE if not self.failures else min(_SHORTEST_PAUSE * 4**self.failures, _LONGEST_PAUSE)
        return max(0.0, self._begun + pause - time.monotonic())

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except OSError:
                if not self.dead:  # no pidfd: see `watched`
                    with contextlib.suppress(OSError):
                        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it and see that it is gone."""
        self.kill()
        if self._pidfd >= 0 and ended(self._pidfd, 5.0):
            _ = self.dead  # no zombie stays
        self.forget()

    def forget(self) -> None:
        """Close the pidfd; the process is not watched any more."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def watched(pid: int) -> int:
    """A descriptor that is readable once process ``pid`` has ended, to be closed: a pidfd. Where seccomp refuses those,
    as older container runtimes do, a thread looks 20 times a second and writes to a pipe. Raises `OSError`."""
    try:
        return os.pidfd_open(pid)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.ENOSYS):
            raise
    if not (began := born(pid)):
        os.kill(pid, 0)
        if not born(os.getpid()):
            raise OSError(errno.ENOSYS, "there are neither pidfds nor /proc")
    read, write = os.pipe()

    def look() -> None:
        while began and born(pid) == began:
            time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(OSError):  # nobody waits any more
            os.write(write, b"-")
        os.close(write)

    try:
        threading.Thread(target=look, name="watched", daemon=True).start()
    except RuntimeError:
        os.close(read)
        os.close(write)
        raise OSError(errno.EAGAIN, "no thread can be started") from None
    return read


def wait(children: Iterable[Child], seconds: float | None, *fds: int) -> None:
    """Wait until one of ``children`` ends, or one that has ended may be started again, or one of ``fds`` can be read;
    for ``seconds`` at most."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    for child in children:
        if not child.dead:
            poll.register(child.fileno(), select.POLLIN)
        else:
            seconds = min(child.wait_seconds, child.wait_seconds if seconds is None else seconds)
    poll.poll(None if seconds is None else max(0, int(seconds * 1000)) + 1)


def ended(pidfd: int, seconds: float = 0.0) -> bool:
    """Whether the process of a pidfd has ended, or does so within ``seconds``."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(int(seconds * 1000)))


def answer(name: str, say: Callable[[int], int], seconds: float, most: int) -> bytes:
    """What a process ``name`` writes to the pipe that ``say`` is given there. Empty when it does not end within
    ``seconds``, or writes ``most`` bytes; it is gone then, too."""
    read, write = os.pipe()
    child = Child(name, lambda: say(write))
    os.close(write)
    until, said, poll = time.monotonic() + seconds, b"", select.poll()  # the process may have thousands of descriptors
    poll.register(read, select.POLLIN)
    try:
        while poll.poll(max(0, int(1000 * (until - time.monotonic())))) and len(said) < most:
            if not (piece := os.read(read, most)):
                return said
            said += piece
        return b""
    finally:
        os.close(read)
        child.end()


def born(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when there is none, or it has ended and is only to be reaped.
    With its number it names a process for as long as the machine runs."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def die_with(parent: int) -> None:
    """End this process, a child of the single thread of process ``parent``, as soon as that has ended."""
    libc.die_with_parent()
    if os.getppid() != parent:
        os._exit(0)


def close_others(*kept: int) -> None:
    """Close all descriptors but the first three and those ``kept``, in a process that was forked just now. What still
    refers to the closed ones must not be used, nor deleted, any more."""
    low = 3
    for fd in (*sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        os.closerange(low, fd)
        low = fd + 1


class Watch:
    """Watches the process that beats in ``cell`` of ``counts``. Ask `silent` about once a second. ``limit``: how many
    seconds without a heartbeat are too long. A watcher that was itself not running (a frozen cgroup, a paused machine)
    counts 1.5 s of that at most: the others were not running either."""

    def __init__(self, counts: memoryview, cell: int, limit: float) -> None:
        self._counts, self._cell, self.limit = counts, cell, limit
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
        return self._quiet >= self.limit


def keep_beating(counts: memoryview, cell: int, superseded: Callable[[], bool] = lambda: False) -> None:
    """Beat from a thread of this process until it ends, and end the process when it is ``superseded``."""

    def run() -> None:
        while not superseded():
            counts[cell] = (counts[cell] + 1) & _MASK
            time.sleep(BEAT_SECONDS)
        os._exit(0)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
