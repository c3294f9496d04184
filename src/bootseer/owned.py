"""Folders that belong to a running process, and those whose process was killed."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bootseer.kernel import flock
from bootseer.kernel import mount as mounts
from bootseer.kernel.removal import discard_tree

log = logging.getLogger(__name__)

_LOCK = "lock"


@contextlib.contextmanager
def owned_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """A new folder below ``parent``, ours for as long as this process lives and the context lasts. The caller empties
    it; it is removed when nothing but our lock is left in it. Raises `OSError`."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    folder = hidden.with_name(hidden.name[1:])
    with flock.locked(hidden / _LOCK, os.O_RDWR | os.O_CREAT):
        try:
            hidden.rename(folder)  # nobody sees it without a lock that is held
            yield folder
        finally:
            remove(folder)


@contextlib.contextmanager
def adopted(folder: Path) -> Iterator[bool]:
    """Whether ``folder`` is left of a process that ended; then it is ours in this context. False for one in use, or on
    its way out."""
    with contextlib.ExitStack() as stack:
        ours = False
        with contextlib.suppress(FileNotFoundError):
            ours = stack.enter_context(flock.locked(folder / _LOCK))
        yield ours and (folder / _LOCK).exists()


def is_owned(folder: Path) -> bool:
    """Whether ``folder`` belongs to a process, also one that was killed, that has not done with `release`."""
    return (folder / _LOCK).exists()


def release(folder: Path) -> None:
    """The owned ``folder`` is to outlive its process: it belongs to none any more."""
    (folder / _LOCK).unlink()


def clear(folder: Path) -> None:
    """Remove all but the lock, but nothing while something is mounted below ``folder``."""
    if mounts.below(folder):
        log.warning("%s is left: something is still mounted there", folder)
        return
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and not path.is_symlink():
            discard_tree(path)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove the folder if nothing but the lock is in it."""
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [_LOCK]:
            (folder / _LOCK).unlink()
            folder.rmdir()
