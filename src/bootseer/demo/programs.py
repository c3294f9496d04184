"""Programs run to their end, with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bootseer.errors import BootseerError, UnsupportedError

BOOTSEER = (sys.executable, "-P", "-m", "bootseer.cli.main")
"""-P: else it would import what lies in the working folder, as in all that is run here by ``-m``."""
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
    """Run ``argv`` (``env``: more variables) and return what it prints. Raises `UnsupportedError` when it is not
    installed, `BootseerError` for another exit code than ``accept`` has, or past ``deadline`` seconds."""
    try:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UnsupportedError(f"{argv[0]} is not installed", hint="install it with the system's packages") from None
    out, err = (text.decode(errors="replace") for text in finish(process, deadline))
    if process.returncode not in accept:
        line = (err.strip().splitlines() or ["no message"])[-1]
        raise BootseerError(f"{' '.join(argv[:5])}... failed: {line}")
    return out


def finish(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Wait for the end of a process that leads a session; what it printed into pipes. On Ctrl-C, and past ``deadline``
    seconds (`BootseerError`), it may clean up after itself before it is killed."""
    try:
        out, err = process.communicate(timeout=deadline)
        return out or b"", err or b""
    except BaseException as exc:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # also by what we start, as in a shell's background
        process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_STOP_SECONDS)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if isinstance(exc, subprocess.TimeoutExpired):
            raise BootseerError(f"a program did not end within {deadline:.0f} s") from None
        raise
