"""Links on the way to a file that others can change: which of them are followed, and for whom.

`bootseer.kernel.beneath` follows none. Stores and checkpoints need more: people link ``last.ckpt`` to a file beside it,
and a folder to a larger disk. So a link is followed where who made it gains nothing by that. ``base`` is the folder
that a user named; paths lie below it, or on the way to it.

- Links of this process's user and of root (`believed`) are followed. By root, and by others to write below ``base``,
  only where nobody else can write to the folders above them: elsewhere others move these links about, and root in a
  container makes them.
- On the way to ``base`` users other than root follow what the kernel lets them (``fs.protected_symlinks``): no link of
  somebody else in a folder that all may write to.
- For reading, links below ``base`` that never leave it.
- Links that lead to what belongs to who made them; users other than root also follow them to what belongs to root. For
  writing, those on the way to ``base`` only.

Root of a user namespace has the rights of a user, and is one here. Root and neighbours have one number there: folders
on the way to ``base``, and what links lead to, count as root's, links and folders below ``base`` as a neighbour's.
What is opened is what was looked at: all of it is done by descriptors."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bootseer.closing import descriptor
from bootseer.kernel import beneath, libc

_HELD = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST = 40
"""Links on one way, as the kernel has it."""
_PARTS = 1000
"""Parts of one way, those of its links and ``..`` counted: the folders among them are held open together."""
_UNKNOWN = 65534
"""The number that everybody has who has none in this user namespace."""
_LEASE_SECONDS = 45.0
"""What the kernel gives who has a lease on a file, as a server that exports it, before others may open it."""


def open_followed(path: str, flags: int, *, base: str, writing: bool = False, shown: bool = False) -> int:
    """A descriptor of the absolute ``path``, opened with ``flags``; the caller closes it. Its last part may be a link,
    too: so ``flags`` are those for reading, or for the folder in which something is to be written (``writing``).

    ``shown``: what root reads is shown to others, perhaps to a container that can write there; then root's own links
    are followed on the way to ``base`` only. Raises `OSError`: EACCES for a link that is not followed, EINVAL for what
    is neither a regular file nor a folder, unless it is only held (``O_PATH``)."""
    flags |= os.O_CLOEXEC | (0 if flags & os.O_PATH else os.O_NONBLOCK | os.O_NOCTTY)
    try:
        fd, opened = libc.open_without_links(os.fsencode(path), flags), True
    except BlockingIOError:
        fd, opened = _patiently(lambda: libc.open_without_links(os.fsencode(path), flags)), True
    except OSError as exc:
        if exc.errno not in (errno.ELOOP, errno.ENOSYS, errno.EPERM):  # EPERM: of filters that know no openat2(2)
            raise
        fd, opened = _walk(path, base, writing=writing, shown=shown), False
    if opened and flags & os.O_PATH:
        return fd
    try:
        if not flags & os.O_PATH and stat.S_IFMT(os.fstat(fd).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise OSError(errno.EINVAL, "it is a device, a pipe or a socket", path)
        if not opened:
            held, fd = fd, -1
            with descriptor(held):
                fd = _patiently(lambda: os.open(beneath.shown(held), flags))
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def _patiently(call: Callable[[], int]) -> int:
    until = time.monotonic() + _LEASE_SECONDS
    while True:
        try:
            return call()
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.05)


class _Part(NamedTuple):
    """A part of the way, held. ``safe``: nobody but root and this user can write to it or to one above it."""

    fd: int
    safe: bool


class _End(NamedTuple):
    """Where a link ends. ``enough``: who made it is reason enough to follow it."""

    name: str
    maker: int
    enough: bool


_BASE = None
"""Where the way to the base ends."""


def known(uid: int) -> bool:
    """Root, this user, or who became root by sudo to run this."""
    me = os.geteuid()
    return uid in (0, me) or (me == 0 and str(uid) == os.environ.get("SUDO_UID"))


def believed(uid: int) -> bool:
    """Who is `known`. In a user namespace also all who have no number there: root is one of them, and this process has
    no rights over what is theirs. So is each neighbour: it is asked of the way to something, not of that itself."""
    if known(uid):
        return True
    return uid == _UNKNOWN and bool(numbers := _numbers()) and not any(uid in some for some in numbers)


def _numbers() -> list[range]:
    """Those of the users of a user namespace; of the machine's own, none."""
    try:
        lines = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return []
    return [range(first, first + count) for first, _, count in lines if count < (1 << 32) - 1]


def _walk(path: str, base: str, *, writing: bool, shown: bool) -> int:
    """``path``, held (``O_PATH``), when each link on its way is followed."""
    user = os.geteuid() != 0 or bool(_numbers())
    below = path == base or path.startswith(base.rstrip("/") + "/")
    todo: list[str | _End | None] = [*_parts(path[len(base) :]), _BASE, *_parts(base)] if below else [*_parts(path)]
    root = os.open("/", _HELD)
    way = [_Part(root, _ours(os.fstat(root)))]
    try:
        depth = links = parts = 0  # ``depth``: parts up to the base, 0 before it, and when a link has led out of it
        reached = False
        while todo:
            part, here = todo.pop(), way[-1]
            parts += isinstance(part, str)
            if parts > _PARTS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if part is _BASE:
                depth, reached = len(way), True
            elif isinstance(part, _End):
                owner = os.fstat(here.fd).st_uid
                roots = user and believed(owner) and owner != os.geteuid()
                theirs = part.maker and (owner == part.maker or roots) and not (writing and reached)
                if not (part.enough or theirs or (depth and not writing)):
                    told = f"the link {part.name}, which user {part.maker} made, is not followed"
                    raise PermissionError(errno.EACCES, told, path)
            elif part == "..":
                _leave(way, max(len(way) - 1, 1))
            else:
                try:  # only so is mounted what is mounted on demand
                    fd = os.open(part, _HELD | os.O_DIRECTORY, dir_fd=here.fd)
                except NotADirectoryError:
                    fd = os.open(part, _HELD, dir_fd=here.fd)
                info = os.fstat(fd)
                way.append(_Part(fd, here.safe and _ours(info) and (not reached or known(info.st_uid))))
                if stat.S_ISLNK(info.st_mode):
                    links += 1
                    if links > _MOST:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    if user:
                        enough = known(info.st_uid) and (here.safe or not (writing and reached))
                        enough = enough or (not reached and believed(info.st_uid))
                        enough = enough or (not reached and not _planted(info, os.fstat(here.fd)))
                    else:
                        enough = believed(info.st_uid) and here.safe and not (shown and reached)
                    text = os.readlink("", dir_fd=fd)
                    todo += [_End(part, info.st_uid, enough), *_parts(text)]
                    _leave(way, 1 if text.startswith("/") else len(way) - 1)
            if len(way) < depth:
                depth = 0
        return os.dup(way[-1].fd)
    finally:
        _leave(way, 0)


def _leave(way: list[_Part], left: int) -> None:
    """Go back to where ``way`` has ``left`` parts."""
    while len(way) > left:
        os.close(way.pop().fd)


def _parts(path: str) -> list[str]:
    """The last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _ours(info: os.stat_result) -> bool:
    """Whether nobody but those who are `believed` can put something into the folder, or replace what these have in
    it."""
    return believed(info.st_uid) and (not info.st_mode & 0o022 or bool(info.st_mode & stat.S_ISVTX))


def _planted(link: os.stat_result, folder: os.stat_result) -> bool:
    """Whether the kernel follows the link for nobody but its owner: all may write to its folder, which is another's."""
    return folder.st_mode & 0o1002 == 0o1002 and folder.st_uid != link.st_uid
