"""A publication that goes on while the job starts: the captured layers are frozen, so nothing the job writes gets in.

Concurrency: one thread of low priority (and the threads and processes it starts, which inherit that), so that a start
on few cores does not wait for compression. The process may end before it, and it may be cancelled: a snapshot is
published whole or not at all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_NICE = 15


class Publication:
    """Runs ``work`` in the background; it returns (published, why not) and must not raise what is not its fault.

    ``work`` is given a function that says whether it is to stop without publishing.
    """

    def __init__(self, work: Callable[[Callable[[], bool]], tuple[bool, str]]) -> None:
        self._work = work
        self._cancelled = threading.Event()
        self._result = (False, "")
        self._thread = threading.Thread(target=self._run, name="env-publication", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Ask it to stop before its next step; `wait` then says whether it was too late. May be called at any time."""
        self._cancelled.set()

    def ended(self, timeout: float) -> bool:
        """Whether it reads nothing any more, after at most ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait(self, timeout: float) -> tuple[bool, str]:
        """(published, why not); gives up after ``timeout`` seconds."""
        if not self.ended(timeout):
            return False, f"not published: not done after {timeout:.0f} s"
        return self._result

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError as exc:
            log.info("publication runs at normal priority: %s", exc)
        try:
            self._result = self._work(self._cancelled.is_set)
        except Exception as exc:
            log.exception("publication failed")
            self._result = (False, f"not published: {exc}")
