"""Storage in a folder: the embedded default, and a site's NFS, Lustre or GPFS."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from bootseer import faults
from bootseer.backends.interface import FILE_MODE, Attributes, Backend, Entry, Piece, Source, clean, join, refuse_long
from bootseer.backends.pool import read_each
from bootseer.closing import descriptor
from bootseer.errors import (
    BootseerError,
    DataError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    doing,
    from_os_error,
    logged,
)
from bootseer.kernel import beneath, libc, links
from bootseer.kernel.removal import refuse_mounted, remove_tree

log = logging.getLogger(__name__)

_AWAY = 90.0
"""Seconds after which a folder in place of the one that was there is the storage: made anew, or mounted anew."""

_IOV_MAX = 512
_FOLDER = os.O_PATH | os.O_DIRECTORY
_DEEPEST = 16
"""Levels of a store whose folders are shared; there are no more than half as many."""
_SHARED = stat.S_ISGID | stat.S_IWGRP
"""The mode of a folder that a group has in common: so is what is made in it."""
_TO_SHARE = "a group has it in common after bootseer store init --shared GROUP; who was added to it logs in again"
_SPECIAL = "is no plain file but a device, a pipe or a socket"


def _version(info: os.stat_result) -> str:
    return f"{_state(info)}-{info.st_uid}"


def _state(info: os.stat_result) -> str:
    return f"{info.st_ino}-{info.st_size}-{info.st_mtime_ns}"


def _entry(name: str, info: os.stat_result) -> Entry:
    folder = stat.S_ISDIR(info.st_mode)
    return Entry(name, 0 if folder else info.st_size, folder, info.st_mtime, _version(info))


class _Source(Source):
    """``pinned``: bytes of a file that was changed in place since it was opened are an error. Closes ``fd``."""

    def __init__(self, fd: int, path: Path, pinned: bool) -> None:
        self._fd, self._path, self._pinned = fd, path, pinned
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            self.close()
            raise NotFoundError(f"cannot open {path}: it is a folder")
        self.size, self.version, self._state = info.st_size, _version(info), _state(info)

    def read(self, offset: int, length: int) -> bytes:
        pieces, got = [], 0
        with doing(f"read {self._path}"):
            while got < length:
                pieces.append(os.pread(self._fd, length - got, offset + got))
                if not pieces[-1]:
                    raise DataError(f"{self._path} ends at {offset + got}, wanted {offset + length}")
                got += len(pieces[-1])
        self._check()
        return b"".join(pieces)  # of one piece, as it nearly always is, no copy

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        left = [part for part in parts if len(part)]
        with doing(f"read {self._path}"):
            while left:
                got = os.preadv(self._fd, left[:_IOV_MAX], offset)
                if not got:
                    raise DataError(f"{self._path} ends at {offset}, more was expected")
                offset += got
                while left and got >= len(left[0]):
                    got -= len(left.pop(0))
                if got:
                    left[0] = left[0][got:]
        self._check()

    def _check(self) -> None:
        if self._pinned and _state(os.fstat(self._fd)) != self._state:  # it may be given to another user meanwhile
            raise DataError(f"{self._path} was changed while it was read", hint="open it again")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class FolderSink:
    """Writes to ``fd`` and closes it; ``remove`` takes the file away again."""

    def __init__(self, fd: int, path: Path, remove: Callable[[], object]) -> None:
        self._path, self._remove = path, remove
        self._file = os.fdopen(fd, "wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with doing(f"write {self._path}"):
            while view:
                view = view[self._file.write(view) :]

    def close(self) -> None:
        with doing(f"write {self._path}"), self._file:
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        self._file.close()
        with contextlib.suppress(BootseerError):
            self._remove()


def _share(fd: int, gid: int, levels: int, where: Path, left: list[str]) -> None:
    """Give the folder ``fd`` and what is in it to the group; ``left``: what could not be given."""
    info = os.fstat(fd)
    mode = stat.S_IMODE(info.st_mode)
    # no set-uid or set-gid file: who put it there would be of the group
    wanted = mode & 0o6775 | _SHARED | 0o050 if stat.S_ISDIR(info.st_mode) else mode & 0o775 | 0o040
    try:
        if (info.st_gid, mode) != (gid, wanted):
            os.chown(beneath.shown(fd), -1, gid)
            os.chmod(beneath.shown(fd), wanted)
    except PermissionError:
        left.append(str(where))
    if not stat.S_ISDIR(info.st_mode) or not levels:
        return
    try:
        with beneath.folder(".", root=fd) as opened:
            names = os.listdir(opened)
    except PermissionError:
        left.append(str(where))
        return
    for name in names:
        with contextlib.suppress(FileNotFoundError), descriptor(beneath.open_at(fd, name, os.O_PATH)) as below:
            found = os.fstat(below)
            # of a file with another name elsewhere the neighbour who gave it this one may not be the owner
            if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
                _share(below, gid, levels - 1, where / name, left)


def _refuse_special(folder: int, name: str, path: Path) -> None:
    """Raise `NotWritableError` for a device, a pipe or a socket: none is ever replaced."""
    with contextlib.suppress(OSError):
        kind = stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise NotWritableError(f"{path} {_SPECIAL}", hint="name another one")


def _rename_new(source_folder: int, source: str, target_folder: int, target: str) -> None:
    """rename(2) that fails when ``target`` exists: in one step, but for a folder where the storage cannot do that."""
    # NFS answers EINVAL to renameat2 with flags, FUSE and old file systems too; a hard link is as good for a file
    try:
        libc.rename_new(source_folder, source, target_folder, target)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
    else:
        return
    folders: Any = {"src_dir_fd": source_folder, "dst_dir_fd": target_folder}
    if stat.S_ISDIR(os.stat(source, dir_fd=source_folder, follow_symlinks=False).st_mode):
        # not in one step, but rename(2) replaces no file, and of folders only an empty one, by a folder
        with contextlib.suppress(FileNotFoundError):
            os.stat(target, dir_fd=target_folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(source, target, **folders)
        return
    os.link(source, target, **folders, follow_symlinks=False)
    os.unlink(source, dir_fd=source_folder)


def _unlink(above: int, folder: str, names: set[str]) -> None:
    """Remove all files of these names below ``folder``."""
    left = [folder]
    while left:
        here = left.pop()
        with beneath.folder(here, root=above) as fd, os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(f"{here}/{entry.name}")
                elif entry.name in names:
                    with contextlib.suppress(FileNotFoundError):  # another removal was quicker
                        os.unlink(entry.name, dir_fd=fd)


class FolderBackend(Backend):
    """Files below ``root``, which the first write makes.

    Others may write there: all is done by descriptors, and `bootseer.kernel.links` says which links are followed.
    ``base``: the folder that a user named, here or further down. ``shown``: others will see what is read here.
    ``common``: what is made in a folder that is shared with a group is shared too, whatever our umask.
    """

    def __init__(self, root: Path, *, base: Path | None = None, shown: bool = False, common: bool = False) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = str(root)
        self._base, self._shown, self._common = os.path.abspath(base or root), shown, common
        self._place: tuple[int, int] | None = None
        """Device and number of ``root`` while it was there."""
        self._away = 0.0
        """Since when another one is there, or none."""

    def _path(self, path: str) -> Path:
        return self.root / path if path else self.root

    def _is_new(self) -> bool:
        """Whether another folder has been at the place of this one for so long that it is the storage now."""
        now = time.monotonic()
        self._away = self._away or now
        if now - self._away < _AWAY or (here := self._here()) is None:
            return False
        self._place, self._away = here, 0.0
        return True

    def _here(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = self.root.stat()
            return found.st_dev, found.st_ino
        return None

    @contextlib.contextmanager
    def _found(self, what: str, path: str) -> Iterator[Path]:
        """Where ``path`` is; errors met there while doing ``what``, a verb, are translated."""
        where = self._path(path)
        try:
            yield where
            if self._place is None or self._away:
                self._place, self._away = self._here(), 0.0
        except (FileNotFoundError, NotADirectoryError):
            if self._place is not None and self._here() != self._place and not self._is_new():
                raise UnavailableError(
                    f"cannot {what} {where}: {self.root} is not there any more", hint="check that it is mounted"
                ) from None
            raise NotFoundError(f"cannot {what} {where}: no such file or folder") from None
        except OSError as exc:
            if exc.errno == errno.EIO:
                raise UnavailableError(f"cannot {what} {where}: {exc.strerror}", hint="check its disk") from exc
            if exc.errno == errno.ENAMETOOLONG:
                raise NotFoundError(f"cannot {what} {where}: {exc.strerror}") from None
            raise self._error(exc, f"{what} {where}") from exc

    def _error(self, exc: OSError, doing: str) -> BootseerError:
        found = from_os_error(exc, doing)
        if self._common and exc.errno in (errno.EACCES, errno.EPERM) and exc.strerror == os.strerror(exc.errno):
            found.hint = _TO_SHARE
        return found

    def _open(self, where: Path, flags: int, *, writing: bool = False) -> int:
        return links.open_followed(str(where), flags, base=self._base, writing=writing, shown=self._shown)

    @contextlib.contextmanager
    def _held(self, where: Path, flags: int = os.O_PATH, *, writing: bool = False) -> Iterator[int]:
        with descriptor(self._open(where, flags, writing=writing)) as fd:
            yield fd

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder in which ``path`` lies, to write to, and its name there."""
        where = self._path(path)
        with descriptor(self._folder(where.parent) if make else self._open(where.parent, _FOLDER, writing=True)) as fd:
            yield fd, where.name

    def _folder(self, where: Path) -> int:
        """A folder to write to, which is made with those above it where it is missing."""
        try:
            return self._open(where, _FOLDER, writing=True)
        except FileNotFoundError:
            if where == where.parent:
                raise
        with descriptor(self._folder(where.parent)) as above:
            made = False
            with contextlib.suppress(FileExistsError):
                os.mkdir(where.name, dir_fd=above)
                made = True
            fd = beneath.open_at(above, where.name, _FOLDER)
            if made and (mode := self._shared_mode(above)):
                with logged(log.info, "the group may not write to %s", where, kinds=OSError):
                    os.chmod(beneath.shown(fd), mode)
            return fd

    def _shared_mode(self, folder: int) -> int:
        """The mode of a folder that is shared with a group, which what is made in it is to have; else 0."""
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        return mode if self._common and mode & _SHARED == _SHARED else 0

    def stat(self, path: str) -> Entry:
        with self._found("look up", path) as where, descriptor(self._open(where, os.O_PATH)) as fd:
            return _entry(path.rpartition("/")[2], os.fstat(fd))

    def list(self, path: str) -> list[Entry]:
        found = []
        with (
            self._found("list", path) as where,
            self._held(where, os.O_RDONLY | os.O_DIRECTORY) as fd,
            os.scandir(fd) as entries,
        ):
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, NotFoundError):  # gone since, or a link to nothing
                    if entry.is_symlink():
                        found.append(self._linked(join(path, entry.name), entry))
                    else:
                        found.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
        return sorted(found)

    def _linked(self, path: str, entry: os.DirEntry[str]) -> Entry:
        """What a link leads to; the link itself where it is not followed: only who opens it cannot go on. A folder that
        it lies in counts as not there: with two such links there are paths without end."""
        try:
            if (found := self.stat(path)).is_dir and self._leads_back(path):
                log.warning("%s leads back to a folder that it lies in, and is passed over", self._path(path))
                raise NotFoundError(f"{path} leads back to a folder that it lies in")
            return found
        except NotFoundError:
            raise
        except BootseerError as exc:
            log.warning("%s", exc.message)
            return Entry(entry.name, 0, False, entry.stat(follow_symlinks=False).st_mtime)

    def _leads_back(self, path: str) -> bool:
        above = [path.rpartition("/")[0]]
        while above[-1]:
            above.append(above[-1].rpartition("/")[0])
        with self._found("look up", path), contextlib.ExitStack() as stack:
            own, *others = (
                os.fstat(stack.enter_context(descriptor(self._open(self._path(one), os.O_PATH))))
                for one in (path, *above)
            )
            return any(os.path.samestat(own, one) for one in others)

    def open(self, path: str, *, pinned: bool = False) -> _Source:
        with self._found("open", path) as where:
            try:
                fd = self._open(where, os.O_RDONLY)
            except OSError as exc:
                if exc.errno in (errno.EINVAL, errno.ENXIO):  # the latter: a socket
                    raise NotWritableError(f"{where} {_SPECIAL}", hint="name another one") from None
                raise
            return _Source(fd, where, pinned)

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        # A link to a folder leads elsewhere: what is there is not of this storage.
        if path and self.is_link(path):
            return iter(())
        return super().walk(path)

    def is_link(self, path: str) -> bool:
        with contextlib.suppress(OSError), self._held(self._path(path).parent) as folder:
            name = path.rpartition("/")[2]
            return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        return False

    def whole(self) -> tuple[Backend, str]:
        path = clean(self.url)
        return (FolderBackend(Path("/"), base=Path(self._base), shown=self._shown), path) if path else (self, "")

    def read_many(self, pieces: Sequence[Piece]) -> None:
        read_each(pieces)

    def create(self, path: str, *, siblings: object = None, mode: int = FILE_MODE) -> FolderSink:
        target = self._path(path)
        with contextlib.ExitStack() as stack:
            with self._making(target.parent):
                folder, name = stack.enter_context(self._parent(path, make=True))
            try:
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
            except FileExistsError:
                raise
            except OSError as exc:
                raise self._error(exc, f"write {target}") from exc
            if shared := self._shared_mode(folder):
                with logged(log.info, "the group may not read %s", target, kinds=OSError):
                    os.fchmod(fd, shared & 0o644)
        return FolderSink(fd, target, lambda: self.delete(path))

    @contextlib.contextmanager
    def _making(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, NotADirectoryError):
            raise NotWritableError(f"cannot make folder {folder}: a file is in the way") from None
        except OSError as exc:
            raise self._error(exc, f"make folder {folder}") from exc

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        source, target = self._path(src), self._path(dst)
        try:
            with self._parent(src) as (from_folder, old), self._parent(dst) as (to_folder, new):
                if overwrite:
                    _refuse_special(to_folder, new, target)
                    os.replace(old, new, src_dir_fd=from_folder, dst_dir_fd=to_folder)
                else:
                    _rename_new(from_folder, old, to_folder, new)
                with descriptor(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=to_folder)) as fd:
                    os.fsync(fd)
        except FileExistsError:
            raise
        except IsADirectoryError as exc:
            raise FileExistsError(exc.errno, exc.strerror, str(target)) from None
        except OSError as exc:
            raise self._error(exc, f"rename {source} to {target}") from exc

    def check_new(self, path: str) -> None:
        refuse_long(str(self._path(path)), 255, 4095)

    def delete(self, path: str) -> None:
        with contextlib.suppress(NotFoundError), self._found("delete", path), self._parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def sweep(self, path: str, prefix: str, seconds: float) -> None:
        """Remove files in the folder ``path`` that this user made, whose names begin with ``prefix``, and which nobody
        had written to for so long when the folder was changed last."""
        with (
            self._found("list", path) as where,
            self._held(where, os.O_RDONLY | os.O_DIRECTORY, writing=True) as folder,
            os.scandir(folder) as entries,
        ):
            old = os.fstat(folder).st_mtime - seconds
            for entry in entries:
                if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    if info.st_uid == os.geteuid() and info.st_mtime < old:
                        log.info("removing %s: its writer is gone", where / entry.name)
                        os.unlink(entry.name, dir_fd=folder)

    def make_folder(self, path: str) -> None:
        with self._making(self._path(path)):
            os.close(self._folder(self._path(path)))

    def share(self, gid: int) -> None:
        """Make the folder, if it is missing. It and all below it are the group's, who alone may write there, and so is
        what is made there later. `NotWritableError` where some of that is another user's."""
        where, left = self._path(""), list[str]()
        with doing(f"share {where} with group {gid}"), descriptor(self._folder(where)) as top:
            _share(top, gid, _DEEPEST, where, left)
        if left:
            shown = f"{left[0]} and {len(left) - 1} more" if len(left) > 1 else left[0]
            hint = "run it as root: a user gives only what is his own, to a group of his own"
            raise NotWritableError(f"not given to group {gid}: {shown}", hint=hint)

    def remove_empty_folder(self, path: str) -> None:
        try:
            with self._parent(path) as (folder, name):
                os.rmdir(name, dir_fd=folder)
        except OSError as exc:
            if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path) from None
            with self._found("remove", path):
                raise

    def change(self, path: str, **to: Unpack[Attributes]) -> None:
        if (mtime_ns := to.get("mtime_ns")) is not None:
            with self._found("change", path) as where, self._held(where, writing=True) as fd:
                os.utime(beneath.shown(fd), ns=(mtime_ns, mtime_ns))

    def space(self) -> tuple[int, int]:
        with self._found("look up", "") as where, self._held(where) as fd:
            found = os.fstatvfs(fd)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def check_removable(self, path: str) -> None:
        with self._found("remove", path) as where:
            refuse_mounted(where)

    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        with (
            self._found("remove", path),
            contextlib.suppress(FileNotFoundError),
            self._parent(path) as (above, name),
        ):
            if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=above)  # what it points to is not in the store
                return
            if first:
                _unlink(above, name, set(first))
            faults.point("stripefs.remove.rest")
            remove_tree(Path(beneath.shown(above), name))
