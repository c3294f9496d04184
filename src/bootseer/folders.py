"""Our own folders on a node that others use, too. Private folders: others can neither enter nor replace them. Owned
folders: they belong to a running process, and are known again when it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import itertools
import logging
import os
import pwd
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bootseer.closing import descriptor
from bootseer.errors import ConfigError, doing
from bootseer.kernel import flock
from bootseer.kernel import mount as mounts
from bootseer.kernel.links import believed, known
from bootseer.kernel.removal import discard_tree

log = logging.getLogger(__name__)

_LOCK = "lock"
_MOST_LINKS = 40
_FLAGS, _TOP = struct.Struct("=I4x"), 0x00020000
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
"""ioctl_iflags(2), and the flag of the top of a hierarchy."""


def private_folder(path: Path, *, sub: str = "") -> Path:
    """The folder ``path``, which only its owner can write to, or ``sub`` in it; what is missing is made with mode 0700.
    Use the path that is returned: it has no links in it, which somebody could let point elsewhere afterwards.

    Raises `ConfigError` when ``path`` or ``sub`` is a link, is somebody else's, or can be written to by others, or when
    somebody else could put another folder in its place; and the error of the file system when it cannot be made."""
    with doing(f"use the folder {path}"):
        make(path.absolute().parent)
        path = _real(path)
        path.mkdir(mode=0o700, exist_ok=True)
        _check(path)
        for part in Path(sub).parts:
            path = path / part
            path.mkdir(mode=0o700, exist_ok=True)
            _check_folder(path)
    return path


def make(path: Path) -> None:
    """Make the folder and those above it, where they are missing: no group can write to them, whatever the umask is."""
    above = itertools.takewhile(lambda one: not one.exists(), path.parents)
    for one in (*reversed([*above]), path):
        one.mkdir(mode=0o755, exist_ok=True)


def spread(folder: Path) -> None:
    """Have ext4 put what is in each folder of ``folder`` into another place of the disk: where many files were just
    deleted, it looks at each of these before it makes another."""
    with contextlib.suppress(OSError), descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        (flags,) = _FLAGS.unpack(fcntl.ioctl(fd, _GET_FLAGS, bytes(_FLAGS.size)))
        if not flags & _TOP:
            fcntl.ioctl(fd, _SET_FLAGS, _FLAGS.pack(flags | _TOP))


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


def trusted_file(path: Path) -> None:
    """Raises `ConfigError` when somebody else could change what is in the file, or put another one in its place, as
    far as owners and modes say, and the error of the file system when it cannot be found."""
    with doing(f"read {path}"):
        real = settled(path)
        found = real.stat()
    if stat.S_ISREG(found.st_mode) and (not known(found.st_uid) or _others_write(found)):
        raise ConfigError(f"others can write to {real}", hint=f"chown root {real}; chmod go-w {real}")


def settled(path: Path, *, follow: bool = True) -> Path:
    """``path`` without links, for root to use by name: nobody else can lead it elsewhere. What is missing of it stays
    as it is written, and so does a link at its end without ``follow``. Raises `ConfigError` when somebody else could
    put another file, folder or link in its place, or in that of a folder or a link on the way, as far as owners and
    modes of the folders say."""
    todo, real, links = list(reversed(path.absolute().parts[1:])), Path("/"), 0
    while todo:
        part, found = todo.pop(), os.stat(real)
        if part == "..":
            real = real.parent
            continue
        below = real / part
        try:
            entry = os.lstat(below)
        except (FileNotFoundError, NotADirectoryError):
            entry = None
        kept = found.st_mode & stat.S_ISVTX and (entry is None or known(entry.st_uid))
        if not believed(found.st_uid) or (_others_write(found) and not kept):
            raise ConfigError(
                f"others can replace {below}, because they can write to {real}", hint="choose another folder"
            )
        if entry is None:
            return below.joinpath(*reversed(todo))
        if not stat.S_ISLNK(entry.st_mode) or not (todo or follow):
            real = below
            continue
        links += 1
        if links > _MOST_LINKS:
            raise ConfigError(f"too many links in {path}")
        text = Path(os.readlink(below))
        if text.is_absolute():
            real = Path("/")
        todo += reversed(text.parts[1:] if text.is_absolute() else text.parts)
    return real


def foothold(path: Path) -> tuple[Path, Path]:
    """The nearest to ``path``, of itself and the folders above it, that is `settled`, and what is left below that: the
    way on may be led elsewhere by others, so that it is opened below a descriptor (`kernel.beneath`)."""
    path = path.absolute()
    for place in (path, *path.parents):
        try:
            return settled(place), path.relative_to(place)
        except ConfigError:
            continue
    return Path("/"), path.relative_to("/")


def _real(path: Path) -> Path:
    path = path.absolute()
    return Path(os.path.realpath(path.parent), path.name)


def _check(path: Path) -> None:
    _check_folder(path)
    below = os.stat(path)
    for parent in path.parents:
        found = os.stat(parent)
        kept = found.st_mode & stat.S_ISVTX and known(below.st_uid)
        if not believed(found.st_uid) or (_others_write(found) and not kept):
            raise ConfigError(
                f"others can replace {path}, because they can write to {parent}",
                hint="choose another folder in the settings",
            )
        below = found


def _check_folder(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        kind = "link" if stat.S_ISLNK(found.st_mode) else "file"
        raise ConfigError(f"{path} is a {kind}, not a folder", hint="name the folder itself in the settings")
    if not known(found.st_uid):
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}", hint="remove it, or choose another folder in the settings"
        )
    if _others_write(found):
        raise ConfigError(f"others can write to {path}", hint=f"look at what is in it, then chmod go-w {path}")


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
