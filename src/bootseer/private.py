"""Folders of our own on a node that others use, too: they cannot enter new ones, nor change what is in old ones."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from bootseer.errors import ConfigError, doing, from_os_error


def private_folder(path: Path, *, sub: str = "") -> Path:
    """The folder ``path``, which only its owner can write to, or ``sub`` in it; what is missing is made with mode 0700.
    Use the path that is returned: it has no links in it, which somebody could let point elsewhere afterwards.

    Raises `ConfigError` when ``path`` or ``sub`` is a link, is somebody else's, or can be written to by others, or when
    somebody else could put another folder in its place; and the error of the file system when it cannot be made.
    """
    try:
        path.absolute().parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path = _real(path)
        path.mkdir(mode=0o700, exist_ok=True)
        _check(path)
        for part in Path(sub).parts:
            path = path / part
            path.mkdir(mode=0o700, exist_ok=True)
            _check_folder(path)
    except OSError as exc:
        raise from_os_error(exc, f"use the folder {path}") from exc
    return path


def enterable(path: Path) -> bool:
    """Whether users other than root can reach ``path``, as far as the modes of the folders above it say."""
    found = [os.stat(parent) for parent in path.resolve().parents if parent.exists()]
    return not any(folder.st_uid == 0 and not folder.st_mode & 0o011 for folder in found)


def trusted(path: Path) -> Path:
    """As `private_folder`, but a missing folder stays missing: before what is in it is believed."""
    path = _real(path)
    if os.path.lexists(path):
        with doing(f"use the folder {path}"):
            _check(path)
    return path


def _real(path: Path) -> Path:
    path = path.absolute()
    return Path(os.path.realpath(path.parent), path.name)


def _check(path: Path) -> None:
    _check_folder(path)
    for parent in path.parents:
        found = os.stat(parent)
        if not _believed(found.st_uid) or (_others_write(found) and not found.st_mode & stat.S_ISVTX):
            raise ConfigError(
                f"others can replace {path}, because they can write to {parent}",
                hint="choose another folder in the settings",
            )


def _check_folder(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is a link, not a folder", hint="name the folder itself in the settings")
    if not _believed(found.st_uid):
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}", hint="remove it, or choose another folder in the settings"
        )
    if _others_write(found):
        raise ConfigError(f"others can write to {path}", hint=f"look at what is in it, then chmod go-w {path}")


def _believed(uid: int) -> bool:
    """Root, this user, or who became root by sudo to run this."""
    return uid in (0, os.geteuid()) or (os.geteuid() == 0 and str(uid) == os.environ.get("SUDO_UID"))


def _others_write(found: os.stat_result) -> bool:
    """Whether anybody but the owner can. A group with the name of the owner, which nobody else is in, is the owner."""
    if found.st_mode & 0o002:
        return True
    if not found.st_mode & 0o020:
        return False
    try:
        owner, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid)
        return group.gr_name != owner or bool(set(group.gr_mem) - {owner})
    except KeyError:
        return True
