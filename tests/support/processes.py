"""Processes of block servers, for tests that kill them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.waits import until


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_group(pid: int) -> None:
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    until(lambda: not alive(pid))
