"""What /proc says of a process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Cgroup(NamedTuple):
    """Its place in one hierarchy; version 2 has no ``controllers``."""

    controllers: str
    path: str


def masks(pid: int | str, *names: str) -> list[int]:
    """The bit masks that ``/proc/PID/status`` has under ``names``, such as ``SigCgt:``. Raises `OSError`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(line.split()[1], 16) for line in lines if line.startswith(names)]


def cgroups(pid: int | str = "self") -> list[Cgroup]:
    """Raises `OSError`."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return [Cgroup(*line.split(":", 2)[1:]) for line in lines]
