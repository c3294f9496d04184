"""Keeping what comes: blocks are written as far as the limits and the disk leave room, and made to survive a crash. On
a full disk other folders of the node cache give space back, which one thread at a time waits for; where that has failed
once it is not tried again for this folder."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.chunks import eviction
from bootseer.chunks.hashing import Buffer

log = logging.getLogger(__name__)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
STEP = 256 << 20
"""Bytes for which room is made at once."""
PATIENCE = 5.0
"""Seconds for which another process that frees space on the disk is waited for."""
_PAUSE, _LONGEST_PAUSE = 10.0, 600.0
_OTHERS = 16
"""Processes of a node that write to its cache at once."""
_SYNC_SECONDS = 2.0


def make_room(folder: Path) -> bool:
    """Have the folders of the node cache beside ``folder`` give space back; whether one did."""
    return eviction.free(folder.parent.parent, STEP, keep=folder.name, patience=PATIENCE)


class Allowance:
    """What the ``limits`` of a node cache let one process write, asked for in steps. For many threads."""

    def __init__(self, cache_dir: Path, limits: eviction.Limits) -> None:
        self._dir, self._limits = cache_dir, limits
        self._left, self._next, self._pause = 0, 0.0, _PAUSE
        self._lock = threading.Lock()

    def allow(self, size: int, folder: Path) -> bool:
        """Whether ``size`` bytes more may be written to ``folder``; room is made for them by eviction of what nobody
        uses. After a no it is no for a while, longer each time."""
        with self._lock:
            if self._left < size and time.monotonic() >= self._next:
                self._ask(size, folder)
            if self._left < size:
                return False
            self._left -= size
            return True

    def _ask(self, size: int, folder: Path) -> None:
        self._left = self._step(size)
        if not self._left:
            eviction.make_room(self._dir, self._limits, coming=STEP, keep=folder.name)
            self._left = self._step(size)
        if self._left:
            self._pause = _PAUSE
        else:
            self._next = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _step(self, size: int) -> int:
        """As much as fits: little where as much for other processes, which ask before it is written, would not. 0 for
        not even ``size``."""
        for step, room in (STEP, _OTHERS * STEP), (STEP // 16, STEP // 16), (STEP // 256, STEP // 256), (size, size):
            if step >= size and self._limits.excess(self._dir, room) <= 0:
                return step
        return 0


class Room:
    """Room on the disk for one folder, which ``make`` makes when it is full; None: nobody can. ``allow`` says whether
    the limits let so many bytes be written. For many threads."""

    def __init__(self, make: Callable[[], bool] | None, allow: Callable[[int], bool] | None = None) -> None:
        self._make, self._allow = make, allow
        self._made = 0
        self._making = threading.Lock()

    def write(self, put: Callable[[int, Buffer], None], block: int, data: Buffer) -> None:
        """``put(block, data)``, on a full disk once more after room was made. Raises `OSError`."""
        if self._allow is not None and not self._allow(len(data)):
            raise OSError(errno.ENOSPC, "the limits of the node cache leave no space")
        made = self._made
        try:
            put(block, data)
        except OSError as exc:
            if exc.errno not in NO_SPACE or not self._is_there(made):
                raise
            put(block, data)

    def _is_there(self, made: int) -> bool:
        """Make room, unless another thread did since it had been ``made`` times. Whether there is room now."""
        with self._making:
            if self._made == made and self._make is not None:
                try:
                    self._made += self._make()
                except Exception:
                    log.exception("freeing space failed")
                if self._made == made:
                    self._make = None
            return self._made > made


def keep_synced(sync: Callable[[], None], stop: threading.Event) -> None:
    """``sync`` again and again until ``stop``."""
    while not stop.wait(_SYNC_SECONDS):
        sync()
