"""fanotify pre-content events (Linux 6.14): whether this kernel, this file system and these privileges allow them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bootseer.errors import PrivilegeError, UnsupportedError, from_os_error
from bootseer.kernel import _libc

FAN_CLOEXEC, FAN_NONBLOCK, FAN_CLASS_PRE_CONTENT, FAN_UNLIMITED_QUEUE = 0x1, 0x2, 0x8, 0x10
FAN_MARK_ADD = 0x1
FAN_PRE_ACCESS = 0x100000


def try_pre_content(file: Path) -> None:
    """Open a pre-content group and mark ``file`` with ``FAN_PRE_ACCESS``, then drop both.

    Returns where that works. Raises `PrivilegeError` (needs CAP_SYS_ADMIN) or `UnsupportedError`, which says whether
    the kernel or the file system of ``file`` lacks it.
    """
    flags = FAN_CLOEXEC | FAN_NONBLOCK | FAN_CLASS_PRE_CONTENT | FAN_UNLIMITED_QUEUE
    try:
        group = _libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno == errno.EPERM:
            raise PrivilegeError("cannot open a fanotify group", hint="run as root, or with CAP_SYS_ADMIN") from None
        raise UnsupportedError(f"the kernel has no fanotify permission events ({exc.strerror})") from None
    try:
        _libc.fanotify_mark(group, FAN_MARK_ADD, FAN_PRE_ACCESS, str(file.absolute()))
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise UnsupportedError("the kernel has no pre-content events", hint="Linux 6.14 has them") from None
        if exc.errno == errno.EOPNOTSUPP:
            hint = "ext4, xfs and btrfs have them"
            raise UnsupportedError(f"the file system of {file} has no pre-content events", hint=hint) from None
        raise from_os_error(exc, f"mark {file} for fanotify") from None
    finally:
        os.close(group)
