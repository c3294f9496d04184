"""The few libc calls Python lacks, through ctypes; each releases the GIL and raises `OSError` with the call's errno."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


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


def punch_hole(fd: int, offset: int, length: int) -> None:
    """fallocate(2): the range becomes a hole that reads as zeros; the file keeps its size."""
    _check(_libc.fallocate64(fd, 3, offset, length), "fallocate")  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
