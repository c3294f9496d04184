"""The striped store over anything fsspec reaches and that can publish a file at once: ``s3://``, ``gs://``, ``az://``,
``memory://``, ``sftp://``.

What such storage lacks, and what is done instead:

- An object store cannot rename. Its PUT of one object is atomic, so the temporary file (a pointer, a small file, a
  COMMIT) is read and put under its final name at once, then removed. Where the temporary file is gone, nothing is put:
  that is how a writer is fenced, but here with a window between the look and the PUT.
- "Only if there is none" is asked of the PUT where the store has that (If-None-Match on S3, a generation on GCS).
  Elsewhere it is a look before, with a line in the log: two who publish a name at one moment may both succeed.
- A folder of an object store is only a common prefix: an empty one does not exist, and none can be renamed.
- Not every store tells a file from one that replaced it. `Source.version` is made of the entity tag or generation,
  else of inode, size and modification time; a store that tells none of them gets a line in the log.
- Storage whose rename does not replace (FTP, SMB, WebHDFS) can be read, not written.

Concurrency: any thread may call anything. Calls run in worker threads of `bootseer.hdfs.deadline`, so that one that
never returns holds up nobody; one that is late never touches memory of the caller (it returns bytes, they are copied).
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from bootseer import faults
from bootseer.errors import (
    BootseerError,
    ConfigError,
    DataError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.hdfs.deadline import Workers
from bootseer.store.fsspec import WHOLE, shown, translated
from bootseer.stripefs import layout
from bootseer.stripefs.storage.interface import DEADLINE, Backend, Entry, Piece, Sink, exists
from bootseer.stripefs.storage.pool import read_each

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from bootseer.hdfs.placement import Placement

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


T = TypeVar("T")

_CONDITIONAL = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"))
"""Protocols whose fsspec class passes ``mode="create"`` on to the store, or is the store."""
_RENAMING = frozenset(("file", "local", "sftp", "ssh"))
"""Protocols of file systems whose fsspec ``mv`` is one rename that replaces: rename(2), posix-rename of OpenSSH."""
_LOOKED = "it cannot refuse to replace a file; looking before is not the same when two write one name at one moment"
_NO_LOGIN = frozenset(("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"))
_LOGIN = "give them as for any fsspec store, such as FSSPEC_S3_KEY and FSSPEC_S3_SECRET, or as the provider's tools do"
_REACH = "check that the store is reachable from here"

_workers = Workers("fsspec")
_opened: dict[tuple[int, str], tuple[AbstractFileSystem, str]] = {}
"""By process and place: a client of S3 takes a third of a second of CPU to make."""


class FsspecBackend(Backend):
    """Files below ``url``. ``options``: what its fsspec class takes (credentials, ``endpoint_url``).

    With ``protocol`` the file system is that of ``protocol`` and ``options``, and ``url`` is a path in it: what fsspec
    makes of ``a::b://``. Raises `UnsupportedError` when the package for that protocol is not installed. Touches no
    storage yet.
    """

    def __init__(self, url: str, options: Mapping[str, object] | None = None, *, protocol: str = "") -> None:
        import fsspec

        self._location, self._options, self._chained = url, dict(options or {}), protocol
        self.url = shown(f"{protocol}://{url}" if protocol else url)
        self._protocol = protocol or url.partition("://")[0].partition("::")[0]
        self._rooted: str | None = None  # the base, when it is not that of the URL
        self._token = fsspec.utils.tokenize(url, protocol, self._options)
        self._names: frozenset[str] = frozenset()
        self._said: set[str] = set()
        try:
            fsspec.get_filesystem_class(self._protocol)
        except (ImportError, ValueError) as exc:
            raise UnsupportedError(
                f"no striped store over {self._protocol}://: {exc}", hint="for s3:// install bootseer[s3]"
            ) from None

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        """The file system and the base in it: one for all backends of that place, but not the one that users of fsspec
        get, because theirs would hold our files back while it has a transaction open.

        Made afresh in a forked child, where the event loop and the connections of its parent's are not.
        """
        import fsspec

        key = os.getpid(), self._token
        if key not in _opened:
            options = {**self._options, "skip_instance_cache": True}
            if self._chained:
                fs = fsspec.filesystem(self._chained, **options)
                base = fs._strip_protocol(self._location) if self._location else ""
            else:
                fs, base = fsspec.core.url_to_fs(self._location, **options)
            _opened.setdefault(key, (fs, base.rstrip("/")))  # another thread may have been faster
        fs, base = _opened[key]
        return fs, base if self._rooted is None else self._rooted

    def whole(self) -> tuple[FsspecBackend, str]:
        """The whole storage (of an object store: the bucket), and the path of this store in it.

        What may not be looked at above this store is missing there. This store itself where that cannot be written.
        """
        from fsspec.implementations.dirfs import DirFileSystem

        if not self._protocols() & (WHOLE | _RENAMING):
            return self, ""  # of some, like HTTP, the root is no folder
        fs, base = self._filesystem()
        bucket, path = "", base.strip("/")
        if self._protocols() & WHOLE and not self._memory and not isinstance(fs, DirFileSystem):
            bucket, _, path = path.partition("/")
        if not path:
            return self, ""
        made = copy.copy(self)
        made._rooted, made.url = bucket, self.url.removesuffix("/").removesuffix(path)
        return made, path

    def call(self, doing: str, function: Callable[[AbstractFileSystem], T], seconds: float = DEADLINE) -> T:
        """``function(file system)`` under a deadline, with its errors translated, but FileExistsError as it is.

        ``doing`` is a phrase for messages.
        """

        def run() -> T:
            with translated(doing):
                try:
                    return function(self._filesystem()[0])
                except FileExistsError as exc:
                    raise _ExistsError(doing) from exc
                except (NotADirectoryError, IsADirectoryError) as exc:
                    raise NotFoundError(f"cannot {doing}: {exc.strerror or 'a file or folder is in the way'}") from None
                except TimeoutError:
                    raise UnavailableError(f"cannot {doing}: it timed out", hint=_REACH) from None
                except FileNotFoundError as exc:
                    # HTTP's is one of these for whatever went wrong
                    if isinstance(why := exc.__cause__, OSError) and not isinstance(why, FileNotFoundError):
                        raise UnavailableError(f"cannot {doing}: {type(why).__name__}", hint=_REACH) from None
                    raise
                except Exception as exc:
                    if type(exc).__name__ in _NO_LOGIN:
                        raise ConfigError(f"cannot {doing}: no credentials were found", hint=_LOGIN) from None
                    raise

        try:
            return _workers.call(run, seconds)
        except _ExistsError:
            raise FileExistsError(errno.EEXIST, f"cannot {doing}: it exists") from None
        except TimeoutError:
            raise UnavailableError(f"cannot {doing}: no answer within {seconds:.0f} s", hint=_REACH) from None

    def name(self, path: str) -> str:
        """``path`` for messages."""
        base = self.url if self.url.endswith("://") else f"{self.url.rstrip('/')}/"
        return base + path if path else self.url

    def full(self, path: str) -> str:
        """``path`` in the file system below."""
        fs, base = self._filesystem()
        if not base:
            return f"{fs.root_marker}{path}"
        return f"{base}/{path}" if path else base

    def replaced(self, path: str) -> DataError:
        return DataError(f"{self.name(path)} was replaced while it was read", hint="open it again")

    def say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("store %s: %s", self.url, what)

    def _protocols(self) -> frozenset[str]:
        """Names of the file system that stores, under any ``dir::``."""
        if not self._names:
            from fsspec.implementations.dirfs import DirFileSystem

            fs = self.call(f"open store {self.url}", lambda fs: fs)
            while isinstance(fs, DirFileSystem):
                fs = fs.fs
            self._names = frozenset((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
        return self._names

    def _objects(self) -> bool:
        """Whether a PUT publishes; else a rename does. `UnsupportedError` when neither does."""
        if self._protocols() & WHOLE:
            return True
        if self._protocols() & _RENAMING:
            return False
        raise UnsupportedError(
            f"cannot write to store {self.url}: {self._protocol}:// cannot publish a file at once",
            hint="use a folder, HDFS or an object store",
        )

    @property
    def _memory(self) -> bool:
        return "memory" in self._protocols()

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

    def list(self, path: str) -> list[Entry]:
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

    def open(self, path: str, *, pinned: bool = False) -> Source:
        return Source(self, path, pinned)

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

    def create(self, path: str, *, placement: Placement | None = None) -> Sink:
        if not self._objects():
            self.make_folder(path.rpartition("/")[0])
            if exists(self, path):
                raise FileExistsError(errno.EEXIST, f"cannot create {self.name(path)}: it exists")
            return Stream(self, path)
        # As on other storage the name is taken, and seen, from now on: a claim of the name, and what is being written
        self.put(path, b"", overwrite=False)
        # readers share the one BytesIO of a file of memory://: it may not grow while they look
        whole = self._memory or path.rpartition("/")[2].startswith(layout.TEMPORARY)
        return Put(self, path) if whole else Stream(self, path)

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        """The whole of a file at once. `FileExistsError` when it exists and ``overwrite`` is false."""
        if not overwrite:
            if exists(self, path):  # some servers know the protocol and ignore the condition
                raise FileExistsError(errno.EEXIST, f"cannot write {self.name(path)}: it exists")
            if not self._protocols() & _CONDITIONAL:
                self.say_once(_LOOKED)
        mode = "overwrite" if overwrite else "create"
        seconds = DEADLINE + len(data) / SLOWEST
        try:
            self.call(f"write {self.name(path)}", lambda fs: fs.pipe_file(self.full(path), data, mode=mode), seconds)
        except BootseerError as exc:
            # a refusal may look like any error: S3 says which condition was not met, its likes often do not
            if overwrite or isinstance(exc, UnavailableError) or not exists(self, path):
                raise
            raise FileExistsError(errno.EEXIST, f"cannot write {self.name(path)}: it exists") from exc

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        found = self.stat(src)
        if self._objects():
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
        try:
            there: Entry | None = self.stat(dst)
        except NotFoundError:
            there = None
        if there is not None and (there.is_dir or not overwrite):
            raise FileExistsError(errno.EEXIST, f"cannot rename {self.name(src)} to {dst}: it exists")
        if not overwrite:
            self.say_once(_LOOKED)
        self.call(f"rename {self.name(src)} to {dst}", lambda fs: fs.mv(self.full(src), self.full(dst)))

    def _publish(self, src: str, dst: str, size: int, overwrite: bool) -> None:
        if overwrite and size > BLOCK and not self._memory:
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
        self._objects()  # who cannot be written is not removed from either
        with contextlib.suppress(NotFoundError):
            self.call(f"delete {self.name(path)}", lambda fs: fs.rm_file(self.full(path)))

    def make_folder(self, path: str) -> None:
        if not self._memory and self._objects():
            return  # and s3fs would make a bucket
        full = self.full(path)
        if not full.strip("/"):
            return
        try:
            self.call(f"make folder {self.name(path)}", lambda fs: fs.makedirs(full, exist_ok=True))
        except FileExistsError:
            raise NotWritableError(f"cannot make folder {self.name(path)}: a file is in the way") from None

    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        self._objects()
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
        faults.point("stripefs.remove.rest")
        with contextlib.suppress(NotFoundError):
            self.call(doing, lambda fs: fs.rm(full, recursive=True), 10 * DEADLINE)


class _ExistsError(BootseerError):
    """Carries a FileExistsError past the translation of errors."""
