"""Errands of root: a program of root's has the daemon, which has all of bootseer loaded, do what it was called for.

Only a process with the very rights and namespaces of the daemon is served, so that it gets nothing done that it may not
do itself; and only from the same files of bootseer (`thin.stamp`), which may have been replaced since the daemon began.
A copy of the daemon does it, which has become like who asks: its environment, working folder, umask and files 0 to 2.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from bootseer.errors import PrivilegeError, UnavailableError
from bootseer.kernel import libc
from bootseer.kernel.child import ended

_MOST = 8 << 20
_ALIKE = ("Uid:", "Gid:", "CapPrm:", "CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:")
_NAMESPACES = ("mnt", "user", "pid", "net", "ipc", "uts")


def check_alike(pid: int, pidfd: int) -> None:
    """Raise `PrivilegeError` when the process that asks has other rights or namespaces than this one, `OSError`."""
    mine, theirs = (_likeness(one) for one in ("self", pid))
    if mine != theirs or ended(pidfd):
        raise PrivilegeError("who asks has other rights or namespaces than the node daemon")


def _likeness(process: int | str) -> list[object]:
    base = Path(f"/proc/{process}")
    lines = base.joinpath("status").read_text().splitlines()
    places = [base / "root", *(base / "ns" / name for name in _NAMESPACES)]
    try:
        label = base.joinpath("attr/current").read_text()
    except OSError:  # without a security module
        label = ""
    return [
        label,
        [line for line in lines if line.startswith(_ALIKE)],
        *((p.stat().st_dev, p.stat().st_ino) for p in places),
    ]


def become(pid: int, pidfd: int, file: int, own: bytes) -> tuple[list[str], int]:
    """Become like the process that asks, of which ``file`` tells (`thin.done`). Returns its words, and its parent.
    ``own``: the `thin.stamp` of when this process began. Raises `PrivilegeError`, `UnavailableError`, `OSError`,
    `ValueError`."""
    if os.fstat(file).st_size > _MOST:
        raise ValueError("it is too long")
    told, umask, count, *rest = os.pread(file, _MOST, 0).split(b"\0")[:-1]
    if told != own:
        raise UnavailableError("the node daemon runs another bootseer", hint="restart it")
    words, environ = rest[: int(count)], rest[int(count) :]
    check_alike(pid, pidfd)
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.chdir(f"/proc/{pid}/cwd")
    for number in (0, 1, 2):
        fd = libc.descriptor_of(pidfd, number)
        os.dup2(fd, number)
        os.close(fd)
    if ended(pidfd):
        raise UnavailableError("who asks has ended")
    os.umask(int(umask))
    os.environb.clear()
    os.environb.update({name: value for name, _, value in (one.partition(b"=") for one in environ)})
    time.tzset()
    for handler in logging.getLogger().handlers[:]:
        logging.getLogger().removeHandler(handler)
    return [os.fsdecode(word) for word in words], parent
