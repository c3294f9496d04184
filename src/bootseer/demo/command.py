"""Running the programs that the demo is made with; what one says in vain becomes one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bootseer.errors import BootseerError, UnsupportedError

BOOTSEER = (sys.executable, "-m", "bootseer.cli.main")
_DEADLINE = 1800.0


def run(argv: Sequence[str], *, env: Mapping[str, str] | None = None, accept: tuple[int, ...] = (0,)) -> str:
    """Run ``argv`` (``env``: more variables) and return what it prints.

    Raises `UnsupportedError` when it is not installed, `BootseerError` on failure and after half an hour.
    """
    environ = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=_DEADLINE, check=False)
    except FileNotFoundError:
        raise UnsupportedError(f"{argv[0]} is not installed", hint="run scripts/setup") from None
    except subprocess.TimeoutExpired:
        raise BootseerError(f"{argv[0]} did not end within {_DEADLINE:.0f} s") from None
    if done.returncode not in accept:
        line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BootseerError(f"{' '.join(argv[:5])}... failed: {line}")
    return done.stdout
