"""Opening a path as a process confined to a root would see it: ``openat2(2)`` with ``RESOLVE_IN_ROOT``."""

from __future__ import annotations

import ctypes
import errno
import os

from bootseer.errors import UnsupportedError

_RESOLVE_IN_ROOT = 0x10
_OPENAT2 = 437  # the same on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in_root(root: int, path: bytes, flags: int) -> int:
    """Open ``path`` below the folder descriptor ``root``: absolute paths, links and ``..`` stay inside it.

    Returns a descriptor the caller closes. Raises `OSError`, or `UnsupportedError` before Linux 5.6.
    """
    how = _OpenHow(flags, 0, _RESOLVE_IN_ROOT)
    fd = _libc.syscall(_OPENAT2, root, path, ctypes.byref(how), ctypes.sizeof(how))
    if fd >= 0:
        return int(fd)
    code = ctypes.get_errno()
    if code == errno.ENOSYS:
        raise UnsupportedError("this kernel has no openat2", hint="Linux 5.6 or newer is needed")
    raise OSError(code, os.strerror(code), os.fsdecode(path))
