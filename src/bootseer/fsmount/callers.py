"""Which process a thread that asks belongs to, and whether it is dying of a signal."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Caller(NamedTuple):
    """``process``: its id, 0 when it cannot be seen from here. ``killed``: it ends because of a signal."""

    process: int
    killed: bool


def caller(thread: int) -> Caller:
    """Of a thread that waits for an answer; when it ends, the kernel closes its files. What counts is the exit status
    of the process: at an ordinary end the kernel ends the other threads by a signal, one of which may be the last with
    the files."""
    status = _read(thread, "status")
    process = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:")), 0)
    if not process or "\nVmSize:" in status:
        return Caller(process, killed=False)
    # Only a thread without memory ends. Of one that is within execve(2), and closes files there, Linux 6.18 lets nobody
    # read the rest before it is through: the answer to the close would wait for the close.
    fields = _read(thread, "stat").rpartition(")")[2].split()
    return Caller(process, killed=len(fields) > 49 and bool(int(fields[49]) & 0x7F))


def _read(thread: int, name: str) -> str:
    try:
        return Path("/proc", str(thread), name).read_text() if thread else ""
    except OSError:
        return ""
