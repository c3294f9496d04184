"""Signals that end a poll loop's wait: a pipe into which the interpreter writes, polled like other descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from bootseer.blocks.serving.kept import SIGNALS


class Wakeup:
    """``heed`` is called in the main thread for each of `SIGNALS`, once `listen` was called, and `fd` is readable."""

    def __init__(self, heed: Callable[[], None]) -> None:
        self._heed = heed
        self._ends = (-1, -1)

    @property
    def fd(self) -> int:
        return self._ends[0]

    def listen(self) -> None:
        self._ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: self._heed())

    def drain(self) -> None:
        """After the wait: what came has been heeded."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ends[0], 64)

    def forked(self) -> None:
        """In a child: signals are not its business."""
        if self._ends[0] >= 0:
            signal.set_wakeup_fd(-1)
            for fd in self._ends:
                os.close(fd)
            self._ends = (-1, -1)
