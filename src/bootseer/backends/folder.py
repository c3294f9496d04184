"""Storage in a folder: the embedded default, and a site's NFS, Lustre or GPFS."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer import faults
from bootseer.backends.interface import FILE_MODE, Backend, Entry, Piece, Source, clean
from bootseer.backends.pool import read_each
from bootseer.errors import DataError, NotFoundError, NotWritableError, doing, from_os_error
from bootseer.kernel import libc

_IOV_MAX = 512


def _version(info: os.stat_result) -> str:
    return f"{_state(info)}-{info.st_uid}"


def _state(info: os.stat_result) -> str:
    return f"{info.st_ino}-{info.st_size}-{info.st_mtime_ns}"


class _Source(Source):
    """``pinned``: bytes of a file that was changed in place since it was opened are an error."""

    def __init__(self, path: Path, pinned: bool) -> None:
        self._path, self._pinned, self._fd = path, pinned, -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        info = os.fstat(self._fd)
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
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by close() or abandon()

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
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _refuse_special(path: Path) -> None:
    """Raise `NotWritableError` for a device, a pipe or a socket: opening may never end, and none is ever replaced."""
    with contextlib.suppress(OSError):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise NotWritableError(f"{path} is no plain file but a device, a pipe or a socket", hint="name another one")


def _rename_new(source: Path, target: Path) -> None:
    """rename(2) that fails when ``target`` exists: in one step, but for a folder where the storage cannot do that."""
    # NFS answers EINVAL to renameat2 with flags, FUSE and old file systems too; a hard link is as good for a file
    try:
        libc.rename_new(str(source), str(target))
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
    else:
        return
    if source.is_dir() and not source.is_symlink():
        # not in one step, but rename(2) replaces no file, and of folders only an empty one, by a folder
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)
        return
    os.link(source, target, follow_symlinks=False)
    os.unlink(source)


class FolderBackend(Backend):
    """Files below ``root``, which the first write makes."""

    access = ("folder", "the store is a folder of this machine")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def _path(self, path: str) -> Path:
        return self.root / path if path else self.root

    @contextlib.contextmanager
    def _found(self, what: str, path: str) -> Iterator[Path]:
        """Where ``path`` is; errors met there while doing ``what``, a verb, are translated."""
        where = self._path(path)
        try:
            yield where
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"cannot {what} {where}: no such file or folder") from None
        except OSError as exc:
            raise from_os_error(exc, f"{what} {where}") from exc

    def stat(self, path: str) -> Entry:
        with self._found("look up", path) as where:
            info = where.stat()
        folder = stat.S_ISDIR(info.st_mode)
        return Entry(path.rpartition("/")[2], 0 if folder else info.st_size, folder, info.st_mtime, _version(info))

    def list(self, path: str) -> list[Entry]:
        found = []
        with self._found("list", path) as where, os.scandir(where) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # gone since
                    info = entry.stat()
                    folder = entry.is_dir()
                    size = 0 if folder else info.st_size
                    found.append(Entry(entry.name, size, folder, info.st_mtime, _version(info)))
        return sorted(found)

    def open(self, path: str, *, pinned: bool = False) -> _Source:
        with self._found("open", path) as where:
            _refuse_special(where)
            return _Source(where, pinned)

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        # A link to a folder leads elsewhere: what is there is not of this storage.
        if path and self._path(path).is_symlink():
            return iter(())
        return super().walk(path)

    def whole(self) -> tuple[Backend, str]:
        base = clean(self.url)
        return (FolderBackend(Path("/")), base) if base else (self, "")

    def read_many(self, pieces: Sequence[Piece]) -> None:
        read_each(pieces)

    def create(self, path: str, *, siblings: object = None, mode: int = FILE_MODE) -> FolderSink:
        target = self._path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise NotWritableError(f"cannot make folder {target.parent}: a file is in the way") from None
        except OSError as exc:
            raise from_os_error(exc, f"make folder {target.parent}") from exc
        try:
            return FolderSink(target)
        except FileExistsError:
            raise
        except OSError as exc:
            raise from_os_error(exc, f"write {target}") from exc

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        source, target = self._path(src), self._path(dst)
        try:
            if overwrite:
                _refuse_special(target)
                os.replace(source, target)
            else:
                _rename_new(source, target)
            fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileExistsError:
            raise
        except IsADirectoryError as exc:
            raise FileExistsError(exc.errno, exc.strerror, str(target)) from None
        except OSError as exc:
            raise from_os_error(exc, f"rename {source} to {target}") from exc

    def delete(self, path: str) -> None:
        with doing(f"delete {self._path(path)}"):
            self._path(path).unlink(missing_ok=True)

    def make_folder(self, path: str) -> None:
        with self._found("make folder", path) as where:
            where.mkdir(parents=True, exist_ok=True)

    def remove_empty_folder(self, path: str) -> None:
        try:
            self._path(path).rmdir()
        except OSError as exc:
            if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path) from None
            with self._found("remove", path):
                raise

    def change(
        self,
        path: str,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        owner: tuple[str, str] | None = None,
        mtime_ns: int | None = None,
    ) -> None:
        if mtime_ns is not None:
            with self._found("change", path) as where:
                os.utime(where, ns=(mtime_ns, mtime_ns))

    def space(self) -> tuple[int, int]:
        with self._found("look up", "") as where:
            found = os.statvfs(where)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        with self._found("remove", path) as folder, contextlib.suppress(FileNotFoundError):
            if folder.is_symlink():  # what it points to is not in the store
                folder.unlink()
                return
            for where, _, names in os.walk(folder) if first else ():  # which does not follow links
                for name in set(first).intersection(names):
                    with contextlib.suppress(FileNotFoundError):  # another removal was quicker
                        os.unlink(os.path.join(where, name))
            faults.point("stripefs.remove.rest")
            shutil.rmtree(folder)
