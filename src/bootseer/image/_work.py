"""The private folder of one conversion, and the removal of what killed conversions left."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import from_os_error
from bootseer.kernel.removal import discard_tree

log = logging.getLogger(__name__)

_PREFIX = "bootseer-convert-"
_DEAD = "bootseer-dead-"
"""A folder that nobody uses any more: whoever sees it may remove it."""


@contextlib.contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A folder of our own below ``parent``, removed at the end; folders of conversions that died are removed first.

    A folder is in use while its file ``lock`` is locked. Who finds it free renames the folder while holding the lock
    and removes it later, as removing gigabytes takes seconds. A new folder whose lock another conversion was quicker to
    take is lost to it, and the next one is tried.
    """
    with contextlib.ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for old in parent.glob(f"{_PREFIX}*"):
                with contextlib.suppress(OSError):  # not ours
                    _set_aside(old)
            for old in parent.glob(f"{_DEAD}*"):
                with contextlib.suppress(FileNotFoundError):  # another conversion was quicker
                    if old.lstat().st_uid == os.geteuid():
                        discard_tree(old)
            while True:
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                if (lock := _locked(folder, os.O_CREAT)) is not None:
                    break
            stack.callback(os.close, lock)
            stack.callback(discard_tree, folder)
        except OSError as exc:
            raise from_os_error(exc, f"work in {parent}") from exc
        yield folder


def _locked(folder: Path, make: int = 0) -> int | None:
    """A descriptor of the lock file of ``folder``, locked while it is open; None when another conversion was first, or
    there is no such file and ``make`` is not `os.O_CREAT`: the folder is none of a conversion's."""
    # Others may write to the folder above, and put links there.
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError, FileNotFoundError):
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | safe)
        stack.callback(os.close, inside)
        lock = os.open("lock", os.O_WRONLY | make | safe, 0o600, dir_fd=inside)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.lstat(folder / "lock")):
            return os.dup(lock)  # which has the same lock
    return None


def _set_aside(folder: Path) -> None:
    """Rename ``folder``, of a conversion, if that has died; remove it if that died before it had a lock in it."""
    with contextlib.suppress(OSError):  # a folder in which anything is stays
        folder.rmdir()
        return
    if folder.lstat().st_uid == os.geteuid() and (lock := _locked(folder)) is not None:
        try:
            folder.rename(folder.with_name(_DEAD + folder.name))
        finally:
            os.close(lock)
        log.warning("removing %s, left by an interrupted conversion", folder)
