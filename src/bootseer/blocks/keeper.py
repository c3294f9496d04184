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

import contextlib
import errno
import logging
import os
import resource
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bootseer.blocks.channel import Again, Came, Channel, Wanted, request_id
from bootseer.blocks.pulse import Watch, beat
from bootseer.blocks.shared import JOURNAL_SLOTS, Count, Shared
from bootseer.errors import BootseerError
from bootseer.kernel import fanotify
from bootseer.kernel.fanotify import EVENT_SIZE, Event

log = logging.getLogger(__name__)

_SLACK = 5.0
"""The fetcher has this many seconds more than its own deadline to say that it failed."""
_HOLDER_SILENCE = 30.0
"""Seconds without a sign of life after which the holder is killed and replaced."""
_LOOK_SECONDS = 1.0
_SPARE = 256
"""Descriptors kept free: one read of the group may make 85."""
_U32 = struct.Struct("=I")


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
        self._holder = holder
        self._holder_fd = -1
        self._revive = revive
        self._generation = shared.counts[Count.FRONT_STARTS]
        self._number = 0
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: deque[int] = deque()
        self._borrowed: set[int] = set()
        """Numbers of a predecessor's events that are no descriptors of this process's own making."""
        self._patience = shared.counts[Count.DEADLINE_MS] * 1_000_000 + int(_SLACK * 1e9)
        self._room = JOURNAL_SLOTS
        self._next_look = 0.0
        self._watch = Watch(shared.counts, Count.HOLDER_BEAT, _HOLDER_SILENCE)
        self._draining = False
        self._poll = select.poll()

    def run(self) -> None:
        """Take over what a predecessor left, then serve."""
        self._limit()
        self._watch_holder()
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_draining", True))
        self._take_over()
        self._poll.register(self._channel.fileno(), select.POLLIN)
        self._poll.register(self._group.fileno(), select.POLLIN)
        self._shared.counts[Count.FRONT_READY] = self._generation
        group, channel = self._group.fileno(), self._channel.fileno()
        listening = True
        counts, clock = self._shared.counts, time.monotonic
        while True:
            beat(counts, Count.FRONT_BEAT)
            if clock() >= self._next_look:
                self._look_at_holder()
            quiet = True
            for fd, _ in self._poll.poll(self._timeout()):
                quiet = False
                if fd == group:
                    self._events()
                elif fd == channel:
                    self._messages()
                elif fd == self._holder_fd:
                    self._holder_died()
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
        """The hot path: allow what is ready. Measured 8 us per event with all system calls."""
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
        for fd, pid, offset, length in events:
            if fd < 0:
                self._overflow()
                continue
            counts[Count.READS] += 1
            end = offset + length
            if end > size:
                end = size
            if 0 <= offset < end:
                first, last = offset >> shift, (end - 1) >> shift
                if counts[Count.RECORDING]:
                    shared.touch(offset, end - offset, pid)
                if find(b"\0", first, last + 1) >= 0:
                    shared.journal(fd, offset, length, pid)
                    self._want(_Waiting(fd, first, last, pid, time.monotonic_ns()))
                    continue
                group.allow(fd)
            elif offset >= size and offset >= 0:
                group.allow(fd)  # behind the end there is nothing to fill
            else:
                log.error("an event without a range is denied")
                self._deny(fd)
            os.close(fd)
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
            return int(_LOOK_SECONDS * 1000)
        oldest = next(iter(self._waiting.values()))
        left = (self._patience - (time.monotonic_ns() - oldest.began)) // 1_000_000
        return max(1, min(left + 1, 1000))  # a second at most: the holder may say that there is no hope

    # -- taking over -----------------------------------------------------------------------------------------------

    def _limit(self) -> None:
        """A journal slot for each descriptor this process can have."""
        raise_descriptor_limit()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = JOURNAL_SLOTS if hard == resource.RLIM_INFINITY else min(JOURNAL_SLOTS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self._room = max(1, most - _SPARE)

    def _take_over(self) -> None:
        left = unanswered(self._shared)
        own = {fd for fd in left if _is_open(fd)}
        for fd in left:
            if fd not in own:
                os.dup2(self._shared.fd, fd, inheritable=False)
        self._borrowed = own
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
        clear_events(self._shared)
        if self._generation > 1:
            denied = sweep(self._group, set(left))
            self._shared.counts[Count.DENIED] += denied
            self._shared.counts[Count.TAKEN_OVER] += len(left)
            log.warning(
                "keeper %d takes over %d reads of the one before, denies %d", self._generation, len(left), denied
            )

    # -- the holder ------------------------------------------------------------------------------------------------

    def _forget_holder(self) -> None:
        if self._holder_fd >= 0:
            self._poll.unregister(self._holder_fd)
            if self._holder_fd in self._borrowed:  # an event of a predecessor has that number: it stays taken
                os.dup2(self._shared.fd, self._holder_fd, inheritable=False)
                self._borrowed.discard(self._holder_fd)
            else:
                os.close(self._holder_fd)
            self._holder_fd = -1

    def _watch_holder(self) -> None:
        self._forget_holder()
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._watch.restart()
        try:
            if self._holder:
                self._holder_fd = os.pidfd_open(self._holder)
                self._poll.register(self._holder_fd, select.POLLIN)
                return
        except ProcessLookupError:
            pass
        except OSError as exc:
            log.error("cannot watch the holder %d, trying again: %s", self._holder, exc)
            return
        self._holder_died()

    def _holder_died(self) -> None:
        log.warning("the holder %d died; starting another", self._holder)
        self._forget_holder()
        if self._holder:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._holder, os.WNOHANG)
        time.sleep(0.01)  # bounds the rate
        self._holder = 0
        try:
            self._holder = self._revive()
        except OSError as exc:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            log.critical("no other holder can be started now, only this process keeps readers from zeros: %s", exc)
            return
        self._watch_holder()

    def _look_at_holder(self) -> None:
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if self._holder_fd < 0:
            self._watch_holder()
        elif self._watch.silent():
            log.error("the holder %d gives no sign of life; killing it", self._holder)
            self._watch.restart()
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._holder_fd, signal.SIGKILL)


def raise_descriptor_limit() -> int:
    """Have the hard limit at what the journal has room for, where this process may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= JOURNAL_SLOTS:
        return JOURNAL_SLOTS
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, JOURNAL_SLOTS))
    except (OSError, ValueError):
        return hard
    return JOURNAL_SLOTS


def unanswered(shared: Shared) -> dict[int, Event]:
    """Events that a dead keeper took: those in its journal, and those still in the buffer (perhaps answered)."""
    left = {one.fd: Event(one.fd, one.pid, one.offset, one.length) for one in shared.outstanding()}
    buffer, used = shared.events, 0
    while used + _U32.size <= len(buffer) and (size := _U32.unpack_from(buffer, used)[0]):
        used += size
    try:
        events = fanotify.parse(buffer, min(used, len(buffer)))
    except BootseerError as exc:
        log.error("events of the keeper before cannot be told: %s", exc)  # the sweep denies them
        return left
    return left | {event.fd: event for event in events if 0 <= event.fd < JOURNAL_SLOTS}


def clear_events(shared: Shared) -> None:
    shared.events[:] = bytes(len(shared.events))


def sweep(group: fanotify.Group, spare: set[int] | None = None) -> int:
    """Deny each event that any dead keeper may have left but those numbered in ``spare``; returns how many there were.

    4,096 writes that nearly all find nothing: 7 ms. Without it their readers would hang.
    """
    keep = spare or set()
    denied = 0
    for number in range(JOURNAL_SLOTS):
        if number not in keep:
            with contextlib.suppress(OSError):
                denied += group.deny(number, errno.EIO)
    return denied


def deny_all(shared: Shared, group: fanotify.Group, seconds: float) -> None:
    """No keeper lives: deny everything that waits, and what comes within ``seconds``. Never zeros, never a hang."""
    for one in shared.outstanding():
        shared.settle(one.fd)
    clear_events(shared)
    sweep(group)
    poll = select.poll()
    poll.register(group.fileno(), select.POLLIN)
    until = time.monotonic() + seconds
    buffer = bytearray(EVENT_SIZE * 16)
    while (left := until - time.monotonic()) > 0:
        if poll.poll(int(left * 1000) + 1):
            try:
                events = group.events(buffer)
            except OSError as exc:  # no descriptor left, say: the kernel has denied the event
                log.error("cannot read events, readers get errors: %s", exc)
                shared.counts[Count.DENIED] += 1
                time.sleep(0.01)
                continue
            for event in events:
                if event.fd >= 0:
                    try:
                        group.deny(event.fd, errno.EIO)
                    except OSError as exc:
                        log.error("cannot deny event %d: %s", event.fd, exc)
                    os.close(event.fd)
                    shared.counts[Count.DENIED] += 1


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
