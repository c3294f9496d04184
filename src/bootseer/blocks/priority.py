"""Which process runs first when cores are short (nice values)."""

from __future__ import annotations

import logging
import os

log = logging.getLogger(__name__)

_FIRST = -20


def go_first() -> None:
    """The calling thread, and threads and processes that it makes, run before all others: what it does is short, and
    every read waits for it. Without the right to, a line in the log."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
    except OSError:
        log.info("this process has no priority over others: that needs CAP_SYS_NICE")


def nice() -> int:
    """That of the calling thread, -20 (runs first) to 19."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def set_nice(value: int) -> None:
    """The calling thread, and what it makes, has nice ``value`` again; a line in the log where it may not."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    except OSError as exc:
        log.warning("this process keeps its priority: %s", exc)
