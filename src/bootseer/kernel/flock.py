"""flock(2) with a deadline, on files that others may remove; and who has a file open for writing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bootseer.closing import descriptor

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


@contextlib.contextmanager
def locked(path: Path, flags: int = os.O_RDWR, patience: float = 0.0) -> Iterator[bool]:
    """Open ``path`` with ``flags``, take its exclusive flock, hold it inside. False: somebody else has it for all of
    ``patience`` seconds. A file that its holder has removed is opened anew. Raises `OSError`."""
    until = time.monotonic() + patience
    while True:
        with descriptor(os.open(path, flags | os.O_CLOEXEC, 0o600)) as fd:
            alone = lock(fd, until - time.monotonic())
            if not alone or is_at(fd, path):
                yield alone
                return


def is_at(fd: int, path: Path) -> bool:
    """Whether what is open as ``fd`` is still what ``path`` names."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def nobody_writes(fd: int) -> bool:
    """Whether nobody has the file open for writing, or mapped so; False, too, where the kernel tells this user nothing
    of it. A read lease is asked for, which there is none of else, and given back at once."""
    try:
        # Who opens the file meanwhile has the kernel signal us: by one that is ignored by default, not SIGIO.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
