"""What a keeper leaves when it dies, and how a successor, or whoever is left with the group, answers for it.

The kernel fails open and compares only the number of an event's descriptor, so whoever has the group can answer
(``docs/internals/blocks-concurrency.md``). Nothing here belongs to one keeper: shared memory and group are all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import struct
import time
from collections.abc import Iterable

from bootseer.blocks.cache.blockfile import in_use
from bootseer.blocks.serving.shared import JOURNAL_SLOTS, Count, Shared
from bootseer.errors import BootseerError
from bootseer.kernel import fanotify
from bootseer.kernel.fanotify import EVENT_SIZE, Event

log = logging.getLogger(__name__)

_U32 = struct.Struct("=I")


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

    4,096 writes that nearly all find nothing, some milliseconds (``bench/engine.py``: sweep). Without it their readers
    would hang.
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


def deny_while_used(shared: Shared, group: fanotify.Group, data_fd: int) -> None:
    """`deny_all` until nobody has the data file open any more: a mount of it may live for days."""
    while True:
        try:
            deny_all(shared, group, 1.0)
            if not in_use(data_fd):
                return
        except Exception:  # whoever would end here leaves readers with zeros
            log.exception("denying goes on after this")
            time.sleep(0.1)


def occupy(numbers: Iterable[int], stand_in: int) -> set[int]:
    """Have the descriptor ``numbers`` taken, those that are free by duplicates of ``stand_in``, so that no event of
    this process's own gets one. Returns those that were taken already: they are not the caller's to close."""
    taken = set(numbers)
    own = {fd for fd in taken if _is_open(fd)}
    for fd in taken - own:
        os.dup2(stand_in, fd, inheritable=False)
    return own


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
