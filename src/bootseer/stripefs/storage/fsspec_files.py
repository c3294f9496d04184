"""Files of any fsspec store as sources and sinks of the striped store (`bootseer.stripefs.storage.fsspec_backend`)."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, DataError, NotFoundError, UnsupportedError
from bootseer.stripefs.storage.backend import DEADLINE, Entry

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from bootseer.stripefs.storage.fsspec_backend import FsspecBackend

_log = logging.getLogger(__name__)

SMALL = 128 << 10
"""A file up to this size is fetched when it is opened: one request, and all its bytes are of one version."""
BLOCK = 16 << 20
"""Part of a multipart upload. S3 allows 10,000 parts: 160 GB for one stripe."""
SLOWEST = 1 << 20
"""Bytes per second below which an upload counts as hanging."""
_TRIES = 5
_TAGS = ("ETag", "etag", "generation", "md5", "content_md5", "checksum")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def _seconds(value: object) -> float:
    """A time as the many stores say it, in seconds; 0 for none."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return datetime.datetime.fromisoformat(value).timestamp()
        return 0.0
    if isinstance(value, datetime.datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else 0.0


def entry_of(name: str, info: Mapping[str, object]) -> Entry:
    """What the store tells of one file or folder. The version is "" where that does not tell one content from another.

    An entity tag stands alone in it: a listing of an S3 server and a look-up of one object round times differently.
    """
    mtime = next((found for key in _TIMES if (found := _seconds(info.get(key)))), 0.0)
    if info.get("type") == "directory":
        return Entry(name, 0, True, mtime)
    size = info.get("size")
    if not isinstance(size, int):
        raise UnsupportedError(f"cannot read {name}: its store does not tell sizes")
    tag = next((str(info[key]).strip('"') for key in _TAGS if info.get(key)), "")
    inode = info.get("ino", "")
    unsure = f"{inode}-{size}-{mtime!r}" if mtime or inode else ""
    return Entry(name, size, False, mtime, f"{tag}-{size}" if tag else unsure)


class Source:
    """One file, asked for again with each read; a small one is read once, when it is opened."""

    def __init__(self, backend: FsspecBackend, path: str, pinned: bool) -> None:
        self._backend, self._path, self._pinned = backend, path, pinned
        self._small: bytes | None = None
        found = backend.stat(path)
        if found.is_dir:
            raise NotFoundError(f"cannot open {backend.name(path)}: it is a folder")
        if found.size <= SMALL:
            found, self._small = self._fetch_small(found)
        if pinned and not found.version:
            backend.say_once("it tells neither times nor tags: a plain file replaced while it is read goes unnoticed")
        self.size, self.version = found.size, found.version if pinned else ""

    def _fetch_small(self, found: Entry) -> tuple[Entry, bytes]:
        """All bytes, from one request, and what the store tells of the file that had them.

        That is looked up again for a pinned one. It may be replaced meanwhile, and again.
        """
        for _ in range(_TRIES):
            data = self._backend.fetch(self._path, 0, SMALL + 1) if found.size else b""
            if not self._pinned and len(data) <= SMALL:
                return found._replace(size=len(data)), data
            now = self._backend.stat(self._path)
            if now == found and len(data) == now.size:
                return found, data
            found = now
            if found.size > SMALL:
                break
        raise self._backend.replaced(self._path)

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        length = sum(map(len, parts))
        if not length:
            return
        if self._small is not None:
            data = memoryview(self._small)[offset : offset + length]
        else:
            data = memoryview(self._backend.fetch(self._path, offset, offset + length))
        if len(data) != length:
            raise DataError(f"{self._backend.name(self._path)} ends at {offset + len(data)}, more was expected")
        if self._pinned and self._small is None and self.version:
            now = self._backend.stat(self._path)  # after the bytes: either they are of this version, or it is seen
            if (now.size, now.version) != (self.size, self.version):
                raise self._backend.replaced(self._path)
        position = 0
        for part in parts:
            part[:] = data[position : position + len(part)]
            position += len(part)

    def close(self) -> None:
        """Nothing is held open between reads."""


class Put:
    """A file that is put at once when it is closed."""

    def __init__(self, backend: FsspecBackend, path: str) -> None:
        self._backend, self._path, self._data = backend, path, bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def close(self) -> None:
        self._backend.put(self._path, bytes(self._data), overwrite=True)

    def abandon(self) -> None:
        with contextlib.suppress(BootseerError):
            self._backend.delete(self._path)


class Stream:
    """A file that is uploaded in parts while it is written, and seen when it is closed."""

    def __init__(self, backend: FsspecBackend, path: str) -> None:
        self._backend, self._path = backend, path
        self._file = backend.call(
            f"create {backend.name(path)}", lambda fs: fs.open(backend.full(path), "wb", block_size=BLOCK)
        )

    def write(self, data: bytes | memoryview) -> None:
        whole = data if isinstance(data, bytes) else bytes(data)
        self._do("write", lambda: self._file.write(whole), len(whole))

    def close(self) -> None:
        self._do("finish", self._file.close, 0)

    def _do(self, verb: str, function: Callable[[], object], length: int) -> None:
        # one write may send all that was held back
        allowed = DEADLINE + (BLOCK + length) / SLOWEST
        self._backend.call(f"{verb} {self._backend.name(self._path)}", lambda fs: function(), allowed)

    def abandon(self) -> None:
        try:
            self._backend.call(f"abandon {self._backend.name(self._path)}", self._drop)
            self._backend.delete(self._path)
        except (BootseerError, OSError) as exc:
            _log.warning("an unfinished upload may be left: %s", exc)

    def _drop(self, fs: AbstractFileSystem) -> None:
        if not hasattr(self._file, "_upload_chunk"):
            self._file.close()
            return
        # close() would complete a multipart upload, and so would the garbage collector
        self._file.discard()
        self._file.closed = True
