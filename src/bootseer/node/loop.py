"""One thread that waits for descriptors and times, and calls what is to happen then, which must not wait."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Loop:
    """What a call raises is a line in the log: it ends nothing but itself. Without events and times no CPU is used."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], None]] = {}
        self._times: dict[object, tuple[float, Callable[[], None]]] = {}

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Have ``call`` called while ``fd`` is readable. It must bear being called when that is not so: the number may
        have been another file's a moment ago."""
        self._calls[fd] = call
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """Before ``fd`` is closed. Safe to call twice."""
        if self._calls.pop(fd, None):
            self._poll.unregister(fd)

    def later(self, key: object, seconds: float, call: Callable[[], None]) -> None:
        """Have ``call`` called once, in ``seconds``, unless `cancel` comes before. A ``key`` has one such call."""
        self._times[key] = (time.monotonic() + seconds, call)

    def cancel(self, key: object) -> None:
        self._times.pop(key, None)

    def turn(self) -> None:
        """Wait for something to happen, and see to it."""
        next_time = min((when for when, _ in self._times.values()), default=None)
        wait = None if next_time is None else max(0, int((next_time - time.monotonic()) * 1000) + 1)
        due = [self._calls.get(fd) for fd, _ in self._poll.poll(wait)]
        now = time.monotonic()
        for key in [key for key, (when, _) in self._times.items() if when <= now]:
            due.append(self._times.pop(key)[1])
        for call in due:
            try:
                if call is not None:
                    call()
            except Exception:
                log.exception("the node daemon goes on after this")
