"""The use of a cache: which of the entries that were restored were opened until a first step had ended. In an overlay
the kernel tells of every open, also in containers; in a plain folder the times of access do, where they are kept."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time

from bootseer.env.generation import Held
from bootseer.errors import logged
from bootseer.kernel import libc
from bootseer.kernel.opens import EVENT

log = logging.getLogger(__name__)

_CLASS = 0x01 | 0x02 | 0x10  # close on exec, do not wait, no limit of the queue
_ADD_FILE_SYSTEM = 0x01 | 0x100
_OPEN = 0x20
_READ = 4 << 10


class Use:
    """From here to `ended` it is watched; one thread of its own."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._seen = set[tuple[int, int]]()
        self._events = self._over = -1
        self._thread = threading.Thread(target=self._watch, name="cache-use", daemon=True)
        if held.restored and held.group and not held.joined:
            try:
                self._events = libc.fanotify_init(_CLASS, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                libc.fanotify_mark(self._events, _ADD_FILE_SYSTEM, _OPEN, str(held.folder))
                self._over = os.eventfd(0)
                self._thread.start()
            except (OSError, RuntimeError) as exc:
                self._close()
                log.info("nobody can tell what of the cache is used: %s", exc)

    def ended(self) -> tuple[int, set[str] | None]:
        """How many entries were restored, and which of them were used; None where nobody can tell. Call it once."""
        restored = self._held.known()
        if not self._held.restored or self._held.joined:
            return 0, None
        if not self._held.group:
            here = self._held.entries()
            used = {path for path in restored & here.keys() if here[path].st_atime_ns}
            return len(restored), used if used or self._keeps_times() else None
        if not self._thread.ident:
            return len(restored), None
        os.eventfd_write(self._over, 1)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._close()
        here = self._held.entries()
        return len(restored), {p for p in restored & here.keys() if (here[p].st_dev, here[p].st_ino) in self._seen}

    def _keeps_times(self) -> bool:
        probe = self._held.folder.parent / "probe"
        with contextlib.suppress(OSError):
            probe.write_text("x")
            os.utime(probe, ns=(0, time.time_ns()))
            probe.read_text()
            return probe.stat().st_atime_ns > 0
        return False

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._over, select.POLLIN)
        with logged(log.info, "nobody can tell what of the cache is used", kinds=OSError):
            over = False
            while not over:
                over = self._over in {fd for fd, _ in poll.poll()}
                with contextlib.suppress(BlockingIOError):
                    while data := os.read(self._events, _READ):
                        self._take(data)

    def _close(self) -> None:
        for fd in {self._events, self._over} - {-1}:
            os.close(fd)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            length, _, _, _, _, fd, _ = EVENT.unpack_from(data, at)
            at += length
            if fd >= 0:
                found = os.fstat(fd)
                os.close(fd)
                self._seen.add((found.st_dev, found.st_ino))
