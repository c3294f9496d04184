"""Remembered facts: what was found out once about a file, for as long as it is that very file.

Device, inode, size and the times of the last write and the last change name a file's content where the kernel keeps
these times itself; elsewhere (in images, in FUSE mounts, in overlays) somebody else chooses them, and nothing is
remembered. Of the facts each has a slot in a private folder of the node cache, and there are 4,096 slots.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.config import Config
from bootseer.errors import BootseerError
from bootseer.folders import private_folder
from bootseer.kernel import libc

_FOLDER = "env-facts"
_DIGITS = 3
"""Hex digits that name a slot."""
_SETTLED = 600.0
"""Seconds after its last change from which on the state of a file tells its content: times are kept in ticks, and by
the clock of the file's server, from which this node's may be off by minutes."""
_OWN_TIMES = {0xEF53, 0x58465342, 0x9123683E, 0x6969}  # ext, xfs, btrfs, NFS; a mapping in tmpfs changes none


def has_times(fd: int) -> bool:
    """Whether the kernel keeps the times of the file that ``fd`` has open. Raises `OSError`."""
    return libc.file_system(fd)[0] in _OWN_TIMES


def fact(config: Config | None, fd: int, kind: str, find: Callable[[], str]) -> str:
    """The fact ``kind`` of the regular file that ``fd`` has open: what ``find`` says, or said of it before. It has one
    line. Without ``config`` nothing is remembered. Raises what ``find`` raises."""
    found = os.fstat(fd)
    now = time.time()
    if config is None or now - max(found.st_mtime, found.st_ctime) <= _SETTLED:
        return find()
    try:
        if not has_times(fd):
            return find()
        number = libc.file_system(fd)[1]
        folder = private_folder(Path(config.cache_dir), sub=_FOLDER)
    except (BootseerError, OSError):
        return find()
    state = (kind, number, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    name = hashlib.sha256(repr(state).encode()).hexdigest()
    slot = folder / name[:_DIGITS]
    with contextlib.suppress(OSError, ValueError):
        kept, text, end = slot.read_text().split("\n")
        if kept == name and not end:
            return text
    text = find()
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        try:
            file.write(f"{name}\n{text}\n")
            file.flush()
            os.replace(file.name, slot)
        except BaseException:
            os.unlink(file.name)
            raise
    return text


def digest(config: Config | None, fd: int) -> str:
    """SHA-256 (hex) of the file that ``fd`` has open, from its beginning."""

    def find() -> str:
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    return fact(config, fd, "sha256", find)
