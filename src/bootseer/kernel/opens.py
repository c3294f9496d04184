"""Which files are opened in the mounts of a command, by fanotify.

Only mounts of the command's own namespace are marked, so that nobody else's opens are seen: a thread and its children
get a namespace here; a container has its runtime's, which tells of it before the command starts (`hook`). What is
mounted later is marked as soon as it is there. Needs CAP_SYS_ADMIN. Concurrency: one thread reads events from
`Opens.begin` to `Opens.end`."""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import fcntl
import itertools
import os
import select
import stat
import struct
import termios
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bootseer.kernel import libc
from bootseer.kernel import mount as mounts
from bootseer.wiretypes import json_as

EVENT = struct.Struct("=IBBHQii")
_OPEN, _CLOSE_WRITE, _CLOSE_NOWRITE, _OVERFLOW, _EXEC = 0x20, 0x08, 0x10, 0x4000, 0x1000
_MASK = _OPEN | _CLOSE_WRITE | _CLOSE_NOWRITE | _EXEC | 0x40000000  # of folders, too
_CLASS = 0x01 | 0x02 | 0x10  # close on exec, do not block; no limit of the queue, which is of one command
_ADD_MOUNT = 0x01 | 0x10
_VIRTUAL = {"proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "tracefs", "debugfs", "autofs"}
_VIRTUAL |= {"securityfs", "pstore", "bpf", "hugetlbfs", "configfs", "fusectl", "binfmt_misc", "efivarfs", "nsfs"}
_MEMORY = {"tmpfs", "ramfs"}
_MOST = 1_000_000
"""Files and folders that are noted: half a GB of memory, which the command could fill."""
_REFUSED = {errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOSPC, errno.ENOMEM, errno.EBADF}
"""Errors of a mark that say nothing of its place; with another one nobody can open a file there either."""
_JOIN_SECONDS = 60.0
_MARK_SECONDS = 5.0
_TEXT, _TEXTS = 1 << 20, 64 << 20
"""Bytes of a file, and of all, that are kept as they were before the command could write to them."""
_READ = 4 << 10  # 170 events, each with a descriptor
_TELL = "cat >/proc/{0}/fd/{1} && read -r x </proc/{0}/fd/{2}; :"
_observing = threading.local()


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


class _State(msgspec.Struct):
    """Of a container, as its runtime tells it to a hook."""

    pid: int


def state_of(file: int | str) -> FileState | None:
    """Of a descriptor or a path (links are not followed); None for what is no regular file. Raises `OSError`."""
    mode, *found = libc.statx(file)
    return FileState(*found) if stat.S_ISREG(mode) else None


def hook() -> list[str]:
    """The program that the runtime of a container which the calling thread starts has to run (``createRuntime``) when
    the container has its mounts, and before its command; none when nobody observes it."""
    return list(getattr(_observing, "hook", ()))


class Opens:
    """Notes what is opened between `begin` and `end`: ``seen`` has the state in which each path was first met,
    ``written`` and ``read`` (device, inode) of what was open for writing, and only for reading, ``folders`` the paths
    of folders, ``started`` the names of programs. ``inside``: paths in the container that the calling thread starts, of
    what is observed there; without them the thread and its children are. ``ignored``: folders (each with a ``/`` at its
    end) in which no mount need be seen."""

    def __init__(self, inside: Sequence[str] = (), ignored: tuple[str, ...] = ()) -> None:
        self._inside = tuple(path.rstrip("/") + "/" for path in inside)
        self._ignored = ignored
        self.seen: dict[str, FileState] = {}
        self.written: set[tuple[int, int]] = set()
        self.read: set[tuple[int, int]] = set()
        self.texts: dict[str, bytes] = {}
        """What files held in the state in which they were met: small ones, as long as there is room."""
        self._room = _TEXTS
        self.folders: set[str] = set()
        self.started: set[str] = set()
        self.failure = ""
        """By which accident ``seen`` is not whole; empty when by none."""
        self.beyond = ""
        """What the command itself did so that ``seen`` is not whole."""
        self._away = False
        self._known: set[tuple[int, str, str]] = set()
        self._devices: set[str] = set()
        self._automatic: list[str] = []
        self._mute: list[tuple[str, threading.Thread]] = []
        self._fds: dict[str, int] = {}
        self._kept: list[int] = []
        self._told = b""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Raises `OSError` when it is not allowed; nothing has changed then."""
        # Without waiting: for who holds a lease on the file, for the other end of a FIFO.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_LARGEFILE
        self._fds["events"] = libc.fanotify_init(_CLASS, flags)
        self._fds["wake"] = os.eventfd(0)
        try:
            if self._inside:
                self._fds["told"], self._fds["tell"] = os.pipe()
                self._fds["gone on"], self._fds["go on"] = os.pipe()
                tell = _TELL.format(os.getpid(), self._fds["tell"], self._fds["gone on"])
                _observing.hook = ["/bin/sh", "-c", tell]
            else:
                places = ("/proc/thread-self/ns/mnt", "/", ".")
                self._kept = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in places]
                os.fchdir(self._kept[2])
                self._return()  # whether it will be possible
                self._away = True
                mounts.unshare()
                self._look(first=True)
                self._add_input()
            thread = threading.Thread(target=self.watch, name="env-opens", daemon=True)  # sees the mounts of this one
            _start(thread)
            self._thread = thread
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Back to the mounts of before. May be called twice."""
        _observing.hook = ()
        stuck = not self.drained()  # before the mounts are gone, by which paths are named
        if self._away:
            self._return()
            self._away = False
        for fd in self._kept:
            os.close(fd)
        self._kept = []
        if answered := [path for path, thread in self._mute if not thread.is_alive()]:
            self.failure = f"{answered[0]} did not answer at first"
        for place in self._automatic:
            if any(path.startswith(place + "/") for path in itertools.chain(self.seen, self.folders)):
                self.failure = f"{place} was mounted as the command came there"
        if stuck:
            self.failure = "a file system did not answer"
            return  # the thread still uses the descriptors, which are closed with the process
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def drained(self) -> bool:
        if self._thread is None:
            return True
        os.eventfd_write(self._fds["wake"], 1)
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
        with contextlib.suppress(OSError):  # its server has gone meanwhile
            os.fchdir(folder)

    def _add_input(self) -> None:
        """What the command may read without opening it."""
        with contextlib.suppress(OSError):
            state = state_of(0) if os.fstat(0).st_nlink else None  # a shell's own text has no name
            if state and fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                self.seen[os.readlink("/proc/self/fd/0")] = state
                self.read.add(state.file)

    def _look(self, *, first: bool = False) -> None:
        """Mark all mounts that are there: a new one may look just as one that is gone."""
        found = list(mounts.entries())
        automatic = {entry.ident for entry in found if entry.fstype == "autofs"}
        real = [entry for entry in found if entry.fstype not in _VIRTUAL and not self._is_ignored(entry.target)]
        for entry in real:
            name = (entry.ident, entry.device, entry.target)
            if not first and name not in self._known:
                if entry.parent in automatic:  # mounted for who opens a file in it, before the mark
                    self._automatic.append(entry.target)
                elif not entry.follows and (entry.fstype not in _MEMORY or entry.device in self._devices):
                    self.beyond = self.beyond or f"it mounted {entry.target}"
            self._known.add(name)
            self._devices.add(entry.device)
        self._mark(entry.target for entry in real)

    def _follow(self) -> None:
        """Mark the mounts of the container whose state its runtime tells; then its command may start."""
        self._told += os.read(self._fds["told"], 1 << 16)
        try:
            pid = json_as(self._told, _State).pid
        except ValueError:
            return  # half of it
        self._told = b""
        if "inner" not in self._fds:  # while it is open, the container's mounts have their names
            self._fds["inner"] = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        places = [entry.target for entry in mounts.entries(pid) if entry.fstype not in _VIRTUAL]
        self._mark(f"/proc/{pid}/root{path}" for path in places if any(one in path + "/" for one in self._inside))
        os.write(self._fds["go on"], b"\n")

    def _mark(self, paths: Iterable[str]) -> None:
        """Where no server answers nobody can open a file either; `end` looks whether it did later."""
        mute = {path for path, thread in self._mute if thread.is_alive()}
        left, failed = collections.deque(path for path in paths if path not in mute), list[OSError]()
        while left and not failed:
            events, now = os.dup(self._fds["events"]), [""]
            arguments = (events, left, now, failed)
            thread = threading.Thread(target=_mark_each, args=arguments, name="env-marks", daemon=True)
            _start(thread)
            count = -1
            while thread.is_alive() and len(left) != count:
                count = len(left)
                thread.join(_MARK_SECONDS)
            if thread.is_alive():
                self._mute.append((now[0], thread))
        if failed:
            raise failed[0]

    def _is_ignored(self, target: str) -> bool:
        return (target + "/").startswith(self._ignored)

    def watch(self) -> None:
        events, wake, told = self._fds["events"], self._fds["wake"], self._fds.get("told", -1)
        poll = select.poll()
        poll.register(events, select.POLLIN)
        poll.register(wake, select.POLLIN)
        try:
            with open("/proc/thread-self/mountinfo") as table:
                if self._inside:
                    poll.register(told, select.POLLIN)
                else:
                    poll.register(table, select.POLLPRI)
                    self._look()
                left: int | None = None  # bytes of events at the end; others may open files for ever
                while left is None or left > 0:
                    ready = {fd for fd, _ in poll.poll()}
                    if table.fileno() in ready:
                        self._look()
                    if told in ready:
                        self._follow()
                    if left is None and wake in ready:
                        left = waiting(events)
                    if events in ready:
                        data = os.read(events, _READ)
                        self.take(data)
                        left = None if left is None else left - len(data)
                    elif left is not None:
                        break  # the rest was counted, but the kernel drops what it cannot open for us
            if self._inside and "inner" not in self._fds:
                self.beyond = "the container's runtime did not tell of its mounts"
        except Exception as exc:  # whatever it is, ``seen`` is not whole
            self.failure = f"an event was lost: {exc}"
            os.dup2(wake, events, inheritable=False)  # else the queue grows as long as the command runs
            if self._inside:
                os.write(self._fds["go on"], b"\n" * 1000)  # no container waits for us

    def take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            length, _, _, _, mask, fd, _ = EVENT.unpack_from(data, at)
            at += length
            if mask & _OVERFLOW:
                self.failure = "too many files were opened at once"
            if fd < 0:
                continue
            try:
                path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
                if self._inside and not (path + "/").startswith(self._inside):
                    continue
                if len(self.seen) + len(self.folders) > _MOST:
                    raise OverflowError(f"more than {_MOST} files were opened")
                if (found := state_of(fd)) is None:
                    self.folders.add(path)
                    continue
                if mask & _CLOSE_WRITE:
                    self.written.add(found.file)
                if mask & _CLOSE_NOWRITE:
                    self.read.add(found.file)
                if mask & _EXEC:
                    self.started.add(os.path.basename(path))
                if path not in self.seen:
                    self.seen[path] = found
                    self._keep(path, fd, found)
            finally:
                os.close(fd)

    def _keep(self, path: str, fd: int, state: FileState) -> None:
        if state.size > min(_TEXT, self._room) or path.startswith(self._ignored):
            return
        with contextlib.suppress(OSError):
            data = os.pread(fd, state.size + 1, 0)
            if len(data) == state.size and state_of(fd) == state:
                self.texts[path] = data
                self._room -= len(data)


def _mark_each(events: int, left: collections.deque[str], now: list[str], failed: list[OSError]) -> None:
    """Mark ``left``, each of which another thread may take, too, while this one waits for a server."""
    try:
        while left and not failed:
            now[0] = left.popleft()
            try:
                libc.fanotify_mark(events, _ADD_MOUNT, _MASK, now[0])
            except OSError as exc:
                if exc.errno in _REFUSED:
                    failed.append(exc)
    except IndexError:
        pass
    finally:
        os.close(events)


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
