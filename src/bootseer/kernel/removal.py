"""Removal of folder trees that others may have filled: however deep they are, whatever is linked or mounted in them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from bootseer.kernel import mount

log = logging.getLogger(__name__)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def refuse_mounted(folder: Path) -> None:
    """Raise `OSError` (EBUSY) where something is mounted on or below ``folder``."""
    real = os.path.join(os.path.realpath(folder.parent), folder.name)
    for entry in mount.entries():
        if f"{entry.target}/".startswith(f"{real}/"):
            raise OSError(errno.EBUSY, f"{entry.target} is mounted there", str(folder))


def remove_tree(folder: Path) -> None:
    """Remove ``folder`` and all below it; nothing happens when it is missing.

    The way down is by descriptors, so neither depth nor links put there meanwhile matter; another file system is not
    entered; folders that are closed to this user, their owner, are opened. Raises `OSError`: before anything is removed
    when ``folder`` is none, or something is mounted on or below it; else for the first thing that could not be, after
    the rest."""
    refuse_mounted(folder)
    try:
        fd = _open(folder)
    except FileNotFoundError:
        return
    errors: list[OSError] = []
    try:
        here = os.fstat(fd)
        levels = [("", here, _clear(fd, errors))]
        while True:
            name, here, folders = levels[-1]
            if folders:
                below = folders.pop()
                try:
                    fd = _moved(fd, below)
                except OSError as exc:
                    errors.append(exc)
                    continue
                inside = os.fstat(fd)
                foreign = inside.st_dev != here.st_dev
                if foreign:
                    errors.append(OSError(errno.EXDEV, "another file system is there", below))
                levels.append((below, inside, [] if foreign else _clear(fd, errors)))
                continue
            levels.pop()
            if not levels:
                break
            fd = _moved(fd, "..")
            if not os.path.samestat(os.fstat(fd), levels[-1][1]):
                raise OSError(errno.EBUSY, "it was moved while it was removed", name)
            try:
                os.rmdir(name, dir_fd=fd)
            except OSError as exc:
                errors.append(exc)
    finally:
        os.close(fd)
    left = [error for error in errors if not isinstance(error, FileNotFoundError)]  # another removal was quicker
    if left:
        raise left[0]
    os.rmdir(folder)


def discard_tree(folder: Path) -> None:
    """As `remove_tree`, but what stays is only logged."""
    try:
        remove_tree(folder)
    except FileNotFoundError:
        log.info("%s is being removed by another process", folder)
    except OSError as exc:
        log.warning("%s is left: %s: %s", folder, exc.filename, exc.strerror)


def _moved(fd: int, name: str) -> int:
    """A descriptor of the folder ``name`` in that of ``fd``, which is closed then."""
    new = _open(name, fd)
    os.close(fd)
    return new


def _open(name: str | Path, fd: int | None = None) -> int:
    if os.geteuid() != 0 and name != "..":
        found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        with contextlib.suppress(PermissionError):  # another's
            os.chmod(f"/proc/self/fd/{found}", 0o700)
        os.close(found)
    return os.open(name, _FOLDER, dir_fd=fd)


def _clear(fd: int, errors: list[OSError]) -> list[str]:
    """Unlink all that is no folder; the names of the folders."""
    folders = []
    try:
        with os.scandir(fd) as found:
            entries = list(found)
    except OSError as exc:
        errors.append(exc)
        return []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
        else:
            try:
                os.unlink(entry.name, dir_fd=fd)
            except OSError as exc:
                errors.append(exc)
    return folders
