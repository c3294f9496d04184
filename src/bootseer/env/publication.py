"""A publication that goes on while the job starts: the captured layers are frozen, so nothing the job writes gets in.

Concurrency: one thread of low priority (and the threads and processes it starts, which inherit that), so that a start
on few cores does not wait for compression. The process may end before it: a snapshot is published whole or not at all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_NICE = 15


class Publication:
    """Runs ``work`` in the background; it returns (published, why not) and must not raise what is not its fault."""

    def __init__(self, work: Callable[[], tuple[bool, str]]) -> None:
        self._work = work
        self._result = (False, "")
        self._thread = threading.Thread(target=self._run, name="env-publication", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> tuple[bool, str]:
        """(published, why not); gives up after ``timeout`` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False, f"not published: not done after {timeout:.0f} s"
        return self._result

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError as exc:
            log.info("publication runs at normal priority: %s", exc)
        try:
            self._result = self._work()
        except Exception as exc:
            log.exception("publication failed")
            self._result = (False, f"not published: {exc}")
