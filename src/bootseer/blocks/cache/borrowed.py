"""The blocks a hot pack is made of: of the cache file, and after the unmount of the same data file, borrowed.

Who unmounts does not wait for the hot pack, so the pack is finished when the cache belongs to nobody any more, or to
the next mount. That must not notice: it guards a data file that nobody else has open. So the file is borrowed under a
read lease, taken while the folder's lock is free: whoever opens it to write (the next mount, a collection) waits in
open(2), the kernel says so here, and the file is given back within the time that one block takes.

Concurrency: one lock; one thread reads, another calls `leave` and `give_way`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.cache.locks import DATA
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.errors import UnavailableError

_FREE_SECONDS = 5.0
"""The server that held the folder's lock ends within milliseconds; a lock that is held for longer is another one's."""
_LOOK_SECONDS = 0.005


class Borrowed:
    """Reads ready blocks of ``cache``; after `leave` from its data file as it was at that moment.

    What is read then may have been given back to the disk meanwhile: who uses it compares it with the block map.
    """

    def __init__(self, cache: CacheFile) -> None:
        self.map: BlockMap = cache.map
        self._cache: CacheFile | None = cache
        self._folder = cache.folder
        self._ready = cache.ready
        self._lock = threading.Lock()
        self._fd = -1
        self._given_back = False

    def is_ready(self, first: int, last: int) -> bool:
        return self._ready.find(b"\0", first, last + 1) < 0

    def read(self, offset: int, length: int) -> bytes:
        """Raises `OSError`, and `UnavailableError` when somebody else has use for the file."""
        with self._lock:
            if self._cache is not None:
                return self._cache.read(offset, length)
            if self._fd < 0:
                self._borrow()
            self._look()
            data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise OSError(errno.EIO, f"block cache {self._folder} was cut short")
        return data

    def leave(self) -> None:
        """Before the cache file is closed."""
        with self._lock:
            self._cache = None
            self._ready = bytearray(self._ready[:])

    def give_way(self) -> None:
        """Give the file back where somebody waits for it. To be called often, as nothing else does between reads."""
        with self._lock, contextlib.suppress(UnavailableError):
            if self._fd >= 0:
                self._look()

    def close(self) -> None:
        with self._lock:
            self._give_back()

    def _look(self) -> None:
        """Under the lock."""
        if self._fd >= 0 and fcntl.fcntl(self._fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK:
            self._give_back()
        if self._given_back:
            raise UnavailableError(f"block cache {self._folder} is used again")

    def _give_back(self) -> None:
        fd, self._fd, self._given_back = self._fd, -1, True
        if fd >= 0:
            os.close(fd)

    def _borrow(self) -> None:
        """Under the lock."""
        until = time.monotonic() + _FREE_SECONDS
        while not self._given_back and self._fd < 0:
            lock = os.open(self._folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Whoever takes the folder next takes this lock before it opens the data file.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._fd = _leased(self._folder / DATA)
            except BlockingIOError:
                if time.monotonic() >= until:
                    self._given_back = True
            finally:
                os.close(lock)
            if self._fd < 0:
                time.sleep(_LOOK_SECONDS)


def _leased(path: Path) -> int:
    """``path``, open for reading under a read lease. Raises `BlockingIOError` while somebody may write to it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Whoever opens it has the kernel signal us: by one that is ignored by default, not SIGIO.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BaseException:
        os.close(fd)
        raise
    return fd
