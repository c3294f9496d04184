"""Forked children of a test's process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from bootseer.errors import BootseerError


def in_child(step: Callable[[], object]) -> int:
    """The exit status of a forked child that does ``step``: 0, 3 when it is told whose file it is; -14: it hangs."""
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            step()
            os._exit(0)
        except BootseerError as exc:
            os._exit(3 if "of which this one is a child" in exc.message else 1)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
