"""An ordinary user's way into a tree that somebody mounted: a user namespace with mounts of its own, no helper process.
The new root is an overlay over the tree, whose upper part is in memory: there lie the folders that others are bound on,
and what the command writes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bootseer.errors import ConfigError, NotFoundError, PrivilegeError, UnsupportedError, from_os_error
from bootseer.kernel import libc
from bootseer.kernel.mount import MS_NODEV, MS_NOSUID, MS_REC, MS_SLAVE

_MNT_DETACH = 2
_HINT = "user namespaces must be allowed (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"


class Shown(NamedTuple):
    """A file or folder of this host that the command sees at ``target``, an absolute path."""

    source: str
    target: str
    read_only: bool = False


def enter(root: Path, shown: Sequence[Shown], files: Mapping[str, bytes], made: Sequence[str] = ()) -> None:
    """Make the tree at ``root`` the root folder of this process, which must have one thread, with ``shown`` in it,
    ``files`` (path -> content) in place of the tree's own, and the folders ``made``. Set-uid programs have no effect
    from then on.

    Raises `PrivilegeError` when this user may not enter ``root``, `NotFoundError` when it or a source is missing,
    `ConfigError` for a target that cannot be, `UnsupportedError` where the kernel does not let users do that. After an
    error this process must end: it may be half inside."""
    for one in shown:
        if (
            not os.path.isabs(one.target)
            or os.path.normpath(one.target) in ("/", "//")
            or ".." in one.target.split("/")
        ):
            raise ConfigError(f"nothing can be shown at {one.target}", hint="name an absolute path below /")
    _check(root)
    user, group = os.geteuid(), os.getegid()
    try:
        libc.unshare(libc.CLONE_NEWUSER | libc.CLONE_NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
        libc.mount("none", "/", "", MS_REC | MS_SLAVE, "")
        _build(root, sorted(shown, key=lambda one: one.target), files, made)
        libc.pivot_root()
        libc.umount2(".", _MNT_DETACH)
        os.chdir("/")
        libc.no_new_privileges()
    except OSError as exc:
        if exc.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL, errno.ENODEV, errno.ENOSYS):
            where = f" ({exc.filename})" if exc.filename else ""
            raise UnsupportedError(f"cannot enter {root}: {exc.strerror}{where}", hint=_HINT) from exc
        raise from_os_error(exc, f"enter {root}") from exc


def _check(root: Path) -> None:
    if os.path.realpath(root) == "/":
        raise ConfigError("/ is the root already", hint="name the folder of an image")
    try:
        with os.scandir(root) as found:
            next(found, None)
    except PermissionError:
        raise PrivilegeError(f"cannot enter {root}: it is another user's", hint="name an image of your own") from None
    except OSError as exc:
        raise from_os_error(exc, f"enter {root}") from None


def _build(root: Path, shown: Sequence[Shown], files: Mapping[str, bytes], made: Sequence[str]) -> None:
    """Mount the new root, and make it the working folder. What is shown is copied before the memory file system hides
    ``root``: a source may contain it."""
    with contextlib.ExitStack() as stack:
        sources = []
        for one in shown:
            try:
                fd = libc.open_tree(one.source, read_only=one.read_only)
            except FileNotFoundError:
                raise NotFoundError(f"no file or folder {one.source} to show in the image") from None
            except OSError as exc:
                if exc.errno != errno.EACCES:
                    raise
                raise PrivilegeError(f"{one.source} is another user's", hint="show what you may read") from None
            stack.callback(os.close, fd)
            sources.append(fd)
        tree = os.open(root, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, tree)
        libc.mount("bootseer", f"/proc/self/fd/{tree}", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        os.chdir(root)  # by its name: what is on top
        for folder in ("upper", "work", "root"):
            os.mkdir(folder)
        os.chmod("upper", 0o755)
        for one, source in zip(shown, sources, strict=True):
            _make(f"upper/{one.target}", folder=stat.S_ISDIR(os.fstat(source).st_mode))
        for path in made:
            _make(f"upper/{path}", folder=True)
        for path, content in files.items():
            _make(f"upper/{path}", folder=False)
            Path(f"upper/{path}").write_bytes(content)
        options = f"lowerdir=/proc/self/fd/{tree},upperdir=upper,workdir=work,userxattr"
        libc.mount("bootseer", "root", "overlay", MS_NOSUID | MS_NODEV, options)
        for one, source in zip(shown, sources, strict=True):
            try:
                libc.move_mount(source, f"root/{one.target}")
            except (FileNotFoundError, NotADirectoryError):  # in a folder that is shown itself, so that we made nothing
                kind = "folder" if stat.S_ISDIR(os.fstat(source).st_mode) else "file"
                hint = "make it in the folder of this host that is seen there, or choose another place"
                raise ConfigError(f"the {kind} {one.target} is not there to show {one.source}", hint=hint) from None
    os.chdir("root")


def _make(path: str, *, folder: bool) -> None:
    """A folder, or an empty file, to mount on, with all folders above it."""
    os.makedirs(path if folder else os.path.dirname(path), 0o755, exist_ok=True)
    if not folder and not os.path.lexists(path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
