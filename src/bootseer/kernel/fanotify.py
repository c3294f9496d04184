"""fanotify pre-content events (Linux 6.14): a read of a marked file waits until the group's reader allows or denies it.

The kernel *fails open*: when the last descriptor of a group is closed, every waiting reader goes on and gets what the
file holds, zeros where it has a hole. So whoever may die must not be the only holder of the group's descriptor, and
events that a dead reader took but did not answer stay unanswered until somebody answers them by their number
(docs/internals/fanotify.md).
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from bootseer.errors import BootseerError, DataError, PrivilegeError, UnsupportedError, from_os_error
from bootseer.kernel import _libc

FAN_CLOEXEC, FAN_NONBLOCK, FAN_CLASS_PRE_CONTENT, FAN_UNLIMITED_QUEUE = 0x1, 0x2, 0x8, 0x10
FAN_MARK_ADD, FAN_MARK_REMOVE = 0x1, 0x2
FAN_PRE_ACCESS, FAN_Q_OVERFLOW = 0x100000, 0x4000
_ALLOW, _DENY, _VERSION, _RANGE = 1, 2, 3, 6

_FLAGS = FAN_CLOEXEC | FAN_NONBLOCK | FAN_CLASS_PRE_CONTENT | FAN_UNLIMITED_QUEUE

_HEAD = struct.Struct("=IBBHQii")  # event_len vers reserved metadata_len mask fd pid
_WHOLE = struct.Struct("=IBBHQiiBBHIQQ")  # and its range record: info_type pad len pad offset count
_RESPONSE = struct.Struct("=iI")  # fd, response with the errno of a denial in its top byte

Buffer = bytearray | mmap.mmap

EVENT_SIZE = _WHOLE.size
"""Bytes of one event; the buffer of `Group.events` should hold many."""

ERRNOS = frozenset({errno.EPERM, errno.EIO, errno.EBUSY, errno.ETXTBSY, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT})
"""What a denial may say to the reader; the kernel refuses others."""


class Event(NamedTuple):
    """One reader that waits."""

    fd: int
    """Open on the file for whoever read the event, and the number to answer to; close it after the answer. -1: the
    queue overflowed and readers went on without being asked. Never with an unlimited queue, unless the kernel ran out
    of memory."""
    pid: int
    """The reading process, 0 when it is not visible from here."""
    offset: int
    """First byte wanted; -1 when the event names no range or is not understood: deny it."""
    length: int
    """Bytes wanted; may reach past the end of the file. -1 like ``offset``."""


class Group:
    """A group of marks and the queue of their events.

    No locking: one thread reads events. Answers are single writes and may come from any thread or process that holds
    the descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls) -> Group:
        """A new group, its queue unlimited and its descriptor non-blocking. Raises `PrivilegeError` (it needs
        CAP_SYS_ADMIN) or `UnsupportedError`."""
        try:
            return cls(_libc.fanotify_init(_FLAGS, os.O_RDONLY | os.O_LARGEFILE | os.O_CLOEXEC))
        except OSError as exc:
            if exc.errno == errno.EPERM:
                raise PrivilegeError(
                    "cannot open a fanotify group", hint="run as root, or with CAP_SYS_ADMIN"
                ) from None
            if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise from_os_error(exc, "open a fanotify group") from None
            raise UnsupportedError(f"the kernel has no fanotify permission events ({exc.strerror})") from None

    def fileno(self) -> int:
        """The group's descriptor, readable when events wait."""
        return self._fd

    def close(self) -> None:
        """Close this process's descriptor. Closing the last one lets every waiting reader go on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def mark(self, file: Path | int) -> None:
        """Have reads of ``file`` (a path, or a descriptor open on it) wait for an answer from now on.

        Reads through descriptors opened *before* the mark are not asked about, nor are those through an event's
        descriptor. Raises `UnsupportedError`, which says whether the kernel or the file system lacks it.
        """
        self._mark(FAN_MARK_ADD, file)

    def unmark(self, file: Path | int) -> None:
        """Take the mark from ``file``: readers go on unasked, and those that wait are still to be answered. No error
        where there is no mark."""
        try:
            self._mark(FAN_MARK_REMOVE, file)
        except BootseerError as exc:
            if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno != errno.ENOENT:
                raise

    def _mark(self, action: int, file: Path | int) -> None:
        name = f"descriptor {file}" if isinstance(file, int) else str(file)
        try:
            target = file if isinstance(file, int) else str(file.absolute())
            _libc.fanotify_mark(self._fd, action, FAN_PRE_ACCESS, target)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                raise UnsupportedError("the kernel has no pre-content events", hint="Linux 6.14 has them") from exc
            if exc.errno == errno.EOPNOTSUPP:
                hint = "ext4, xfs and btrfs have them"
                raise UnsupportedError(f"the file system of {name} has no pre-content events", hint=hint) from exc
            raise from_os_error(exc, f"mark {name} for fanotify") from exc

    def events(self, buffer: Buffer) -> list[Event]:
        """The events that wait, as many as ``buffer`` holds (`EVENT_SIZE` bytes each); empty when none do.

        Reading an event opens the file: its descriptor is the caller's from here. Raises `OSError` as read(2) does
        (EMFILE: this process has too many descriptors open, and the kernel has denied that event), `DataError` when
        the kernel's answer cannot be parsed at all.
        """
        try:
            got = os.readv(self._fd, [buffer])
        except BlockingIOError:
            return []
        if got == EVENT_SIZE:  # the usual case, without the loop: every reader waits for it
            size, version, _, _, _, fd, pid, kind, _, _, _, offset, length = _WHOLE.unpack_from(buffer)
            if size == EVENT_SIZE and version == _VERSION and kind == _RANGE and fd >= 0:
                return [Event(fd, pid, offset, length)]
        return parse(buffer, got)

    def allow(self, fd: int) -> bool:
        """Let the reader of event ``fd`` go on; False when nobody waits for that answer any more (the reader was
        killed, or it was answered). Raises `OSError` otherwise. Does not close ``fd``."""
        return self._answer(fd, _ALLOW)

    def deny(self, fd: int, number: int = errno.EIO) -> bool:
        """Give the reader of event ``fd`` the error ``number``, one of `ERRNOS`; else as `allow`.

        ``fd`` is only a number here: events taken by a process that died since are answered by the number they had
        there.
        """
        if number not in ERRNOS:
            number = errno.EIO
        return self._answer(fd, _DENY | number << 24)

    def _answer(self, fd: int, response: int) -> bool:
        try:
            os.write(self._fd, _RESPONSE.pack(fd, response))
        except FileNotFoundError:
            return False
        return True


def parse(buffer: Buffer, got: int) -> list[Event]:
    """The events in the first ``got`` bytes of ``buffer``, as a read left them there."""
    found, at = [], 0
    while at < got:
        if got - at < _HEAD.size:
            raise DataError(f"fanotify gave {got - at} bytes that are no event")
        size, version, _, head, mask, fd, pid = _HEAD.unpack_from(buffer, at)
        if size < _HEAD.size or size > got - at:
            raise DataError(f"fanotify gave an event of {size} bytes where {got - at} were read")
        offset = length = -1
        if version == _VERSION and mask & FAN_PRE_ACCESS and fd >= 0:
            offset, length = _range(buffer, at + head, at + size)
        elif mask & FAN_Q_OVERFLOW:
            fd = -1
        found.append(Event(fd, pid, offset, length))
        at += size
    return found


def _range(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    """The range record among an event's information records, (-1, -1) without one."""
    while end - at >= 4:
        kind, _, size = struct.unpack_from("=BBH", buffer, at)
        if kind == _RANGE and 24 <= size <= end - at:
            offset, length = struct.unpack_from("=QQ", buffer, at + 8)
            return offset, length
        if size < 4:
            break
        at += size
    return -1, -1


def try_pre_content(file: Path) -> None:
    """Open a pre-content group and mark ``file`` with ``FAN_PRE_ACCESS``, then drop both.

    Returns where that works. Raises `PrivilegeError` (needs CAP_SYS_ADMIN) or `UnsupportedError`, which says whether
    the kernel or the file system of ``file`` lacks it.
    """
    group = Group.open()
    try:
        group.mark(file)
    finally:
        group.close()
