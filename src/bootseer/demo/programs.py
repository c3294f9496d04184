"""Programs run to their end, with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bootseer.errors import BootseerError, UnsupportedError

BOOTSEER = (sys.executable, "-m", "bootseer.cli.main")
_STOP_SECONDS = 60.0
WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")
"""Begins a command line whose program is ended by the kernel when this process is."""


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    accept: tuple[int, ...] = (0,),
    deadline: float = 1800.0,
) -> str:
    """Run ``argv`` (``env``: more variables) and return what it prints.

    Raises `UnsupportedError` when it is not installed, `BootseerError` for another exit code than ``accept`` has, and
    when it takes longer than ``deadline`` seconds.
    """
    environ = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=deadline, check=False)
    except FileNotFoundError:
        raise UnsupportedError(f"{argv[0]} is not installed", hint="install it with the system's packages") from None
    except subprocess.TimeoutExpired:
        raise BootseerError(f"{argv[0]} did not end within {deadline:.0f} s") from None
    if done.returncode not in accept:
        line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BootseerError(f"{' '.join(argv[:5])}... failed: {line}")
    return done.stdout


def finish(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Wait for the end of a process that leads a session; what it printed into a pipe. On Ctrl-C, and past ``deadline``
    seconds (`BootseerError`), it may clean up after itself before it is killed."""
    try:
        return process.communicate(timeout=deadline)[0] or b""
    except BaseException as exc:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_STOP_SECONDS)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if isinstance(exc, subprocess.TimeoutExpired):
            raise BootseerError(f"a start did not end within {deadline:.0f} s") from None
        raise
