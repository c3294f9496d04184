"""Loop devices: a regular file as a read-only block device, freed by the kernel when its last user is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bootseer.closing import descriptor
from bootseer.errors import BootseerError, PrivilegeError, UnsupportedError, doing

_CONTROL = "/dev/loop-control"
_CTL_GET_FREE = 0x4C82
_CONFIGURE = 0x4C0A  # Linux 5.8
_READ_ONLY, _AUTOCLEAR = 1, 4
_INFO64 = struct.Struct("=QQQQQIIII64s64s32s2Q")
_CONFIG = struct.Struct(f"=II{_INFO64.size}s8Q")


@contextmanager
def attached(path: Path) -> Iterator[str]:
    """A read-only loop device over ``path``: yields ``/dev/loopN``, which frees itself (autoclear) when this block has
    ended and nothing mounted uses it. Raises `UnsupportedError` where the kernel has no loop driver, `PrivilegeError`
    without the right to configure one, `BootseerError` when others take each free device first (10 times)."""
    with doing(f"open {path}"):
        backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with descriptor(backing):
        device, name = _configure(backing, path)
    with descriptor(device):
        yield name


def _configure(backing: int, path: Path) -> tuple[int, str]:
    hint = "load the loop driver (modprobe loop)"
    try:
        control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM):
            raise PrivilegeError(f"cannot make a loop device for {path}", hint="run as root") from None
        raise UnsupportedError(f"cannot make a loop device for {path}: no {_CONTROL}", hint=hint) from None
    info = _INFO64.pack(0, 0, 0, 0, 0, 0, 0, 0, _READ_ONLY | _AUTOCLEAR, os.fsencode(path)[:63], b"", b"", 0, 0)
    config = _CONFIG.pack(backing, 0, info, *[0] * 8)
    with descriptor(control), doing(f"make a loop device for {path}"):
        for _ in range(10):
            name = f"/dev/loop{fcntl.ioctl(control, _CTL_GET_FREE)}"
            device = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _CONFIGURE, config)
                return device, name
            except OSError as exc:
                os.close(device)
                if exc.errno != errno.EBUSY:  # EBUSY: somebody else took it between the two calls
                    raise
    raise BootseerError(f"cannot make a loop device for {path}: all are taken by others as soon as they are free")
