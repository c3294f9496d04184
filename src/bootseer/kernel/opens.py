"""Which files are opened by who sees a mount namespace of their own: fanotify marks on all its mounts.

Needs CAP_SYS_ADMIN. Concurrency: one thread reads events from `Opens.begin` to `Opens.end`.
"""

from __future__ import annotations

import os
import select
import stat
import struct
import threading
from typing import NamedTuple

from bootseer.kernel import _libc
from bootseer.kernel import mount as mounts

_EVENT = struct.Struct("=IBBHQii")
_OPEN, _CLOSE_WRITE, _CLOSE_NOWRITE, _OVERFLOW = 0x20, 0x08, 0x10, 0x4000
_CLASS = 0x01 | 0x02 | 0x10  # close on exec, do not block, no limit of the queue
_ADD_MOUNT = 0x01 | 0x10
_VIRTUAL = {"proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "tracefs", "debugfs", "autofs"}
_VIRTUAL |= {"securityfs", "pstore", "bpf", "hugetlbfs", "configfs", "fusectl", "binfmt_misc", "efivarfs", "nsfs"}
_JOIN_SECONDS = 60.0
_READ = 16 << 10  # 680 events, each with a descriptor


class FileState(NamedTuple):
    """What is equal while nobody writes to a file. Times in nanoseconds since the epoch; ``born`` 0: not known."""

    device: int
    inode: int
    size: int
    mtime: int
    ctime: int
    born: int

    @property
    def file(self) -> tuple[int, int]:
        return self.device, self.inode


def state_of(file: int | str) -> FileState | None:
    """Of a descriptor or a path (links are not followed); None for what is no regular file. Raises `OSError`."""
    found = _libc.statx(file)
    if not stat.S_ISREG(found.mode):
        return None
    return FileState(found.device, found.inode, found.size, found.mtime, found.ctime, found.born)


class Opens:
    """The calling thread and its children get mounts of their own between `begin` and `end`; ``seen`` then has the
    state in which each path was first met, ``written`` and ``read`` (device, inode) of what was open for writing, and
    only for reading."""

    def __init__(self) -> None:
        self.seen: dict[str, FileState] = {}
        self.written: set[tuple[int, int]] = set()
        self.read: set[tuple[int, int]] = set()
        self.failure = ""
        """Why ``seen`` is not whole; empty when it is."""
        self._stop = threading.Event()
        self._events = -1
        self._kept: list[int] = []
        self._thread: threading.Thread | None = None
        self._mounts: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Raises `OSError` when it is not allowed; nothing has changed then."""
        self._events = _libc.fanotify_init(_CLASS, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)
        try:
            self._kept = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in ("/proc/thread-self/ns/mnt", "/", ".")]
            # Before the namespace is: a thread shares its root and working directory with who starts it.
            self._thread = threading.Thread(target=self._watch, name="env-opens", daemon=True)
            self._thread.start()
            mounts.unshare()
            self._mounts = _mounts()
            for _, target in self._mounts:
                _libc.fanotify_mark(self._events, _ADD_MOUNT, _OPEN | _CLOSE_WRITE | _CLOSE_NOWRITE, target)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Back to the mounts of before. May be called twice."""
        if self._kept:
            if self._mounts:
                if _mounts() != self._mounts:
                    self.failure = self.failure or "it changed what is mounted"
                home, root, folder = self._kept
                _libc.unshare(_libc.CLONE_FS)
                _libc.setns(home)
                os.fchdir(root)
                os.chroot(".")
                os.fchdir(folder)
            for fd in self._kept:
                os.close(fd)
            self._kept = []
        self._stop.set()
        if self._thread:
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                self.failure = "a file system did not answer"
                return  # the thread still uses the descriptor, and closes with the process
            self._thread = None
        if self._events >= 0:
            os.close(self._events)
            self._events = -1

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        try:
            while True:
                last = self._stop.is_set()  # what was opened before is in the queue by now
                if poll.poll(0 if last else 50):
                    self._take(os.read(self._events, _READ))
                elif last:
                    return
        except OSError as exc:
            self.failure = f"an event was lost: {exc.strerror}"

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            length, _, _, _, mask, fd, _ = _EVENT.unpack_from(data, at)
            at += length
            if mask & _OVERFLOW:
                self.failure = "too many files were opened at once"
            if fd < 0:
                continue
            try:
                if found := state_of(fd):
                    if mask & _CLOSE_WRITE:
                        self.written.add(found.file)
                    if mask & _CLOSE_NOWRITE:
                        self.read.add(found.file)
                    path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
                    self.seen.setdefault(path, found)
            finally:
                os.close(fd)


def _mounts() -> set[tuple[str, str]]:
    return {(entry.device, entry.target) for entry in mounts.entries() if entry.fstype not in _VIRTUAL}
