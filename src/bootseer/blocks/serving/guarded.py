"""Whether processes guard a data file that is in use: whoever kills them has the kernel give readers zeros.

Asked from outside, by processes that share no descriptor with the server. Where it cannot be told the answer is yes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from bootseer.blocks.cache.blockfile import in_use
from bootseer.blocks.cache.locks import DATA
from bootseer.kernel import _libc

_GROUP = "anon_inode:[fanotify]"


def guard_in_use(pids: Iterable[int]) -> bool:
    """Whether one of ``pids`` holds a fanotify group whose data file somebody else has open or mounted."""
    return any(_guards(pid) for pid in pids)


def _guards(pid: int) -> bool:
    try:
        links = {}
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    except OSError:
        return not _ended(pid)
    if _GROUP not in links.values():
        return False
    files = [fd for fd, link in links.items() if os.path.basename(link.removesuffix(" (deleted)")) == DATA]
    return not files or any(_in_use(pid, fd) for fd in files)


def _in_use(pid: int, fd: int) -> bool:
    """The very description that the process has: one of our own would count as a use of the file."""
    try:
        process = os.pidfd_open(pid)
        try:
            mine = _libc.pidfd_getfd(process, fd)
        finally:
            os.close(process)
    except ProcessLookupError:
        return False
    except OSError:
        return not _ended(pid)
    try:
        return in_use(mine)
    finally:
        os.close(mine)


def _ended(pid: int) -> bool:
    """Whether ``pid`` is gone or nothing but its exit code is left."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True
