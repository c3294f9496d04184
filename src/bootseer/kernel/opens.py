"""Which files are opened, by fanotify: all that a thread and its children open, or what a container opens of the host.

The first get a mount namespace of their own, whose mounts are marked. A container has one already, made by its runtime
from host folders: the file systems of these are marked, and what is opened in mounts of the caller is left out. Needs
CAP_SYS_ADMIN. Concurrency: one thread reads events from `Opens.begin` to `Opens.end`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import stat
import struct
import termios
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bootseer.kernel import libc
from bootseer.kernel import mount as mounts

EVENT = struct.Struct("=IBBHQii")
_OPEN, _CLOSE_WRITE, _CLOSE_NOWRITE, _OVERFLOW = 0x20, 0x08, 0x10, 0x4000
_MASK = _OPEN | _CLOSE_WRITE | _CLOSE_NOWRITE | 0x40000000  # of folders, too
_CLASS, _UNLIMITED = 0x01 | 0x02, 0x10  # close on exec, do not block; no limit of the queue
_ADD_MOUNT, _ADD_FILE_SYSTEM = 0x01 | 0x10, 0x01 | 0x100
_VIRTUAL = {"proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "tracefs", "debugfs", "autofs"}
_VIRTUAL |= {"securityfs", "pstore", "bpf", "hugetlbfs", "configfs", "fusectl", "binfmt_misc", "efivarfs", "nsfs"}
_JOIN_SECONDS = 60.0
_MARK_SECONDS = 5.0
_READ = 4 << 10  # 170 events, each with a descriptor


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
    mode, *found = libc.statx(file)
    return FileState(*found) if stat.S_ISREG(mode) else None


class Opens:
    """Notes what is opened between `begin` and `end`: ``seen`` has the state in which each path was first met,
    ``written`` and ``read`` (device, inode) of what was open for writing, and only for reading, ``folders`` the paths
    of folders.

    ``shown``: (host folder, path in the container); without it the calling thread and its children are observed. What
    is mounted in the folders ``ignored`` (each with a ``/`` at its end) need not be seen.
    """

    def __init__(self, shown: Sequence[tuple[str, str]] = (), ignored: tuple[str, ...] = ()) -> None:
        self._ignored = ignored
        self._away = False
        self._shown = shown
        self._inside = tuple(path.rstrip("/") + "/" for _, path in shown)
        self._ours: set[str] = set()
        self._known: set[str] = set()
        self._wake = self._inner = -1
        self.seen: dict[str, FileState] = {}
        self.written: set[tuple[int, int]] = set()
        self.read: set[tuple[int, int]] = set()
        self.folders: set[str] = set()
        self.failure = ""
        """Why ``seen`` is not whole; empty when it is."""
        self._events = -1
        self._kept: list[int] = []
        self._thread: threading.Thread | None = None
        self._mounts: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Raises `OSError` when it is not allowed; nothing has changed then."""
        # The queue of a namespace of its own grows with what its command does; that of a host has a limit.
        kind = _CLASS if self._shown else _CLASS | _UNLIMITED
        # Without waiting: for who holds a lease on the file, for the other end of a FIFO.
        self._events = libc.fanotify_init(kind, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_LARGEFILE)
        self._wake = os.eventfd(0)
        try:
            if self._shown:
                self._ours = mounts.identifiers()
                _in_time(self._mark)
            self._kept = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in ("/proc/thread-self/ns/mnt", "/", ".")]
            # Before the namespace is: a thread shares its root and working directory with who starts it.
            thread = threading.Thread(target=self.watch, name="env-opens", daemon=True)
            _start(thread)
            self._thread = thread
            if not self._shown:
                self._return()  # whether it will be possible
                self._away = True
                mounts.unshare()
                self._mounts = _mounts()
                _in_time(self._mark)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Back to the mounts of before. May be called twice."""
        stuck = not self.drained()  # before the mounts are gone, by which paths are named
        if self._away:
            if others := [target for _, target in _mounts() ^ self._mounts if not self._is_ignored(target)]:
                self.failure = f"{min(others)} was mounted or unmounted meanwhile"
            self._return()
            self._away = False
        for fd in self._kept:
            os.close(fd)
        self._kept = []
        if stuck:
            self.failure = "a file system did not answer"
            return  # the thread still uses the descriptors, which are closed with the process
        for fd in (self._events, self._wake, self._inner):
            if fd >= 0:
                os.close(fd)
        self._events = self._wake = self._inner = -1

    def drained(self) -> bool:
        if self._thread is None:
            return True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _return(self) -> None:
        home, root, folder = self._kept
        libc.unshare(libc.CLONE_FS)  # a namespace is not changed for who shares its working directory
        libc.setns(home)
        os.fchdir(root)
        os.chroot(".")
        os.fchdir(folder)

    def _mark(self) -> None:
        for source in (os.path.realpath(folder) for folder, _ in self._shown):
            for place in (source, *(entry.target for entry in mounts.below(source))):
                libc.fanotify_mark(self._events, _ADD_FILE_SYSTEM, _MASK, place)
        for _, target in self._mounts:
            try:
                libc.fanotify_mark(self._events, _ADD_MOUNT, _MASK, target)
            except OSError:
                if not self._is_ignored(target) and os.path.lexists(target):
                    raise

    def _is_ignored(self, target: str) -> bool:
        return (target + "/").startswith(self._ignored)

    def watch(self) -> None:
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            with open("/proc/thread-self/mountinfo") as table:
                if self._shown:
                    poll.register(table, select.POLLPRI)
                left: int | None = None  # bytes of events at the end; others may open files for ever
                while left is None or left > 0:
                    ready = {fd for fd, _ in poll.poll()}
                    if table.fileno() in ready:  # the number of a mount that is gone is soon another's
                        self._ours = mounts.identifiers()
                    if left is None and self._wake in ready:
                        left = waiting(self._events)
                    if self._events in ready:
                        data = os.read(self._events, _READ)
                        self.take(data)
                        left = None if left is None else left - len(data)
                    elif left is not None:
                        return  # the rest was counted, but the kernel drops what it cannot open for us
        except Exception as exc:  # whatever it is, ``seen`` is not whole
            self.failure = f"an event was lost: {exc}"
            os.dup2(self._wake, self._events, inheritable=False)  # else the queue grows as long as the command runs

    def take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            length, _, _, _, mask, fd, pid = EVENT.unpack_from(data, at)
            at += length
            if mask & _OVERFLOW:
                self.failure = "too many files were opened at once"
            if fd < 0:
                continue
            try:
                path = self._path(fd, pid)
                if not path:
                    continue
                if (found := state_of(fd)) is None:
                    self.folders.add(path)
                else:
                    if mask & _CLOSE_WRITE:
                        self.written.add(found.file)
                    if mask & _CLOSE_NOWRITE:
                        self.read.add(found.file)
                    self.seen.setdefault(path, found)
            finally:
                os.close(fd)

    def _path(self, fd: int, pid: int) -> str:
        """Of what is open as ``fd``, by the process ``pid``; empty when it is not to be noted."""
        ident = ""
        if self._shown:
            ident = Path(f"/proc/self/fdinfo/{fd}").read_text().partition("mnt_id:")[2].split(maxsplit=1)[0]
            if ident in self._ours:
                return ""
        try:
            path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        except OSError:  # longer than any path may be
            if self._shown and ident not in self._known:
                return ""
            raise
        return self._inner_path(fd, pid, path, ident) if self._shown else path

    def _inner_path(self, fd: int, pid: int, path: str, ident: str) -> str:
        """The path in the container of what is open as ``fd``, in the mount ``ident``; empty when it is another's."""
        if (path + "/").startswith(self._inside):
            if not self._is_shown(ident, pid, path, os.fstat(fd)):
                return ""
            if self._inner < 0:  # while it is open, the container's mounts have their names
                with contextlib.suppress(OSError):
                    self._inner = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            return path
        info = os.fstat(fd)
        for source, target in self._shown:  # the mount of a container that has ended: the path begins there
            if _is(source + path.rstrip("/"), info):
                return target.rstrip("/") + path.rstrip("/")
        if not os.path.exists(f"/proc/{pid}") and any(os.path.isfile(source + path) for source, _ in self._shown):
            self.failure = f"{path} was replaced, and who had opened it is gone"
        return ""

    def _is_shown(self, ident: str, pid: int, path: str, info: os.stat_result) -> bool:
        """Whether the mount ``ident`` is of ``shown``: another job's container may have its own at the same path."""
        if ident in self._known:
            return True
        below = [item for item in self._shown if (path + "/").startswith(item[1].rstrip("/") + "/")]
        source, target = max(below, key=lambda item: len(item[1]))
        is_shown = _is(source + path[len(target.rstrip("/")) :], info)
        if not is_shown:  # another's, or replaced since; which is not kept: the next mount may have this number
            if holder := _who_sees(ident, pid):
                is_shown = _is(f"/proc/{holder}/root{target}", os.stat(source))
            else:
                self.failure = f"{path} was replaced, and who had opened it is gone"
        if is_shown:
            self._known.add(ident)
        return is_shown


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as exc:
        raise OSError(errno.EAGAIN, str(exc)) from exc


def waiting(fd: int) -> int:
    """Bytes that can be read from ``fd`` now."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def _in_time(work: Callable[[], object]) -> None:
    """``work`` in a thread with the mounts of this one: whoever serves one of them may never answer."""

    def run() -> None:
        try:
            work()
        except OSError as exc:
            failed.append(exc)

    failed: list[OSError] = []
    thread = threading.Thread(target=run, name="env-marks", daemon=True)
    _start(thread)
    thread.join(_MARK_SECONDS)
    if thread.is_alive():
        raise OSError(errno.ETIMEDOUT, "a file system did not answer")
    if failed:
        raise failed[0]


def _who_sees(ident: str, pid: int) -> str:
    """A process in whose namespace the mount ``ident`` is, ``pid`` before others; empty when there is none."""
    for name in (str(pid), *filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{name}/mountinfo", "rb") as lines:
            if any(line.startswith(f"{ident} ".encode()) for line in lines):
                return name
    return ""


def _is(path: str, info: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), info)
    except OSError:
        return False


def _mounts() -> set[tuple[str, str]]:
    return {(entry.device, entry.target) for entry in mounts.entries() if entry.fstype not in _VIRTUAL}
