"""Programs run to their end, with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bootseer.errors import BootseerError, UnsupportedError

BOOTSEER = (sys.executable, "-m", "bootseer.cli.main")
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
