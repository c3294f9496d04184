"""A full disk: verified blocks wait in memory while others give up space, and the threads that fetch go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_MOST = 64 << 20
"""Bytes that may wait; making room takes seconds, and a fast store fills this in less than one."""


class Room:
    """Has ``make`` (which may take its time, and says whether there is space now) run by a thread of its own; then
    ``land`` is called, by that thread, once for each block that was parked meanwhile.

    In vain once is in vain until the end: what is in use stays in use.
    """

    def __init__(self, make: Callable[[], bool] | None, land: Callable[[int, bytes], None]) -> None:
        self._make = make
        self._land = land
        self._lock = threading.Lock()
        self._parked: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._at_work = False

    @property
    def busy(self) -> bool:
        """Whether a block is parked, or about to land."""
        return self._at_work

    def park(self, block: int, data: bytes) -> bool:
        """The disk has no space for ``block``. False: nor will it have, or too much waits already."""
        with self._lock:
            if self._make is None or self._bytes + len(data) > _MOST:
                return False
            if not self._at_work:
                try:
                    threading.Thread(target=self._run, name="room", daemon=True).start()
                except RuntimeError as exc:
                    log.warning("cannot start a thread to make room with: %s", exc)
                    return False
                self._at_work = True
            self._parked.append((block, data))
            self._bytes += len(data)
            return True

    def _run(self) -> None:
        try:
            made = self._make is not None and self._make()
        except Exception:
            log.exception("making room failed")
            made = False
        if not made:
            with self._lock:
                self._make = None
        while True:
            with self._lock:
                if not self._parked:
                    self._at_work = False
                    return
                block, data = self._parked.pop(0)
                self._bytes -= len(data)
            try:
                self._land(block, data)
            except Exception:
                log.exception("block %d, for which room was made, is lost", block)
