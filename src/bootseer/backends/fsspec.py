"""Storage that fsspec reaches and that can publish a file at once: ``s3://``, ``gs://``, ``az://``,
``memory://``, ``sftp://``.

What such storage lacks, and what is done instead:

- An object store cannot rename: the temporary file is read and put under its final name at once, then removed. Where it
  is gone, nothing is put: that is how a writer is fenced, but with a window between the look and the PUT.
- "Only if there is none" is asked of the PUT where the store has that (If-None-Match on S3, a generation on GCS).
  Elsewhere it is a look before, with a line in the log: two who publish a name at one moment may both succeed.
- A folder of an object store is only a common prefix: an empty one does not exist, and none can be renamed.
- `Source.version` is made of the entity tag or generation, else of inode, size and modification time; a store that
  tells none of them gets a line in the log.
- Storage whose rename does not replace (FTP, SMB, WebHDFS) can be read, not written.

A call that is late (`bootseer.backends.fsspec_place`) never touches memory of the caller: it returns bytes.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import datetime
import errno
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bootseer import faults
from bootseer.backends.fsspec_place import RENAMING, WHOLE, FsspecPlace
from bootseer.backends.interface import (
    DEADLINE,
    FILE_MODE,
    SLOWEST,
    TEMPORARY,
    Backend,
    Entry,
    Piece,
    Sink,
    Source,
    entry_at,
    exists,
    refuse_long,
)
from bootseer.backends.pool import read_each
from bootseer.errors import (
    BootseerError,
    DataError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
    logged,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_log = logging.getLogger(__name__)

SMALL = 128 << 10
"""A file up to this size is fetched when it is opened: one request, and all its bytes are of one version."""
BLOCK = 16 << 20
"""Part of a multipart upload. S3 allows 10,000 parts: 160 GB for one stripe."""
_FIND_SECONDS = 10 * DEADLINE
"""For a listing of everything below a prefix."""
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
    An entity tag stands alone in it: a listing of an S3 server and a look-up of one object round times differently."""
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


class FsspecSource(Source):
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
        """All bytes, from one request, and what the store tells of the file that had them; that is looked up again for
        a pinned one, which may be replaced meanwhile, and again."""
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

    def read(self, offset: int, length: int) -> bytes:
        if not length:
            return b""
        if self._small is not None:
            data = self._small[offset : offset + length]
        else:
            data = self._backend.fetch(self._path, offset, offset + length)
        if len(data) != length:
            raise DataError(f"{self._backend.name(self._path)} ends at {offset + len(data)}, more was expected")
        if self._pinned and self._small is None and self.version:
            now = self._backend.stat(self._path)  # after the bytes: either they are of this version, or it is seen
            if (now.size, now.version) != (self.size, self.version):
                raise self._backend.replaced(self._path)
        return data


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
        with logged(_log.warning, "an unfinished upload may be left"):
            self._backend.call(f"abandon {self._backend.name(self._path)}", self._drop)
            self._backend.delete(self._path)

    def _drop(self, fs: AbstractFileSystem) -> None:
        if not hasattr(self._file, "_upload_chunk"):
            self._file.close()
            return
        # close() would complete a multipart upload, and so would the garbage collector
        self._file.discard()
        self._file.closed = True


_CONDITIONAL = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"))
"""Protocols whose fsspec class passes ``mode="create"`` on to the store, or is the store."""
_GENERAL = ("fsspec.spec", "fsspec.asyn")
_LOOKED = "it cannot refuse to replace a file; looking before is not the same when two write one name at one moment"


def _lists_all(fs: AbstractFileSystem) -> bool:
    """Whether its ``find`` is its own: that of fsspec passes over each folder that cannot be listed."""
    kinds = [kind for kind in type(getattr(fs, "fs", fs)).__mro__ if not kind.__module__.startswith(_GENERAL)]
    return any({"find", "_find"} & vars(kind).keys() for kind in kinds)


class FsspecBackend(FsspecPlace, Backend):
    """Files below ``url``; arguments and errors of `FsspecPlace`. Touches no storage yet."""

    has_folders = False

    @property
    def exclusive(self) -> bool:
        return bool(self.protocols & _CONDITIONAL)  # where the server knows conditions

    def whole(self) -> tuple[FsspecBackend, str]:
        """The whole storage (of an object store: the bucket), and the path of this store in it; this store itself where
        that cannot be written. What may not be looked at above this store is missing there."""
        from fsspec.implementations.dirfs import DirFileSystem

        if not self.protocols & (WHOLE | RENAMING):
            return self, ""  # of some, like HTTP, the root is no folder
        fs, base = self._filesystem()
        bucket, path = "", base.strip("/")
        if self.protocols & WHOLE and not self.memory and not isinstance(fs, DirFileSystem):
            bucket, _, path = path.partition("/")
        if not path:
            return self, ""
        made = copy.copy(self)
        made._rooted, made.url = bucket, self.url.removesuffix("/").removesuffix(path)
        return made, path

    def stat(self, path: str) -> Entry:
        def ask(fs: AbstractFileSystem) -> Mapping[str, object]:
            full = self.full(path)
            fs.invalidate_cache(fs._parent(full))  # else a listing that it keeps would answer
            return cast("Mapping[str, object]", fs.info(full))

        try:
            return entry_of(path.rpartition("/")[2], self.call(f"look up {self.name(path)}", ask))
        except NotWritableError as exc:
            if self._rooted is None:
                raise
            # credentials of one prefix; S3 says this too of what is not there, to who may not list
            self.say_once("what is above the URL given may not be looked at: a COMMIT there is not seen")
            raise NotFoundError(exc.message) from None

    def is_there(self) -> bool:
        # HTTP, which is read only, answers no name of a folder
        return not self.protocols & (WHOLE | RENAMING) or super().is_there()

    def list(self, path: str) -> builtins.list[Entry]:
        def ask(fs: AbstractFileSystem) -> Sequence[Mapping[str, object]]:
            full = self.full(path)
            fs.invalidate_cache(full)
            found = cast("Sequence[Mapping[str, object]]", fs.ls(full, detail=True))
            own = [info for info in found if str(info["name"]).strip("/") == full.strip("/")]
            if len(found) == 1 and own and own[0].get("type") != "directory":
                raise NotFoundError(f"cannot list {self.name(path)}: it is a file")
            return [info for info in found if info not in own]  # the marker of an empty folder is listed in it

        found = self.call(f"list {self.name(path)}", ask)
        return sorted(entry_of(str(info["name"]).rstrip("/").rpartition("/")[2], info) for info in found)

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        def ask(fs: AbstractFileSystem) -> Mapping[str, Mapping[str, object]] | None:
            if not _lists_all(fs):
                return None
            full = self.full(path)
            fs.invalidate_cache(full)
            return cast("Mapping[str, Mapping[str, object]]", fs.find(full, detail=True))

        try:
            found = self.call(f"list {self.name(path)}", ask, _FIND_SECONDS)
        except NotFoundError:
            return
        except UnavailableError as exc:  # one call for all may be too long, and a folder alone is not
            _log.warning("%s; listing it folder by folder", exc.message)
            found = None
        if found is None:
            yield from super().walk(path)
            return
        base, own = self.full("").strip("/"), self.full(path).strip("/")
        for name, info in found.items():
            if (inside := name.strip("/")) != own:  # a file lists itself
                yield inside.removeprefix(base).strip("/"), entry_of(inside.rpartition("/")[2], info)

    def open(self, path: str, *, pinned: bool = False) -> Source:
        return FsspecSource(self, path, pinned)

    def fetch(self, path: str, start: int, end: int) -> bytes:
        """Bytes of a file; fewer when it ends before."""
        seconds = DEADLINE + (end - start) / SLOWEST
        return self.call(
            f"read {self.name(path)}",
            lambda fs: cast(bytes, fs.cat_file(self.full(path), start=start, end=end)),
            seconds,
        )

    def read_many(self, pieces: Sequence[Piece]) -> None:
        read_each(pieces)

    def create(self, path: str, *, siblings: object = None, mode: int = FILE_MODE) -> Sink:
        if not self.objects():
            self.make_folder(path.rpartition("/")[0])
            if exists(self, path):
                raise FileExistsError(errno.EEXIST, f"cannot create {self.name(path)}: it exists")
            return Stream(self, path)
        # As on other storage the name is taken, and seen, from now on: a claim of the name, and what is being written
        self.put(path, b"", overwrite=False)
        # readers share the one BytesIO of a file of memory://: it may not grow while they look
        whole = self.memory or path.rpartition("/")[2].startswith(TEMPORARY)
        return Put(self, path) if whole else Stream(self, path)

    def put(self, path: str, data: bytes | Path, *, overwrite: bool) -> None:
        if not self.objects():
            super().put(path, data, overwrite=overwrite)
            return
        if not overwrite:
            if exists(self, path):  # some servers know the protocol and ignore the condition
                raise FileExistsError(errno.EEXIST, f"cannot write {self.name(path)}: it exists")
            if not self.protocols & _CONDITIONAL:
                self.say_once(_LOOKED)
        mode = "overwrite" if overwrite else "create"
        size = len(data) if isinstance(data, bytes) else data.stat().st_size

        def send(fs: AbstractFileSystem) -> None:
            if isinstance(data, bytes):
                fs.pipe_file(self.full(path), data, mode=mode)
            else:
                fs.put_file(str(data), self.full(path), mode=mode)

        try:
            self.call(f"write {self.name(path)}", send, DEADLINE + size / SLOWEST)
        except BootseerError as exc:
            # a refusal may look like any error: S3 says which condition was not met, its likes often do not
            if overwrite or isinstance(exc, UnavailableError) or not exists(self, path):
                raise
            raise FileExistsError(errno.EEXIST, f"cannot write {self.name(path)}: it exists") from exc

    def check_new(self, path: str) -> None:
        if self.objects() and not self.memory:
            refuse_long(self.full(path).partition("/")[2], 1024, 1024)  # behind the bucket

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        found = self.stat(src)
        if self.objects():
            if found.is_dir:
                raise UnsupportedError(
                    f"cannot rename folder {self.name(src)}: an object store has no folders",
                    hint="copy it with `bootseer fs cp`, then remove it with `bootseer fs rm -r`",
                )
            faults.point("stripefs.objects.put")
            self._publish(src, dst, found.size, overwrite)
            faults.point("stripefs.objects.delete")
            self.delete(src)
            return
        there = entry_at(self, dst)
        if there is not None and (there.is_dir or not overwrite):
            raise FileExistsError(errno.EEXIST, f"cannot rename {self.name(src)} to {dst}: it exists")
        if not overwrite:
            self.say_once(_LOOKED)
        self.call(f"rename {self.name(src)} to {dst}", lambda fs: fs.mv(self.full(src), self.full(dst)))

    def _publish(self, src: str, dst: str, size: int, overwrite: bool) -> None:
        if overwrite and size > BLOCK and not self.memory:
            # the store copies by itself, and shows the copy when it is whole
            doing, seconds = f"copy {self.name(src)} to {dst}", DEADLINE + size / SLOWEST
            self.call(doing, lambda fs: fs.cp_file(self.full(src), self.full(dst)), seconds)
            return
        data = self.fetch(src, 0, size) if size else b""
        if len(data) != size:
            raise self.replaced(src)
        try:
            self.put(dst, data, overwrite=overwrite)
        except FileExistsError:
            # a client that repeats a PUT whose answer was lost is refused because of its own object
            if not size or self.fetch(dst, 0, size + 1) != data:
                raise
            _log.info("%s has these bytes already", self.name(dst))

    def delete(self, path: str) -> None:
        self.objects()  # who cannot be written is not removed from either
        with contextlib.suppress(NotFoundError):
            self.call(f"delete {self.name(path)}", lambda fs: fs.rm_file(self.full(path)))

    def make_folder(self, path: str) -> None:
        if not self.memory and self.objects():
            return  # and s3fs would make a bucket
        full = self.full(path)
        if not full.strip("/"):
            return
        try:
            self.call(f"make folder {self.name(path)}", lambda fs: fs.makedirs(full, exist_ok=True))
        except FileExistsError:
            raise NotWritableError(f"cannot make folder {self.name(path)}: a file is in the way") from None

    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        self.objects()
        doing, full = f"remove {self.name(path)}", self.full(path)

        def manifests(fs: AbstractFileSystem) -> None:
            fs.invalidate_cache(full)
            for name in fs.find(full):
                if str(name).rpartition("/")[2] in first:
                    with contextlib.suppress(FileNotFoundError):  # another removal was quicker
                        fs.rm_file(name)

        if first:
            with contextlib.suppress(NotFoundError):
                self.call(doing, manifests, 10 * DEADLINE)
        folders = self.memory or not self.objects()

        def rest(fs: AbstractFileSystem) -> None:
            if not has_magic(full):
                fs.rm(full, recursive=True)
                return
            fs.invalidate_cache(full)  # it would take every folder that matches
            found = fs.find(full, withdirs=folders, detail=True) | ({full: {"type": "directory"}} if folders else {})
            for name in sorted(found, reverse=True):
                with contextlib.suppress(FileNotFoundError):
                    fs.rmdir(name) if found[name]["type"] == "directory" else fs.rm_file(name)

        faults.point("stripefs.remove.rest")
        with contextlib.suppress(NotFoundError):
            self.call(doing, rest, 10 * DEADLINE)
