"""The keeper: the fanotify front of a served tree. It answers the kernel, and does nothing else.

One process, one thread, one poll loop over the group, the channel to the fetcher and a pidfd of the holder; no
network, no decompression, no locks. It never opens a file of the mount it serves. An event whose blocks are ready is
allowed at once; any other is journaled, asked for, and allowed when its blocks came, or denied with EIO.

The kernel fails open, so what a keeper knows must survive it (``docs/internals/blocks-concurrency.md``): the kernel
writes events into shared memory, where they stay until each is answered or in the journal. A successor, which inherits
the group, answers them by their descriptor numbers: the kernel compares nothing else. It occupies those numbers first,
so that no event of its own gets one, and denies whatever else its predecessor may have left.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bootseer.blocks.serving import takeover
from bootseer.blocks.serving.channel import Again, Came, Channel, Wanted, request_id
from bootseer.blocks.serving.holderwatch import LOOK_SECONDS, HolderWatch
from bootseer.blocks.serving.pulse import beat
from bootseer.blocks.serving.shared import JOURNAL_SLOTS, Count, Shared
from bootseer.kernel import fanotify
from bootseer.kernel.fanotify import EVENT_SIZE

log = logging.getLogger(__name__)

_SLACK = 5.0
"""The fetcher has this many seconds more than its own deadline to say that it failed."""
_SPARE = 256
"""Descriptors kept free: one read of the group may make 85."""


class _Waiting(NamedTuple):
    fd: int
    first: int
    last: int
    pid: int
    began: int


class Keeper:
    """Answers events of ``group`` until the process is told to stop (SIGTERM: when nothing is left to answer).

    ``revive`` is called in this process when the holder ``holder`` has died; it returns the pid of the new one.
    """

    def __init__(
        self, shared: Shared, group: fanotify.Group, channel: Channel, holder: int, revive: Callable[[], int]
    ) -> None:
        self._shared = shared
        self._group = group
        self._channel = channel
        self._generation = shared.counts[Count.FRONT_STARTS]
        self._number = 0
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: deque[int] = deque()
        self._borrowed: set[int] = set()
        """Numbers of a predecessor's events that are no descriptors of this process's own making."""
        self._patience = shared.counts[Count.DEADLINE_MS] * 1_000_000 + int(_SLACK * 1e9)
        self._room = JOURNAL_SLOTS
        self._draining = False
        self._poll = select.poll()
        self._holder = HolderWatch(holder, shared.counts, self._poll, revive, self._release)

    def run(self) -> None:
        """Take over what a predecessor left, then serve."""
        self._limit()
        self._holder.begin()
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_draining", True))
        self._take_over()
        self._poll.register(self._channel.fileno(), select.POLLIN)
        self._poll.register(self._group.fileno(), select.POLLIN)
        self._shared.counts[Count.FRONT_READY] = self._generation
        group, channel = self._group.fileno(), self._channel.fileno()
        listening = True
        counts, holder, clock = self._shared.counts, self._holder, time.monotonic
        while True:
            beat(counts, Count.FRONT_BEAT)
            if clock() >= holder.next_look:
                holder.look()
            quiet = True
            for fd, _ in self._poll.poll(self._timeout()):
                quiet = False
                if fd == group:
                    self._events()
                elif fd == channel:
                    self._messages()
                elif fd == holder.fd:
                    holder.died()
            if self._waiting or self._unsent:
                self._expire()
                self._send()
                room = len(self._waiting) < self._room
                if room != listening:
                    self._poll.modify(group, select.POLLIN if room else 0)
                    if not room:
                        log.error("%d reads wait for missing blocks; others wait behind them", len(self._waiting))
                    listening = room
            if self._draining and quiet and not self._waiting:
                return

    # -- events ----------------------------------------------------------------------------------------------------

    def _events(self) -> None:
        """The hot path: allow what is ready."""
        shared, group = self._shared, self._group
        buffer = shared.events
        try:
            events = group.events(buffer)
        except OSError as exc:
            # The kernel has denied the event it could not hand over.
            counts = shared.counts
            counts[Count.DENIED] += 1
            if counts[Count.DENIED] & (counts[Count.DENIED] - 1) == 0:  # 1, 2, 4, 8, ...
                log.error("cannot read events, readers get errors: %s", exc)
            return
        find, shift, size = shared.ready.find, shared.shift, shared.size
        counts = shared.counts
        reads = 0
        for fd, pid, offset, length in events:
            if fd < 0:
                self._overflow()
                continue
            ahead = pid == counts[Count.FETCHER_PID]  # its readahead
            reads += not ahead
            end = offset + length
            if end > size:
                end = size
            if 0 <= offset < end:
                first, last = offset >> shift, (end - 1) >> shift
                missing = find(b"\0", first, last + 1) >= 0
                if not missing:
                    group.allow(fd)  # before any bookkeeping, which the reader need not wait for
                elif ahead:  # by a list that lies: nothing is fetched for it, and the job's own read asks again
                    group.deny(fd)
                    os.close(fd)
                    continue
                if counts[Count.RECORDING]:
                    shared.touch(offset, end - offset, pid)
                if missing:
                    shared.journal(fd, offset, length, pid)
                    self._want(_Waiting(fd, first, last, pid, time.monotonic_ns()))
                    continue
            elif offset >= size and offset >= 0:
                group.allow(fd)  # behind the end there is nothing to fill
            else:
                log.error("an event without a range is denied")
                self._deny(fd)
            os.close(fd)
        counts[Count.READS] += reads
        # Only now: a successor answers these again, which does no harm.
        buffer[: len(events) * EVENT_SIZE] = bytes(len(events) * EVENT_SIZE)

    def _overflow(self) -> None:
        log.critical("the kernel lost fanotify events: readers may have seen zeros")
        self._shared.counts[Count.OVERFLOWS] += 1

    def _want(self, what: _Waiting) -> None:
        if self._shared.counts[Count.DOOMED]:
            self._shared.counts[Count.FAILED_READS] += 1
            self._answer(what, errno.EIO)
            return
        id = request_id(self._generation, self._number)
        self._number += 1
        self._waiting[id] = what
        self._unsent.append(id)
        self._send()

    def _send(self) -> None:
        unsent = self._unsent
        while unsent:
            what = self._waiting.get(unsent[0])
            if what is not None and not self._channel.send(Wanted(unsent[0], what.first, what.last, what.pid)):
                return  # no room, or no fetcher: `_timeout` brings us back
            unsent.popleft()

    # -- answers ---------------------------------------------------------------------------------------------------

    def _messages(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Came):
                if message.fd >= 0:
                    os.close(message.fd)
                self._came(message.id, message.errno)
            elif isinstance(message, Again):
                self._unsent = deque(self._waiting)

    def _came(self, id: int, number: int) -> None:
        what = self._waiting.pop(id, None)
        if what is None:
            return
        counts = self._shared.counts
        if not number and self._shared.ready.find(b"\0", what.first, what.last + 1) >= 0:
            number = errno.EIO
            log.error("blocks %d..%d came but are not in the cache", what.first, what.last)
        counts[Count.SLOW_FAULTS] += 1
        counts[Count.STALL_NS] += max(0, time.monotonic_ns() - what.began)
        counts[Count.FAILED_READS] += number != 0
        self._answer(what, number)

    def _answer(self, what: _Waiting, number: int) -> None:
        if number:
            self._deny(what.fd, number)
        else:
            self._group.allow(what.fd)
        self._shared.settle(what.fd)
        if what.fd in self._borrowed:
            self._borrowed.discard(what.fd)
            return
        os.close(what.fd)

    def _deny(self, fd: int, number: int = errno.EIO) -> bool:
        try:
            return self._group.deny(fd, number)
        except OSError as exc:
            log.error("cannot deny event %d: %s", fd, exc)
            return False

    def _expire(self) -> None:
        now = time.monotonic_ns()
        doomed = self._shared.counts[Count.DOOMED]
        for id, what in list(self._waiting.items()):
            if not doomed and now - what.began < self._patience:
                return  # the oldest come first
            log.error("blocks %d..%d did not come; the read of process %d fails", what.first, what.last, what.pid)
            self._shared.counts[Count.DENIED] += 1
            self._came(id, errno.EIO)

    def _timeout(self) -> int:
        """Milliseconds until something is due."""
        if self._draining:
            return 50
        if self._unsent:
            return 20
        if not self._waiting:
            return int(LOOK_SECONDS * 1000)
        oldest = next(iter(self._waiting.values()))
        left = (self._patience - (time.monotonic_ns() - oldest.began)) // 1_000_000
        return max(1, min(left + 1, 1000))  # a second at most: the holder may say that there is no hope

    # -- taking over -----------------------------------------------------------------------------------------------

    def _limit(self) -> None:
        """A journal slot for each descriptor this process can have."""
        takeover.raise_descriptor_limit()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = JOURNAL_SLOTS if hard == resource.RLIM_INFINITY else min(JOURNAL_SLOTS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self._room = max(1, most - _SPARE)

    def _take_over(self) -> None:
        left = takeover.unanswered(self._shared)
        self._borrowed = takeover.occupy(left, self._shared.fd)
        for event in left.values():
            end = min(event.offset + event.length, self._shared.size)
            shift = self._shared.shift
            if not 0 <= event.offset < end:
                what = _Waiting(event.fd, 0, 0, event.pid, 0)
                self._answer(what, 0 if event.offset >= self._shared.size else errno.EIO)
                continue
            first, last = event.offset >> shift, (end - 1) >> shift
            what = _Waiting(event.fd, first, last, event.pid, time.monotonic_ns())
            if self._shared.ready.find(b"\0", first, last + 1) < 0:
                self._answer(what, 0)
            else:
                self._shared.journal(event.fd, event.offset, event.length, event.pid)
                self._want(what)
        takeover.clear_events(self._shared)
        if self._generation > 1:
            denied = takeover.sweep(self._group, set(left))
            self._shared.counts[Count.DENIED] += denied
            self._shared.counts[Count.TAKEN_OVER] += len(left)
            log.warning(
                "keeper %d takes over %d reads of the one before, denies %d", self._generation, len(left), denied
            )

    def _release(self, fd: int) -> None:
        """Close a descriptor of this process's own, but keep its number taken while it is also that of an event."""
        if fd in self._borrowed:
            os.dup2(self._shared.fd, fd, inheritable=False)
            self._borrowed.discard(fd)
        else:
            os.close(fd)
