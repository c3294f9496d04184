"""`build`: a directory as an EROFS image of two files, ``meta`` (all but file contents) and ``data`` (contents)."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from bootseer import faults
from bootseer.closing import descriptor
from bootseer.erofs import xattr
from bootseer.erofs.data import Buffer, Hole
from bootseer.erofs.node import Attrs
from bootseer.erofs.tree import show
from bootseer.erofs.writer import Writer
from bootseer.errors import BootseerError, DataError, NotFoundError, from_os_error

_log = logging.getLogger(__name__)
_PIECE = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Not blocking: a fifo put in place of a file would wait for a writer."""


def build(tree: Path, meta: Path, data: Path) -> None:
    """Write the directory ``tree`` as an EROFS image: ``meta`` and ``data``, to be mounted with
    `bootseer.kernel.mount.mount_erofs(meta, data, target)`.

    ``data`` holds the content of every regular file, small ones too, uncompressed: files of 64 KiB or more at a
    multiple of it, others at a multiple of 4 KiB; whole chunks of zeros take no room. ``meta`` holds the rest: inodes
    with nanosecond mtimes, names of any bytes, extended attributes (file capabilities and ACLs too), symbolic and hard
    links, device nodes, fifos, sockets, set-id bits. The same tree gives the same bytes. Needs no root and no tool.

    ``meta`` appears last, when both are complete; after a failure there is neither. Nothing is synced to disk.

    Traps: access and change times become the mtime; attributes that EROFS has no name for (``system.nfs4_acl``) are
    left out with a log line; whiteouts and ``trusted.overlay.*`` attributes in ``tree`` are kept, so an overlayfs over
    the image obeys them; ``tree`` must not change meanwhile (a file whose size or time does while it is read is an
    error).

    Raises `NotFoundError` (no such folder), `DataError` (the tree changed, or holds what EROFS cannot), `FullError`
    (no space), `NotWritableError` (also: a file that may not be read), `BootseerError` for other I/O errors."""
    tree, meta, data = tree.absolute(), meta.absolute(), data.absolute()
    if not tree.is_dir():
        raise NotFoundError(f"cannot build an image of {tree}: it is no folder")
    for part in (meta, data):
        if not part.parent.is_dir():
            raise NotFoundError(f"cannot build {part}: there is no such folder")
        if part.is_relative_to(tree):
            raise BootseerError(f"cannot build {part}: it lies in {tree}, which it is to hold", hint="put it elsewhere")
    new_meta, new_data = (part.with_name(f".{part.name}.{os.getpid()}") for part in (meta, data))
    try:
        with new_data.open("wb", buffering=_PIECE) as file:
            writer = Writer(file)
            _Walk(writer, os.fsencode(tree)).run()
            new_meta.write_bytes(writer.finish())
        faults.point("erofs.build.before-rename")
        meta.unlink(missing_ok=True)  # never an old meta beside a new data
        os.replace(new_data, data)
        faults.point("erofs.build.between-renames")
        os.replace(new_meta, meta)
    except OSError as exc:
        where = f" at {os.fsdecode(exc.filename)}" if isinstance(exc.filename, (str, bytes)) else ""
        raise from_os_error(exc, f"build an image of {tree}{where}") from None
    finally:
        new_meta.unlink(missing_ok=True)
        new_data.unlink(missing_ok=True)
        if not meta.exists():
            data.unlink(missing_ok=True)


class _Walk:
    """Adds a directory to a writer: by name, all files of a directory before its subdirectories."""

    def __init__(self, writer: Writer, top: bytes) -> None:
        self._writer = writer
        self._top = top
        self._links: dict[tuple[int, int], bytes] = {}
        self._left_out: set[str] = set()

    def run(self) -> None:
        with descriptor(os.open(self._top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            self._writer.add_dir(b"", attributes(os.fstat(fd), self._top, self._left_out, self._top))
        stack = [b""]
        while stack:
            folder = stack.pop()
            below = []
            for name in sorted(os.listdir(os.path.join(self._top, folder))):
                path = folder + b"/" + name if folder else name
                full = os.path.join(self._top, path)
                status = os.lstat(full)
                if self._add(path, full, status):
                    below.append(path)
            stack += reversed(below)

    def _add(self, path: bytes, full: bytes, status: os.stat_result) -> bool:
        """Add one entry; True for a directory."""
        kind = stat.S_IFMT(status.st_mode)
        if kind != stat.S_IFDIR and status.st_nlink > 1:
            first = self._links.setdefault((status.st_dev, status.st_ino), path)
            if first != path:
                self._writer.add_hardlink(path, first)
                return False
        attrs = attributes(status, full, self._left_out, full)
        if kind == stat.S_IFDIR:
            self._writer.add_dir(path, attrs)
        elif kind == stat.S_IFREG:
            self._file(path, full, attrs, status)
        elif kind == stat.S_IFLNK:
            self._writer.add_symlink(path, attrs, os.readlink(full))
        else:
            self._writer.add_device(path, attrs, kind, status.st_rdev)
        return kind == stat.S_IFDIR

    def _file(self, path: bytes, full: bytes, attrs: Attrs, status: os.stat_result) -> None:
        if not status.st_size:
            self._writer.add_file(path, attrs, 0, ())
            return
        with descriptor(os.open(full, _READ)) as fd:
            now = os.fstat(fd)
            if not os.path.samestat(now, status) or not stat.S_ISREG(now.st_mode):
                raise DataError(f"{show(full)} was replaced while an image was made of it")
            pieces = contents(fd, now)
            self._writer.add_file(path, attrs, status.st_size, pieces)
            then = os.fstat(fd)
            if (then.st_size, then.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                raise DataError(f"{show(full)} changed while an image was made of it")


def attributes(status: os.stat_result, entry: bytes | int, left_out: set[str], shown: bytes = b"") -> Attrs:
    """Those of ``entry`` (a path, of which a link is not followed, or a descriptor), which has this ``status``. What
    EROFS cannot hold is named once in the log, and put into ``left_out``."""
    xattrs: dict[bytes, bytes] = {}
    links = isinstance(entry, int)
    try:
        names = os.listxattr(entry, follow_symlinks=links)
    except OSError as exc:
        if exc.errno != errno.EOPNOTSUPP:
            raise
        names = []
    for text in names:
        name = os.fsencode(text)
        if xattr.representable(name):
            xattrs[name] = os.getxattr(entry, name, follow_symlinks=links)
        elif text not in left_out:
            left_out.add(text)
            _log.warning(
                "EROFS cannot hold the attribute %s, left out (first at %s)",
                text,
                show(shown or os.fsencode(str(entry))),
            )
    return Attrs(status.st_mode & 0o7777, status.st_uid, status.st_gid, status.st_mtime_ns, xattrs)


def contents(fd: int, status: os.stat_result) -> Iterator[Buffer | Hole]:
    """What the regular file ``fd`` of this ``status`` holds, for `Writer.add_file`."""
    if status.st_blocks * 512 < status.st_size:  # fewer blocks than bytes: it has holes
        return _sparse(fd, status.st_size)
    return _pieces(fd, 0, status.st_size)


def _pieces(fd: int, at: int, end: int) -> Iterator[bytes]:
    while at < end:
        piece = os.pread(fd, min(_PIECE, end - at), at)
        if not piece:
            return  # shorter than it was: the writer says so
        at += len(piece)
        yield piece


def _sparse(fd: int, size: int) -> Iterator[Buffer | Hole]:
    at = 0
    while at < size:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:
                raise
            data = size
        data = min(data, size)
        if data > at:
            yield Hole(data - at)
        if data == size:
            return
        at = min(os.lseek(fd, data, os.SEEK_HOLE), size)
        yield from _pieces(fd, data, at)
