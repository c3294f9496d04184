"""Which process a thread that asks belongs to, and whether it is dying of a signal."""

from __future__ import annotations

from pathlib import Path

_PF_EXITING = 0x4


def process_of(thread: int) -> int:
    """The process of a thread, by their ids; 0 when it cannot be seen from here."""
    for line in _read(thread, "status").splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return 0


def killed(thread: int) -> bool:
    """Whether the thread ends because a signal ends its process: the kernel closes its files then.

    One that ends in another way, also in the midst of the end of all its threads by exit(2), is not killed, although
    the kernel ends the other threads by a signal of its own. What counts is the exit status of the process.
    """
    fields = _read(thread, "stat").rpartition(")")[2].split()
    if len(fields) < 50 or not int(fields[6]) & _PF_EXITING:
        return False
    return bool(int(fields[49]) & 0x7F)


def _read(thread: int, name: str) -> str:
    try:
        return Path("/proc", str(thread), name).read_text() if thread else ""
    except OSError:
        return ""
