"""Named points at which tests make a step fail: ``faults.point("store.put.before-publish")``. A point does nothing
unless ``BOOTSEER_FAULTS`` is set, as a comma-separated list of ``name=action``; actions are ``kill`` (SIGKILL to this
process), ``stop`` (SIGSTOP, until somebody sends SIGCONT), ``enospc``, ``eio`` (raise that `OSError`), and
``sleep:SECONDS``. ``name=action@3`` acts on the third visit only."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

_lock = threading.Lock()
visits: dict[str, int] = {}
"""How often each point was visited while faults were wanted; a test that names a visit clears it first."""


def point(name: str) -> None:
    """Visit the point ``name``; act if ``BOOTSEER_FAULTS`` says so."""
    setting = os.environ.get("BOOTSEER_FAULTS")
    if not setting:
        return
    with _lock:
        visits[name] = visit = visits.get(name, 0) + 1
    for item in setting.split(","):
        where, _, what = item.partition("=")
        what, _, nth = what.partition("@")
        if where == name and (not nth or int(nth) == visit):
            _act(name, what)


def _act(name: str, what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what in ("enospc", "eio"):
        number = errno.ENOSPC if what == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number), name)
    elif what.startswith("sleep:"):
        time.sleep(float(what.removeprefix("sleep:")))
    else:
        raise ValueError(f"unknown fault action {what!r} for {name}")
