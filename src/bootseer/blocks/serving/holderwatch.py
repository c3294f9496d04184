"""How a keeper watches its holder: ended, or without a sign of life, it is replaced by a child of the keeper's."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable

from bootseer.blocks.serving.pulse import Watch
from bootseer.blocks.serving.shared import Count

log = logging.getLogger(__name__)

_HOLDER_SILENCE = 30.0
"""Seconds without a sign of life after which the holder is killed and replaced."""
LOOK_SECONDS = 1.0


class HolderWatch:
    """Watches process ``holder`` (0: there is none) through a pidfd in ``poll``, once `begin` was called.

    ``revive`` is called in this process when the holder has died; it returns the pid of the new one. ``release`` is
    given the pidfd's number when it is of no use any more, and closes it.
    """

    def __init__(
        self,
        holder: int,
        counts: memoryview,
        poll: select.poll,
        revive: Callable[[], int],
        release: Callable[[int], None],
    ) -> None:
        self._holder = holder
        self._poll = poll
        self._revive = revive
        self._release = release
        self._watch = Watch(counts, Count.HOLDER_BEAT, _HOLDER_SILENCE)
        self.fd = -1
        """The pidfd; -1: the holder cannot be watched now, `look` tries again."""
        self.next_look = 0.0
        """Monotonic time of the next `look`."""

    def begin(self) -> None:
        """Watch the holder; start another when it is gone already."""
        self._forget()
        self.next_look = time.monotonic() + LOOK_SECONDS
        self._watch.restart()
        try:
            if self._holder:
                self.fd = os.pidfd_open(self._holder)
                self._poll.register(self.fd, select.POLLIN)
                return
        except ProcessLookupError:
            pass
        except OSError as exc:
            log.error("cannot watch the holder %d, trying again: %s", self._holder, exc)
            return
        self.died()

    def died(self) -> None:
        """The pidfd became readable: start another holder."""
        log.warning("the holder %d died; starting another", self._holder)
        self._forget()
        if self._holder:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._holder, os.WNOHANG)
        time.sleep(0.01)  # bounds the rate
        self._holder = 0
        try:
            self._holder = self._revive()
        except OSError as exc:
            self.next_look = time.monotonic() + LOOK_SECONDS
            log.critical("no other holder can be started now, only this process keeps readers from zeros: %s", exc)
            return
        self.begin()

    def look(self) -> None:
        """Kill a holder without signs of life; try what could not be done before."""
        self.next_look = time.monotonic() + LOOK_SECONDS
        if self.fd < 0:
            self.begin()
        elif self._watch.silent():
            log.error("the holder %d gives no sign of life; killing it", self._holder)
            self._watch.restart()
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def _forget(self) -> None:
        if self.fd >= 0:
            self._poll.unregister(self.fd)
            self._release(self.fd)
            self.fd = -1
