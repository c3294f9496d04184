"""A block server forked from the program that mounts, instead of started anew: what that has imported is there already.

Only for programs that ask for it, such as the command line: nothing of what they have open may matter to anybody else
in the moment of the fork. The child keeps nothing but memory: descriptors, signal handlers, log handlers, session and
command line become those of a server that was executed. `hindrance` says where that cannot be; then one is executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_ARG_START = 45
"""Field of ``/proc/self/stat``, counted behind the name of the program (proc_pid_stat(5): 48)."""


class Forked:
    """The first process of a forked server, as far as it is used like a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float) -> None:
        """Reap it. Raises `TimeoutError`."""
        until = time.monotonic() + timeout
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(self.pid, os.WNOHANG)[0]:
                if time.monotonic() >= until:
                    raise TimeoutError
                time.sleep(0.001)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def fork(command: Sequence[str], *more: str, tell_fd: int, answer_fd: int) -> Forked:
    """Fork a process that does what ``command`` (of `standby`) does when it is executed with ``-``, ``answer_fd`` and
    ``more``, and ``tell_fd`` as standard input."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pid = -1
    try:
        # What a signal raised in the child would unwind the program, which unmounts and deletes, before it is a server.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid:
        return Forked(pid)
    code = 70
    try:
        code = _serve([*command, "-", str(answer_fd), *more], tell_fd, answer_fd, mask)
    finally:
        os._exit(code)


def _serve(argv: list[str], tell_fd: int, answer_fd: int, mask: Iterable[int]) -> int:
    """In the child, where all signals are blocked; ``mask``: those that the program blocks."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, source in ((0, tell_fd), (1, null), (2, null)):
        os.dup2(source, fd)
    # Taken, not closed: an object of the program's may close its number any time, and that must not be one of ours.
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in (0, 1, 2, null, answer_fd):
            os.dup2(null, int(entry), inheritable=False)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _call_itself(argv)
    gc.freeze()  # nothing of the program's is ever finalized here
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - they live as long as the process
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    logging.getLogger().handlers.clear()
    from bootseer.blocks.serving import server

    return server.main(argv[3:])


def hindrance(command: Sequence[str], *more: str) -> str:
    """Why this process cannot `fork` a server now; empty: it can."""
    if threading.active_count() > 1:
        return "it has threads, and a lock that one of them holds would be held for ever"
    # the number of a descriptor has at most ten digits
    return "" if _fitting([*command, "-", "0" * 10, *more]) else "its command line is too short to be overwritten"


def _fitting(argv: Sequence[str]) -> tuple[int, int, bytes] | None:
    """Where this process's command line lies in its memory, and what of ``argv`` fits there: all of it, or the words
    that others tell servers by."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
    except (OSError, ValueError, IndexError):
        return None
    for words in (argv, ["python", *argv[1:4]]):
        line = b"\0".join(map(os.fsencode, words)) + b"\0"
        if 0 < start <= end - len(line):
            return start, end, line
    return None


def _call_itself(argv: Sequence[str]) -> None:
    """Have ``ps`` and others show ``argv`` as this process's command line."""
    if (found := _fitting(argv)) is not None:
        start, end, line = found
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
