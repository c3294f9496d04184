"""Processes as records name them: ``PID:START``, so that another process with the same number is another one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def users(caller: int = 0) -> list[str]:
    """This process and ``caller``, which goes on when this one has ended (0, and init, are nobody)."""
    pids = [os.getpid(), caller] if caller > 1 else [os.getpid()]
    return [f"{pid}:{started}" for pid in pids if (started := _started(pid))]


def alive(named: Iterable[str]) -> list[str]:
    """Those of ``named`` that still run."""
    return [user for user in named if _started(int(user.partition(":")[0])) == user.partition(":")[2]]


def shown(user: str) -> str:
    """``process 4711 (python3)``."""
    pid = user.partition(":")[0]
    try:
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"process {pid}"


def _started(pid: int) -> str:
    """When the process began, in clock ticks since boot; empty when there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
