"""What stores, of objects and of striped files, need of the storage below them.

Paths are relative to the URL's base, with ``/`` between parts and none at the ends; ``""`` is the base itself. Every
method may be called from any thread. Errors: those of `bootseer.errors`; `FileExistsError` from `rename`, `create` and
`remove_empty_folder`.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypedDict, Unpack

from bootseer import faults
from bootseer.closing import Closing
from bootseer.errors import BootseerError, ConfigError, DataError, NameTooLongError, NotFoundError, UnsupportedError

TEMPORARY = ".tmp-"
"""How names begin of what is not published yet."""
FILE_MODE = 0o644
"""Mode of a new file."""
_READ = 2 << 20
"""Bytes that `Source.pieces` reads at once."""
PIECE = 4 << 20
"""One write call: long enough to keep a pipeline busy, short enough for the deadline of one call."""
DEADLINE = 20.0
"""Seconds one read or write of at most a few MiB may take."""
SLOWEST = 512 << 10
"""Bytes per second below which a longer transfer counts as hanging."""


class Permissions(NamedTuple):
    """Whose a file is, in numbers of this node, and who may do what with it: the nine bits of chmod(1), and the sticky
    one of a folder in which only owners may rename and remove. ``stored``: the mode that a new version is to get, where
    this node shows less. ``owner``: names of owner and group in the storage."""

    uid: int
    gid: int
    mode: int
    stored: int | None = None
    owner: tuple[str, str] | None = None

    @property
    def kept(self) -> int:
        return self.mode if self.stored is None else self.stored


class Entry(NamedTuple):
    """One name: last part of its path, size in bytes (0 for a folder), modification time in seconds.

    ``version`` is that of `Source`; ``permissions`` are None where they are not told.
    """

    name: str
    size: int
    is_dir: bool
    mtime: float
    version: str = ""
    permissions: Permissions | None = None


class Source(Closing):
    """An open file; ``size`` is its length when it was opened. Safe from several threads.

    ``version`` tells a file from one that replaced it under its name: inode number where the storage has one, size and
    modification time, in a folder also the owner (inode numbers come back, and times can be chosen); "" when it was
    opened without ``pinned`` and would cost a request. ``unfinished``: a writer still had the file open, where the
    storage tells; its ``size`` is then what could be read at that time. Errors: `DataError` when the file is shorter,
    `UnavailableError` when the storage does not answer.

    A class has `read`, `readinto` or both: each is made of the other here.
    """

    size: int
    version: str = ""
    unfinished: bool = False

    def read(self, offset: int, length: int) -> bytes:
        """The ``length`` bytes from ``offset``. `DataError` when the file ends before."""
        data = bytearray(length)
        self.readinto(offset, [memoryview(data)])
        return bytes(data)

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Fill ``parts``, in order, with the bytes from ``offset``. `DataError` when the file ends before."""
        data, position = memoryview(self.read(offset, sum(map(len, parts)))), 0
        for part in parts:
            part[:] = data[position : position + len(part)]
            position += len(part)

    def pieces(self, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
        """What follows ``offset`` in pieces of these lengths, each as soon as it is there. Raises as `read` does,
        perhaps after some of them. Here: by reads of about 2 MiB; a store that can stream does so in one request."""
        first = 0
        while first < len(lengths):
            last, size = first + 1, lengths[first]
            while last < len(lengths) and size + lengths[last] <= _READ:
                size += lengths[last]
                last += 1
            data, at = self.read(offset, size), 0
            for length in lengths[first:last]:
                yield data[at : at + length]
                at += length
            offset, first = offset + size, last

    def original(self, offset: int, length: int) -> bytes | None:
        """As `read`, but past any mirror, for who got damaged bytes; None where that would ask the same again."""
        return None

    def close(self) -> None:
        """Here nothing is held open between reads."""


class Piece(NamedTuple):
    """A part of a request: ``parts``, in order, want the bytes of ``source`` from ``offset``. ``check`` (part number,
    bytes) raises `DataError` when these are not the bytes of that part; it may get other memory than that of the
    caller, from any thread. ``reopen``: a fresh ``source``, for a second try. ``name``: of the file, for messages."""

    source: Source
    offset: int
    parts: Sequence[memoryview]
    check: Callable[[int, memoryview], None] | None = None
    reopen: Callable[[], Source] | None = None
    name: str = ""


class Page(NamedTuple):
    """Entries of a folder that were listed at one moment, and for each the file, opened then without ``pinned``; None
    where that would cost a request. ``now``: what is listed there now."""

    entries: Sequence[tuple[Entry, Source | None]]
    now: Callable[[], Sequence[Entry]]


class Sink(Protocol):
    """A new file being written, by one thread."""

    def write(self, data: bytes | memoryview) -> int | None:
        """Take all of ``data``."""

    def close(self) -> None:
        """Finish: after it the bytes survive what the storage promises to survive."""

    def abandon(self) -> None:
        """Remove the unfinished file as far as that is possible; never raises."""


class Writers:
    """Who has files of a backend open for writing; here, of storage that knows no writers: nobody."""

    def has_open(self, path: str) -> bool:
        """Whether a live writer has the file open. On HDFS, asking closes the file of a writer that is dead."""
        return False

    def may_have_open(self, path: str) -> str:
        """Why a writer may have the file open, "" when none has. Asks without changing anything."""
        return ""

    def end(self, path: str) -> None:
        """Take the file away from a writer that has it open."""


class Attributes(TypedDict, total=False):
    """What `Backend.change` changes; None: stays."""

    mode: int | None
    uid: int | None
    gid: int | None
    owner: tuple[str, str] | None
    mtime_ns: int | None


class Backend(abc.ABC):
    """A folder of a file system, local or not. What not all storage can is told apart: `Writers`; the other methods
    that are not abstract do here what such storage does."""

    url: str
    writers: Writers = Writers()
    has_folders = True
    """Whether folders are more than a part of names, and can be renamed."""

    @property
    def exclusive(self) -> bool:
        """Whether of writers that put one new name at one moment, without ``overwrite``, only one succeeds."""
        return True

    @abc.abstractmethod
    def stat(self, path: str) -> Entry: ...

    def is_there(self) -> bool:
        """Whether this is a folder by now; of an object store, whether anything is in it."""
        return is_folder(self, "")

    @abc.abstractmethod
    def list(self, path: str) -> builtins.list[Entry]:
        """The entries of a folder in name order."""

    def pages(self, path: str) -> Iterator[Page]:
        """The entries of a folder in name order, for who is going to read many of its files."""
        yield Page([(entry, None) for entry in self.list(path)], lambda: self.list(path))

    @abc.abstractmethod
    def open(self, path: str, *, pinned: bool = False) -> Source:
        """With ``pinned`` every byte comes from the version that ``Source.version`` names, else `DataError`."""

    @abc.abstractmethod
    def read_many(self, pieces: Sequence[Piece]) -> None:
        """Fill the parts of all ``pieces``, in parallel, and check them; their sources are this backend's.

        Raises the first error; then the parts hold rubbish. Nothing writes into them after the return. A part that is
        wrong or cannot be had is tried again (elsewhere, where there is another copy) first; `backends.pool.read_each`
        does that."""

    @abc.abstractmethod
    def create(self, path: str, *, siblings: object = None, mode: int = FILE_MODE) -> Sink:
        """A new file with ``mode`` where the storage keeps modes; missing folders above it are made. ``siblings``: of
        `siblings`, which files that are written together share."""

    def siblings(self) -> object:
        """One for all files written together, which then begin on different servers, where there are several."""
        return None

    def put(self, path: str, data: bytes | Path, *, overwrite: bool) -> None:
        """Publish a file at once: ``data``, or the content of that local file. `FileExistsError`, and nothing has
        changed, when it exists and ``overwrite`` is false, or a folder is in the way. Here it is written under a
        temporary name beside ``path`` and renamed."""
        if not overwrite and exists(self, path):
            raise FileExistsError(errno.EEXIST, "it exists", path)
        tmp = join(path.rpartition("/")[0], f"{TEMPORARY}{os.urandom(16).hex()}")
        sink = self.create(tmp)
        try:
            size = _write(sink, data)
            faults.point("store.put.before-sync")
            sink.close()
            faults.point("store.put.before-publish")
            if (found := self.stat(tmp).size) != size:
                raise DataError(f"{tmp} has {found} bytes after writing {size}")
            self.rename(tmp, path, overwrite=overwrite)
        except BaseException:
            sink.abandon()
            with contextlib.suppress(BootseerError):  # the failure that brought us here counts, not this one
                self.delete(tmp)
            raise

    @abc.abstractmethod
    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        """Atomic, of a file, and of a folder where ``overwrite`` is false (`UnsupportedError` on object stores)."""

    def check_new(self, path: str) -> None:  # noqa: B027 - not all storage has bounds
        """Raise `ConfigError` for a path that no file or folder of this storage has (`NameTooLongError`: too long), so
        that a writer learns it at its beginning."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; no error when it is gone already."""

    @abc.abstractmethod
    def make_folder(self, path: str) -> None:
        """A folder and those above it; no error when it is there. Object stores have none: there it does nothing."""

    def check_removable(self, path: str) -> None:  # noqa: B027 - in most storage nothing is mounted
        """Raise `NotWritableError` for a folder in which something is mounted: no part of it is to be removed."""

    @abc.abstractmethod
    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        """Remove a folder with all that is in it; no error when it is gone already. Files of the names ``first`` go
        before all others, at any depth, where that is not one step."""

    def remove_empty_folder(self, path: str) -> None:
        """Remove a folder in which nothing is, not even hidden; `FileExistsError` when something is."""
        raise UnsupportedError(f"folders of {self.url} cannot be removed by themselves")

    def change(self, path: str, **to: Unpack[Attributes]) -> None:  # noqa: B027 - not all storage keeps them
        """Change the attributes of a file or folder that are given, as far as the storage tells them; the rest is
        ignored. ``owner``: as of `Permissions`. `NotWritableError` where it refuses, or knows no user or group of that
        number."""

    def replicate(self, path: str, copies: int) -> None:  # noqa: B027 - most storage counts no copies
        """Have at least ``copies`` copies of the file, where the storage keeps several and lets one choose."""

    def space(self) -> tuple[int, int]:
        """Bytes that the storage has in all, and that are free; zeros where it does not tell."""
        return 0, 0

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        """Path and entry of every file below the folder ``path``, in any order; nothing when there is none."""
        left = [path]
        while left:
            here = left.pop()
            try:
                entries = self.list(here)
            except NotFoundError:
                continue
            for entry in entries:
                below = join(here, entry.name)
                if not entry.is_dir:
                    yield below, entry
                elif not self.is_link(below):
                    left.append(below)

    def is_link(self, path: str) -> bool:
        """Whether ``path`` is a link, which `walk` does not follow."""
        return False

    def whole(self) -> tuple[Backend, str]:
        """The whole storage, and the path of this folder in it; this folder and "" when that is not known."""
        return self, ""


def _write(sink: Sink, data: bytes | Path) -> int:
    if isinstance(data, bytes):
        sink.write(data)
        return len(data)
    size = 0
    with open(data, "rb") as src:
        while piece := src.read(PIECE):
            sink.write(piece)
            size += len(piece)
    return size


def read_all(backend: Backend, path: str, *, limit: int) -> bytes:
    """The whole of a small file, at most ``limit`` bytes of it."""
    source = backend.open(path)
    try:
        data = bytearray(min(source.size, limit))
        if data:
            source.readinto(0, [memoryview(data)])
        return bytes(data)
    finally:
        source.close()


def write_file(backend: Backend, path: str, content: bytes) -> None:
    """Create a small file. After an error nothing of it is left, as far as that is possible."""
    sink = backend.create(path)
    try:
        sink.write(content)
        sink.close()
    except BaseException:
        sink.abandon()
        raise


def entry_at(backend: Backend, path: str) -> Entry | None:
    """What is at ``path``; None for nothing."""
    try:
        return backend.stat(path)
    except NotFoundError:
        return None


def exists(backend: Backend, path: str) -> bool:
    return entry_at(backend, path) is not None


def is_folder(backend: Backend, path: str) -> bool:
    return (found := entry_at(backend, path)) is not None and found.is_dir


def content_at(backend: Backend, path: str, *, limit: int) -> bytes | None:
    """`read_all` of the file at ``path``; None for nothing."""
    try:
        return read_all(backend, path, limit=limit)
    except NotFoundError:
        return None


def holds(backend: Backend, path: str, content: bytes) -> bool:
    """Whether the file at ``path`` is there and has exactly this content."""
    return content_at(backend, path, limit=len(content) + 1) == content


def join(*parts: str) -> str:
    """Path parts joined; empty ones leave no trace."""
    return "/".join(part for part in parts if part)


def refuse_long(path: str, part: int, whole: int) -> None:
    """`NameTooLongError` when a part of ``path``, or all of it, has more bytes than that."""
    for what, size, most in (
        ("name", max(len(os.fsencode(each)) for each in path.split("/")), part),
        ("path", len(os.fsencode(path)), whole),
    ):
        if size > most:
            raise NameTooLongError(f"the {what} of {path[-64:]!r} has {size} bytes, and the storage takes {most}")


def clean(path: str) -> str:
    """``path`` without slashes at its ends; `ConfigError` for ``..``, empty parts and NUL."""
    path = path.strip("/")
    if path and any(part in ("", ".", "..") or "\0" in part for part in path.split("/")):
        raise ConfigError(f"bad path {path!r} in a store")
    return path
