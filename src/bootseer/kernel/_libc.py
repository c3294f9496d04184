"""The few libc calls Python lacks, through ctypes; each releases the GIL and raises `OSError` with the call's errno."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)

_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
_libc.fanotify_init.argtypes = [ctypes.c_uint, ctypes.c_uint]
_libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

CLONE_NEWNS, CLONE_FS = 0x20000, 0x200
_PR_SET_PDEATHSIG = 1
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _STATX_BTIME = -100, 0x100, 0x1000, 0x800
_STATX = struct.Struct("=I24xH2xQQ32xqI4xqI4xqI4x8xII")


class Statx(NamedTuple):
    """Times in nanoseconds since the epoch; ``born`` 0 where the file system does not keep it."""

    device: int
    inode: int
    mode: int
    size: int
    mtime: int
    ctime: int
    born: int


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def mount(source: str, target: str, fstype: str, flags: int, data: str) -> None:
    """mount(2). ``data`` longer than a page is cut short by the kernel without an error: check it before."""
    args = [os.fsencode(text) for text in (source, target, fstype)]
    _check(_libc.mount(args[0], args[1], args[2], flags, os.fsencode(data)), target)


def umount2(target: str, flags: int) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), target)


def unshare(flags: int) -> None:
    """unshare(2) of the calling thread."""
    _check(_libc.unshare(flags), "unshare")


def die_with_parent() -> None:
    """prctl(2): the kernel kills this process when the thread that forked it has ended."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")


def setns(fd: int) -> None:
    """setns(2) of the calling thread, into a mount namespace."""
    _check(_libc.setns(fd, CLONE_NEWNS), "setns")


def fanotify_init(flags: int, event_flags: int) -> int:
    """fanotify_init(2)."""
    return _check(_libc.fanotify_init(flags, event_flags), "fanotify")


def fanotify_mark(fd: int, flags: int, mask: int, path: str) -> None:
    """fanotify_mark(2)."""
    _check(_libc.fanotify_mark(fd, flags, mask, _AT_FDCWD, os.fsencode(path)), path)


def statx(file: int | str) -> Statx:
    """statx(2) of a descriptor or a path, links not followed."""
    data = ctypes.create_string_buffer(256)
    at, path = (file, b"") if isinstance(file, int) else (_AT_FDCWD, os.fsencode(file))
    _check(_libc.statx(at, path, _AT_SYMLINK_NOFOLLOW | _AT_EMPTY_PATH, 0xFFF, data), str(file))
    mask, mode, inode, size, bs, bn, cs, cn, ms, mn, major, minor = _STATX.unpack_from(data)
    born = bs * 10**9 + bn if mask & _STATX_BTIME else 0
    return Statx(os.makedev(major, minor), inode, mode, size, ms * 10**9 + mn, cs * 10**9 + cn, born)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """fallocate(2): the range becomes a hole that reads as zeros; the file keeps its size."""
    _check(_libc.fallocate64(fd, 3, offset, length), "fallocate")  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def syncfs(folder: str) -> None:
    """syncfs(2): all that was written to the file system of ``folder`` is on its disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(_libc.syncfs(fd), folder)
    finally:
        os.close(fd)
