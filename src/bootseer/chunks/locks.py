"""Who owns a cache folder: the flock of its file ``lock``, whose text names the owner and whose mtime is the last use.

Maintenance (`maintain`) owns a folder for moments only, and only one that nothing uses: the lock is not enough for
that, as an EROFS mount may read a complete data file without any process. A write lease on the data file tells: the
kernel grants it to the only one who has the file open, and while it is held, others wait in open(2)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer.errors import UnavailableError
from bootseer.kernel.flock import is_at, lock, locked

DATA = "data"
"""The name of the file in a cache folder that the blocks are in; also of the one file of a FUSE mount."""
READING = threading.Lock()
"""Held in this process while the data file of another folder is open for a moment, and by a collection, which would
take that folder for used."""
_MAINTENANCE = b"maintenance"
_MAINTENANCE_SECONDS = 20.0
_HANDOVER_SECONDS = 0.05


def take_lock(folder: Path) -> int:
    """Own the cache folder (made when missing) until the descriptor is closed; its time of last use is now. Raises
    `UnavailableError` when another process owns it (maintenance is waited for), and `OSError`."""
    began = time.monotonic()
    while time.monotonic() - began < 2 * _MAINTENANCE_SECONDS:
        try:
            _make(folder)
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # removed in this moment
        if lock(fd):
            if is_at(fd, folder / "lock"):
                _sign(fd, b"%d" % os.getpid())
                return fd
            os.close(fd)
            continue
        owner = os.pread(fd, 64, 0).strip()
        os.close(fd)
        # A little patience in any case: maintenance may not have signed yet.
        patience = _MAINTENANCE_SECONDS if owner.endswith(_MAINTENANCE) else _HANDOVER_SECONDS
        if time.monotonic() - began > patience:
            raise UnavailableError(
                f"block cache {folder} is in use by process {owner.decode(errors='replace') or 'unknown'}",
                hint="unmount what that process serves, or use another cache folder",
            )
        time.sleep(0.005)
    raise UnavailableError(f"block cache {folder} is removed again and again", hint="look what removes it")


class OwnedFolder(NamedTuple):
    """A cache folder in maintenance. ``data_fd``: its data file, -1 when there is none."""

    folder: Path
    data_fd: int

    @property
    def digest(self) -> bytes:
        """Of the block map, after which the folder is named."""
        return bytes.fromhex(self.folder.name)


@contextlib.contextmanager
def maintain(folder: Path) -> Iterator[OwnedFolder | None]:
    """Own a cache folder that nothing uses, for a moment, for which users that come meanwhile wait; its time of last
    use stays. None when it is in use, gone, or on a file system where nobody can tell. Raises `OSError`."""
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            yield None
            return
        undo.callback(os.close, fd)
        if not lock(fd) or not is_at(fd, folder / "lock"):
            yield None
            return
        used = os.fstat(fd)
        _sign(fd, b"%d %s" % (os.getpid(), _MAINTENANCE))
        os.utime(fd, ns=(used.st_atime_ns, used.st_mtime_ns))
        data = -1
        try:
            data = os.open(folder / DATA, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            undo.callback(os.close, data)
        except FileNotFoundError:
            pass
        except BlockingIOError:  # another maintenance has a lease on it
            yield None
            return
        yield OwnedFolder(folder, data) if data < 0 or lease(data) else None


class Hold:
    """While this object lives, eviction does not remove the small files of the tree in ``folder`` (made when missing).
    To hold a tree is to use it: it is the last to be evicted. Raises `OSError`."""

    __slots__ = ("_fd",)

    def __init__(self, folder: Path) -> None:
        self._fd = -1
        until = time.monotonic() + _MAINTENANCE_SECONDS
        while self._fd < 0 or not is_at(self._fd, folder):
            self.release()
            if time.monotonic() >= until:
                raise TimeoutError(errno.ETIMEDOUT, "it is removed again and again", str(folder))
            with contextlib.suppress(FileNotFoundError):
                _make(folder)
                self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._fd, fcntl.LOCK_SH)  # who removes it needs a millisecond
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = release


@contextlib.contextmanager
def unheld(folder: Path) -> Iterator[bool]:
    """While inside, there is no `Hold` of ``folder``. False: there is one. Raises `OSError`."""
    with locked(folder, os.O_RDONLY | os.O_DIRECTORY) as alone:
        yield alone


def _make(folder: Path) -> None:
    """Make the folder when it is missing. Others may remove it at any moment: it need not be there afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # it was there, and then it was not; or it is no folder
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise


def _sign(fd: int, text: bytes) -> None:
    """Best effort: on a full disk a lock without a name must do."""
    with contextlib.suppress(OSError):
        os.utime(fd)
        os.pwrite(fd, text.ljust(31) + b"\n", 0)
        os.ftruncate(fd, 32)


def lease(fd: int) -> bool:
    """Take a write lease on a file, which is granted only to the one open file description there is."""
    try:
        # Who opens the file has the kernel signal us: by one that is ignored by default, not SIGIO.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    return True
