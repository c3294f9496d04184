"""The files of a tar file, also of a compressed one: what archives of images lie in."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bootseer.closing import Closing
from bootseer.errors import DataError, doing, from_os_error
from bootseer.kernel import links
from bootseer.oci.inflate import COMPRESSED, inflate
from bootseer.oci.spec import MAX_DOCUMENT

log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_MOST = 1 << 50
_EXTENDED = tuple(kind.encode() for kind in "xgXLK")
_DAMAGED = (tarfile.TarError, ValueError, OverflowError, RecursionError)
_MOST_MEMBERS = 200_000
_MOST_LINKS = 40
"""On one way, as the kernel has it."""
_MOST_EXTENDED = 64 << 20
_MOST_GLOBAL = 64 << 10
"""Bytes of PAX records for all members that follow: ``tarfile`` copies them for each."""


class _Header(tarfile.TarInfo):
    """Has no more than what files are found and read by. `_headers` makes one for each archive."""

    __slots__ = ()
    extended = global_ = 0
    """Bytes of headers with long names and PAX records in the archive so far."""

    def _block(self, count: int) -> int:
        """How far a member reaches; all of the headers with long names and PAX records is read to memory."""
        if not 0 <= count <= (MAX_DOCUMENT if self.type in _EXTENDED else _MOST):
            raise tarfile.ReadError(f"a member of {count} bytes")  # back to an earlier one would have no end
        if self.type in _EXTENDED:
            archive = type(self)
            archive.extended += count
            archive.global_ += count if self.type == tarfile.XGLTYPE else 0
            if archive.extended > _MOST_EXTENDED or archive.global_ > _MOST_GLOBAL:
                raise tarfile.ReadError("more long names and PAX records than are read")
        return -(-count // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE

    def _apply_pax_info(self, pax_headers: dict[str, str], *_: object) -> None:
        if "path" in pax_headers:
            self.name = pax_headers["path"].rstrip("/")
        self.linkname = pax_headers.get("linkpath", self.linkname)
        self.size = int(pax_headers.get("size", self.size))

    def _refuse(self, *_: object) -> None:
        raise tarfile.ReadError("a sparse member, which is not read")  # it is of any size, whatever that of the archive

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


def _headers() -> type[_Header]:
    class Header(_Header):
        __slots__ = ()

    return Header


class Members(Closing):
    """The members of the tar file ``path`` by their names, ``./a``, ``/a`` and ``a`` being one; of several the last. A
    compressed file is decompressed to a temporary file first, in ``spool`` (default: where those are). Not safe for use
    by several threads. Raises `NotFoundError`, and `DataError` when it is no archive."""

    def __init__(self, path: Path, spool: Path | None = None) -> None:
        self.path, self._spool = path, spool or Path(tempfile.gettempdir())
        with contextlib.ExitStack() as undo:
            try:
                file: IO[bytes] = undo.enter_context(os.fdopen(_open(path), "rb"))
                if file.read(5).startswith(COMPRESSED):
                    file = undo.enter_context(self._decompressed(file))
                file.seek(0)
                self._tar = undo.enter_context(tarfile.open(fileobj=file, mode="r:", tarinfo=_headers()))
                self._found: dict[str, tarfile.TarInfo] = {}
                for number, item in enumerate(self._tar):
                    if number >= _MOST_MEMBERS:
                        raise tarfile.ReadError(f"it has more than {_MOST_MEMBERS} members")
                    self._found[_plain(item.name)] = item
            except _DAMAGED as exc:
                raise DataError(f"{path} is not an archive of docker save: {exc}") from None
            except OSError as exc:
                raise from_os_error(exc, f"read the archive {path}") from exc
            self._open = undo.pop_all()

    def _decompressed(self, file: IO[bytes]) -> IO[bytes]:
        file.seek(0)
        log.info("decompressing %s to a temporary file in %s", self.path, self._spool)
        with doing(f"decompress {self.path} to {self._spool}"), contextlib.ExitStack() as undo:
            plain = undo.enter_context(tempfile.TemporaryFile(dir=self._spool))
            for chunk in inflate(iter(functools.partial(file.read, _CHUNK), b""), f"archive {self.path}"):
                plain.write(chunk)
            undo.pop_all()
            return plain

    def __contains__(self, name: str) -> bool:
        return _plain(name) in self._found

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A file of the archive, also by a way with links, which never leaves it: as ``docker load`` sees what it has
        unpacked. Raises `FileNotFoundError`, `DataError`."""
        try:
            file = self._tar.extractfile(self._followed(name))
            if file is None:
                raise KeyError(name)
            with file:
                yield file
        except KeyError:
            raise FileNotFoundError(name) from None
        except _DAMAGED as exc:
            raise DataError(f"archive {self.path} is damaged: {exc}") from None

    def _followed(self, name: str) -> tarfile.TarInfo:
        """What is there once no part of ``name`` is a link. Raises `KeyError`."""
        here, todo, links = "", name.split("/")[::-1], 0
        while todo:
            here = _plain(f"{here}/{todo.pop()}")
            item = self._found.get(here)
            if item is not None and (item.issym() or item.islnk()):
                links += 1
                if links > _MOST_LINKS:
                    raise KeyError(name)
                above = "" if item.islnk() or item.linkname.startswith("/") else posixpath.dirname(here)
                here, todo = above, [*todo, *item.linkname.split("/")[::-1]]
        return self._found[here]

    def close(self) -> None:
        self._open.close()


def _open(path: Path) -> int:
    """It may lie in another user's folder."""
    where = os.path.abspath(path)
    try:
        fd = links.open_followed(where, os.O_RDONLY, base=where)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise DataError(f"{path} is not a file") from None
        raise
    if stat.S_ISDIR(os.fstat(fd).st_mode):  # `os.fdopen` would leave it open
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), where)
    return fd


def _plain(name: str) -> str:
    return posixpath.normpath(f"/{name}").lstrip("/")
