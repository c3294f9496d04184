"""The threads that fetch: as many at work as are wanted, besides those stuck in the source. With the fetcher's lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_MOST = 4
"""Times ``size``: threads in all, the stuck ones included."""


class Threads:
    """Those that do ``work``, ``size`` of them where the system gives so many. ``at_work``: those that are not stuck.
    `stuck` says of a thread that nobody counts on it any more; when it comes back after all, `returned` says whether it
    is needed."""

    def __init__(self, work: Callable[[], None], size: int) -> None:
        self.size, self.at_work = size, 0
        self.all: list[threading.Thread] = []
        self._work = work
        self._short = False  # the system did not give a thread

    def hire(self) -> None:
        """Start threads until as many are at work as are wanted, or the system gives none."""
        self.all = [thread for thread in self.all if thread.is_alive()]
        while self.at_work < self.size and len(self.all) < _MOST * self.size:
            # Daemon threads: one stuck in a source that never answers must not keep the process alive.
            thread = threading.Thread(target=self._work, name="fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                if not self._short:
                    log.warning("cannot start a thread to fetch blocks with: %s", exc)
                self._short = True
                return
            self.all.append(thread)
            self.at_work += 1

    def stuck(self) -> None:
        self.at_work -= 1
        self.hire()

    def returned(self) -> bool:
        if self.at_work >= self.size:
            return False
        self.at_work += 1
        return True
