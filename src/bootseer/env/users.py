"""Which processes use an overlay, and which of them still live. A record names them ``PID:START``, since another
process may get the number of one that has ended."""

from __future__ import annotations

import os
from collections.abc import Iterable

from bootseer.kernel import procfs
from bootseer.kernel.child import born


def users(caller: int = 0) -> list[str]:
    """This process and ``caller``, which goes on when this one has ended (0, and init, are nobody)."""
    pids = [os.getpid(), caller] if caller > 1 else [os.getpid()]
    return named(pids)


def named(pids: Iterable[int]) -> list[str]:
    """Those of these processes that run, as a record names them."""
    return [name for pid in pids if (name := _named(pid))]


def alive(users: Iterable[str]) -> list[str]:
    """Those of ``users`` that still run."""
    return [user for user in users if _named(int(user.partition(":")[0])) == user]


def shown(user: str) -> str:
    """``process 4711 (python3)``."""
    return procfs.shown(user.partition(":")[0])


def _named(pid: int) -> str:
    """As a record names the process that has this number now; empty when there is none."""
    return f"{pid}:{started}" if (started := born(pid)) else ""
