"""flock(2) with a deadline, on files that others may remove."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

_LOOK_SECONDS = 0.01


def lock(fd: int, patience: float = 0.0) -> bool:
    """Take the exclusive flock of ``fd``. False when somebody else has it for all of ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_SECONDS)


def is_at(fd: int, path: Path) -> bool:
    """Whether what is open as ``fd`` is still what ``path`` names."""
    mine = os.fstat(fd)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
