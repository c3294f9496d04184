"""Folders of our own on a node that others use, too: they cannot enter new ones, nor change what is in old ones."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from bootseer.errors import ConfigError, from_os_error


def private_folder(path: Path, *, sub: str = "") -> Path:
    """The absolute folder ``path``, which only its owner can write to, or ``sub`` in it; what is missing is made with
    mode 0700.

    Raises `ConfigError` when ``path`` or ``sub`` is a link, is somebody else's, or can be written to by others, or when
    somebody else could put another folder in its place; and the error of the file system when it cannot be made.
    """
    path = path.absolute()
    try:
        _make(path)
        _check_parents(path)
        _check(path)
        for part in Path(sub).parts:
            path = path / part
            _make(path)
            _check(path)
    except OSError as exc:
        raise from_os_error(exc, f"use the folder {path}") from exc
    return path


def enterable(path: Path) -> bool:
    """Whether users other than root can reach ``path``, as far as the modes of the folders above it say."""
    found = [os.stat(parent) for parent in path.resolve().parents if parent.exists()]
    return not any(folder.st_uid == 0 and not folder.st_mode & 0o011 for folder in found)


def _make(path: Path) -> None:
    if not path.parent.exists():
        _make(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def _check(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is a link, not a folder", hint="name the folder itself in the settings")
    if not _trusted(found.st_uid):
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}", hint="remove it, or choose another folder in the settings"
        )
    if _others_write(found):
        raise ConfigError(f"others can write to {path}", hint=f"look at what is in it, then chmod go-w {path}")


def _check_parents(path: Path) -> None:
    for parent in Path(os.path.realpath(path)).parents:
        found = os.stat(parent)
        if not _trusted(found.st_uid) or (_others_write(found) and not found.st_mode & stat.S_ISVTX):
            raise ConfigError(
                f"others can replace {path}, because they can write to {parent}",
                hint="choose another folder in the settings",
            )


def _trusted(uid: int) -> bool:
    """Root, this user, or who became root by sudo to run this."""
    return uid in (0, os.geteuid()) or (os.geteuid() == 0 and str(uid) == os.environ.get("SUDO_UID"))


def _others_write(found: os.stat_result) -> bool:
    """Whether anybody but the owner can; the owner's own group, where nobody else is in it, counts as the owner."""
    if found.st_mode & 0o002:
        return True
    if not found.st_mode & 0o020:
        return False
    try:
        owner = pwd.getpwuid(found.st_uid)
        return owner.pw_gid != found.st_gid or bool(set(grp.getgrgid(found.st_gid).gr_mem) - {owner.pw_name})
    except KeyError:
        return True
