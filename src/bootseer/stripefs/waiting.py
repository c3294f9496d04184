"""How long readers waited (`Waited`)."""

from __future__ import annotations

import threading
import time


class Waited:
    """A clock that runs while at least one thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._since, self._seconds = 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._since = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._seconds += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._inside else 0.0)
