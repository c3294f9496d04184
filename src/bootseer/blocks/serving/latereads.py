"""Reads of a FUSE front that wait for blocks: asked for over the channel, answered when these came, or with an error.

Concurrency: workers call `miss`, the main thread the rest; one lock, of the table and of the counters of slow reads.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bootseer.blocks.serving.channel import Again, Came, Channel, Wanted, request_id
from bootseer.blocks.serving.shared import Count, Shared
from bootseer.kernel import fuse

log = logging.getLogger(__name__)

_SLACK = 5.0
"""The fetcher has this many seconds more than its own deadline to say that it failed."""

Answer = Callable[[fuse.Context, fuse.ReadResult | OSError], object]


class _Waiting(NamedTuple):
    ctx: fuse.Context
    first: int
    last: int
    began: int


class LateReads:
    """Those of the front with this ``generation``. ``answer`` tells the kernel; ``rouse`` wakes the main thread, which
    has a deadline to mind then."""

    def __init__(
        self,
        shared: Shared,
        channel: Channel,
        data_fd: int,
        generation: int,
        *,
        answer: Answer,
        rouse: Callable[[], None],
    ) -> None:
        self._shared, self._channel, self._data_fd, self._generation = shared, channel, data_fd, generation
        self._answer_kernel, self._rouse = answer, rouse
        self._numbers = itertools.count()
        self._patience = shared.counts[Count.DEADLINE_MS] * 1_000_000 + int(_SLACK * 1e9)
        self.lock = threading.Lock()
        """While it is held no read is entered."""
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: deque[int] = deque()

    # -- in the workers --------------------------------------------------------------------------------------------

    def miss(self, first: int, last: int, ctx: fuse.Context) -> fuse.ReadResult:
        """A read of blocks ``first`` to ``last``, some of which are missing."""
        if self._shared.counts[Count.DOOMED]:
            self._shared.counts[Count.FAILED_READS] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        id = request_id(self._generation, next(self._numbers))
        ctx.on_interrupt = lambda: self._interrupted(id)
        with self.lock:
            self._waiting[id] = _Waiting(ctx, first, last, time.monotonic_ns())
            idle = len(self._waiting) == 1
        if not self._channel.send(Wanted(id, first, last, ctx.pid)):
            self._unsent.append(id)
            idle = True
        if ctx.interrupted:  # before there was somebody to tell
            self._interrupted(id)
        if idle:  # the main thread has to mind a deadline now
            self._rouse()
        return fuse.LATER

    def _interrupted(self, id: int) -> None:
        """A reader got a signal. Let it go if that is the end of it; else EINTR would turn into EIO on its way up
        through EROFS, and a mere SIGCHLD would fail a read."""
        with self.lock:
            waiting = self._waiting.get(id)
            if waiting is None or not _is_dying(waiting.ctx.pid):
                return
            del self._waiting[id]
        self._answer_kernel(waiting.ctx, InterruptedError(errno.EINTR, os.strerror(errno.EINTR)))

    # -- in the main thread ----------------------------------------------------------------------------------------

    def messages(self) -> None:
        """Heed what the fetcher says."""
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Came):
                try:
                    self._came(message)
                finally:
                    if message.fd >= 0:
                        os.close(message.fd)
            elif isinstance(message, Again):
                with self.lock:
                    self._unsent = deque(self._waiting)

    def _came(self, message: Came) -> None:
        with self.lock:
            waiting = self._waiting.pop(message.id, None)
        if waiting is None:
            return
        ctx, number = waiting.ctx, message.errno
        result: fuse.ReadResult | OSError = (self._data_fd, ctx.offset)
        if not number and message.fd >= 0:
            result = (message.fd, ctx.offset - (waiting.first << self._shared.shift))
        elif not number and self._shared.ready.find(b"\0", waiting.first, waiting.last + 1) >= 0:
            log.error("blocks %d..%d came but are not in the cache", waiting.first, waiting.last)
            number = errno.EIO
        if number:
            result = OSError(number, os.strerror(number))
        self._settle(waiting, result)

    def _settle(self, waiting: _Waiting, result: fuse.ReadResult | OSError) -> None:
        counts = self._shared.counts
        counts[Count.SLOW_FAULTS] += 1
        counts[Count.STALL_NS] += max(0, time.monotonic_ns() - waiting.began)
        if isinstance(result, OSError):
            counts[Count.FAILED_READS] += 1
        self._answer_kernel(waiting.ctx, result)

    def send(self) -> None:
        """Ask for what could not be asked for before."""
        unsent = self._unsent
        while unsent:
            waiting = self._waiting.get(unsent[0])
            if waiting is not None:
                message = Wanted(unsent[0], waiting.first, waiting.last, waiting.ctx.pid)
                if not self._channel.send(message):
                    return  # no room, or no fetcher: `timeout` brings us back
            unsent.popleft()

    def expire(self) -> None:
        """Errors for who has waited for too long, or waits without hope."""
        now = time.monotonic_ns()
        doomed = self._shared.counts[Count.DOOMED]
        with self.lock:
            late = [id for id, waiting in self._waiting.items() if doomed or now - waiting.began >= self._patience]
            expired = [self._waiting.pop(id) for id in late]
        for waiting in expired:
            log.error("blocks %d..%d did not come; a read fails", waiting.first, waiting.last)
            self._shared.counts[Count.DENIED] += 1
            self._settle(waiting, OSError(errno.EIO, os.strerror(errno.EIO)))

    def timeout(self) -> int | None:
        """Milliseconds until something is due; a second at most while readers wait: there may be no hope any more."""
        if self._unsent:
            return 20
        with self.lock:
            oldest = next(iter(self._waiting.values()), None)
        if oldest is None:
            return None
        left = (self._patience - (time.monotonic_ns() - oldest.began)) // 1_000_000
        return max(1, min(left + 1, 1000))

    def fail_all(self) -> None:
        """The front ends: errors for who still waits."""
        with self.lock:
            found = list(self._waiting.values())
            self._waiting.clear()
        for waiting in found:
            self._answer_kernel(waiting.ctx, OSError(errno.EIO, os.strerror(errno.EIO)))


def _is_dying(pid: int) -> bool:
    """Whether SIGKILL is pending for thread ``pid``: the kernel turns every fatal signal into that."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith((b"SigPnd:", b"ShdPnd:")) and int(line.split()[1], 16) & 1 << 8:
                    return True
    except (OSError, ValueError):
        pass
    return False
