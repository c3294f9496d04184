"""Which driver a tree is served by: ``local``, ``fanotify`` or ``fuse``; and what speaks against the faster ones."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from bootseer.blocks.cache.blockfile import in_use
from bootseer.blocks.cache.locks import DATA
from bootseer.blocks.serving.takeover import raise_descriptor_limit
from bootseer.errors import BootseerError, FullError, UnavailableError, UnsupportedError
from bootseer.kernel import canary, fanotify

log = logging.getLogger(__name__)

DISK_SLACK = 64 << 20
"""Bytes that must stay free beside a whole data file for the fanotify driver, which cannot serve from memory."""


_DESCRIPTORS = 1024
"""A reader that waits takes one of the keeper's; with fewer than that readers soon get errors."""


class InUseError(UnavailableError):
    """Somebody has the data file open or mounted already."""


def choose(wish: str, cache: Path, data_fd: int, state_dir: Path, *, complete: bool, missing: int) -> str:
    """The driver for a data file in the folder ``cache`` (inside ``blocks`` of a cache folder) with ``missing`` bytes
    still to come.

    ``wish`` is `Config.driver`. ``auto`` ends in ``fuse`` with a log line that says why; ``fanotify`` that cannot be
    is `UnsupportedError` or `FullError`.
    """
    if complete:
        return "local"
    if wish == "fuse":
        return "fuse"
    trouble = _against_fanotify(cache, data_fd, state_dir, missing)
    if trouble is None:
        return "fanotify"
    if wish == "fanotify":
        raise trouble
    log.warning("serving through FUSE: %s", trouble)
    return "fuse"


def _against_fanotify(cache: Path, data_fd: int, state_dir: Path, missing: int) -> BootseerError | None:
    # Not in the tree's own folder: what a killed trial leaves there would keep it from being deleted.
    verdict = canary.fanotify_works(cache.parents[1], state_dir)
    if not verdict.works:
        return UnsupportedError(f"the fanotify driver does not work here: {verdict.reason}")
    if (most := raise_descriptor_limit()) < _DESCRIPTORS:
        return UnsupportedError(
            f"the fanotify driver needs {_DESCRIPTORS} descriptors, the limit is {most}", hint="raise ulimit -n"
        )
    disk = os.fstatvfs(data_fd)
    promised = promised_bytes(cache)
    free = disk.f_bavail * disk.f_frsize - promised
    if free < missing + DISK_SLACK:
        return FullError(
            f"the fanotify driver needs {missing + DISK_SLACK >> 20} MiB for {cache}, {max(0, free) >> 20} MiB are free"
            + (f" beside {promised >> 20} MiB that other trees in use may still take" if promised else ""),
            hint="free some space there",
        )
    return None


def promised_bytes(cache: Path) -> int:
    """What the trees in use beside that of the folder ``cache`` may still write, at most: nothing reserves it, so two
    that start at once would both count on it."""
    total = 0
    for folder in cache.parent.iterdir():
        with contextlib.suppress(OSError):
            if folder != cache and _is_owned(folder):
                data = os.stat(folder / DATA)
                total += max(0, data.st_size - data.st_blocks * 512)
    return total


def _is_owned(folder: Path) -> bool:
    fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def guard(data_fd: int, cache: Path) -> fanotify.Group:
    """A fanotify group with a mark on the data file, which nobody else may have open yet.

    A mark that comes after a mount is silent: the reads of files opened before it raise no events and give zeros.
    Raises `InUseError`, and what `fanotify.Group` raises.
    """
    if in_use(data_fd):
        raise InUseError(
            f"the data file of block cache {cache} is in use without a guard",
            hint="unmount what was mounted over it by a server that died",
        )
    group = fanotify.Group.open()
    try:
        group.mark(data_fd)
    except BaseException:
        group.close()
        raise
    return group
