"""Paths that others can change: opened below a descriptor, so that no name leads elsewhere between a look and its use.

Who runs with more rights than those who can write to a folder (root in a tenant's folder, a user in a shared one) uses
names in it through this module alone. A link is never followed: one on the way to a name is ELOOP, or ENOTDIR in
place of the last folder; a name that leads out is EXDEV. Opening never waits, as it would for a pipe or a device that
somebody put there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from bootseer.closing import descriptor
from bootseer.kernel import libc

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HELD = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def open_at(root: int, path: str, flags: int, mode: int = 0o666) -> int:
    """A descriptor of ``path`` below the folder descriptor ``root``, opened with ``flags``; the caller closes it.
    Raises `OSError`.

    ``path`` is relative, ``""`` is the folder itself; ``..``, links and what `procfs` links to are refused by
    openat2(2), before Linux 5.6 and where a seccomp filter has no such call by opening one part after the other."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | (0 if flags & os.O_PATH else os.O_NONBLOCK | os.O_NOCTTY)
    if path.startswith("/") or ".." in path.split("/"):
        raise OSError(errno.EXDEV, "the name leads out of its folder", path)
    try:
        return libc.open_beneath(root, os.fsencode(path or "."), flags, mode)
    except OSError as exc:
        if exc.errno not in (errno.ENOSYS, errno.EPERM):  # seccomp filters of older Docker answer EPERM
            raise
    return _walk(root, path, flags, mode)


def _walk(root: int, path: str, flags: int, mode: int) -> int:
    """As openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS does it, part by part."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    with contextlib.ExitStack() as stack:
        here = root
        for part in parts[:-1]:
            try:
                here = os.open(part, _HELD | os.O_NOFOLLOW, dir_fd=here)
            except NotADirectoryError:
                if stat.S_ISLNK(os.stat(part, dir_fd=here, follow_symlinks=False).st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
                raise
            stack.callback(os.close, here)
        return os.open(parts[-1] if parts else ".", flags, mode, dir_fd=here)


def open_regular(path: str | os.PathLike[str], *, root: int | None = None) -> int:
    """A descriptor, for reading, of a regular file; the caller closes it. With ``root``, ``path`` lies below that
    folder descriptor, as `open_at` has it; without, only its last part may be no link. Raises `OSError`: ELOOP for a
    link, EINVAL for a folder, a pipe, a socket or a device."""
    name = os.fspath(path)
    if root is None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(name, flags)
    else:
        fd = open_at(root, name, os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", name)
    return fd


def read_regular(path: str | os.PathLike[str], most: int, *, root: int | None = None) -> bytes:
    """The bytes of a file that `open_regular` opens. Raises `OSError`, EFBIG for one with more than ``most`` bytes,
    of which none is read when its size says so, whatever it occupies on the disk."""
    return _read(open_regular(path, root=root), most, os.fspath(path))


def read_inside(root: str | os.PathLike[str], path: str, most: int) -> bytes:
    """The bytes of a regular file as a program sees it whose root folder is ``root``: whatever links say, it lies
    inside. Raises `OSError` as `read_regular` does, ENOSYS before Linux 5.6 and EPERM where a seccomp filter refuses
    openat2(2): there is no other way to do it."""
    with folder(root) as top:
        fd = libc.open_in_root(top, os.fsencode(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return _read(fd, most, path)


def _read(fd: int, most: int, name: str) -> bytes:
    data = b""
    with descriptor(fd):
        if os.fstat(fd).st_size <= most:
            while more := os.read(fd, most + 1 - len(data)):  # it may grow while it is read, and /proc says 0
                data += more
            if len(data) <= most:
                return data
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", name)


@contextlib.contextmanager
def folder(path: str | os.PathLike[str], *, root: int | None = None) -> Iterator[int]:
    """A descriptor of a folder. Without ``root`` links on the way to it are followed: it is one that we trust."""
    with descriptor(os.open(path, _FOLDER) if root is None else open_at(root, os.fspath(path), _FOLDER)) as fd:
        yield fd


@contextlib.contextmanager
def parent(root: int, path: str, *, make: int | None = None) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder below ``root`` in which ``path`` lies, and its last part: for the calls that take
    both (``dir_fd``). ``make`` is the mode with which missing folders are made. Raises `OSError`."""
    above, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, "the name has no last part", path)
    with descriptor(make_folders(root, above, make) if make is not None else open_at(root, above, _FOLDER)) as fd:
        yield fd, name


def make_folders(root: int, path: str, mode: int = 0o777) -> int:
    """A descriptor of the folder ``path`` below ``root``, which is made with all above it where it is missing; the
    caller closes it. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        return open_at(root, path, _FOLDER)
    here = os.dup(root)
    try:
        for part in path.split("/"):
            if part in ("", "."):
                continue
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, mode, dir_fd=here)
            below = open_at(here, part, _FOLDER)
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    return here


def shown(fd: int) -> str:
    """A path that leads to what ``fd`` has open, whatever its name is by now: for mount(2), and for programs that take
    names. It is of this process (and, by ``/proc/PID``, of those that may look into it) and lasts as long as ``fd``."""
    return f"/proc/self/fd/{fd}"
