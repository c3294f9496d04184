"""Memory that reads may hold besides their callers' own: chunks fetched ahead, and scratch buffers of second tries. Any
thread; a lock guards the count. Nothing waits: who gets no bytes does without, or makes room first."""

from __future__ import annotations

import os
import threading

LIMIT = 512 << 20
"""Bytes for the whole process."""


class ByteBudget:
    """``limit``: bytes. What is taken here is also taken from ``parent``, which has a limit of its own."""

    def __init__(self, limit: int, parent: ByteBudget | None = None) -> None:
        self.limit, self.used = limit, 0
        self._parent = parent
        self._lock = threading.Lock()

    def try_take(self, count: int) -> bool:
        """Take ``count`` bytes if both limits allow it."""
        with self._lock:
            if self.used + count > self.limit or not (self._parent is None or self._parent.try_take(count)):
                return False
            self.used += count
            return True

    def take(self, count: int) -> None:
        """Take ``count`` bytes, past the limit if need be: somebody waits for them already."""
        with self._lock:
            self.used += count
        if self._parent is not None:
            self._parent.take(count)

    def give(self, count: int) -> None:
        """Return ``count`` bytes."""
        with self._lock:
            self.used -= count
        if self._parent is not None:
            self._parent.give(count)


_process = ByteBudget(LIMIT)


def _forget() -> None:
    global _process
    _process = ByteBudget(LIMIT)  # what the parent's threads hold they will not give back here


os.register_at_fork(after_in_child=_forget)


def process() -> ByteBudget:
    """The budget of this process."""
    return _process
