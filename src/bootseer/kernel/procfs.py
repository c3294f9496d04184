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


def shown(pid: int | str) -> str:
    """``process 4711 (python3)``. A process chooses its name: of one with odd bytes they are escaped."""
    try:
        name = Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({name.decode('latin-1').encode('unicode_escape').decode()})"
