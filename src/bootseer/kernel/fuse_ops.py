"""What a FUSE file system of ours answers: `Operations`, and the small records it answers with; what is asked of the
kernel for its mount (`Options`), and what it granted (`Negotiated`).

Nodes are integers the operations choose (1 is the root); names are `str` with surrogate escapes for bytes that are not
UTF-8. Every operation may be called from several threads at once."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from bootseer.errors import DataError
from bootseer.wiretypes import json_as

ROOT = 1


class Later:
    """See `LATER`."""


LATER = Later()
"""Result of a read that is answered with `Server.answer` when its bytes are there; its worker is free meanwhile."""

ReadResult = bytes | bytearray | memoryview | tuple[int, int] | Later
"""Bytes, or ``(fd, offset)``: where in a local file they are (the server reads them from there), or `LATER`."""


class Attr(NamedTuple):
    """Attributes of a node."""

    mode: int
    """Type and permission bits, such as ``stat.S_IFREG | 0o444``."""
    size: int = 0
    nlink: int = 1
    mtime_ns: int = 0
    blksize: int = 4096
    uid: int = 0
    gid: int = 0


class Entry(NamedTuple):
    """A node and its attributes: the answer to a lookup."""

    node: int
    attr: Attr


class DirEntry(NamedTuple):
    """One name in a directory; of ``mode`` only the type counts."""

    name: str
    node: int
    mode: int


class Change(NamedTuple):
    """What a setattr asks for; None for what is to stay. Times in nanoseconds, ``mode`` without the type."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    mtime_ns: int | None = None
    fh: int | None = None
    """The open file through which it was asked."""


class Totals(NamedTuple):
    """What a file system has room for, in bytes; 0 for what is not counted."""

    size: int = 0
    free: int = 0


class Context:
    """Who asks. ``pid`` is the asking thread's id in the server's pid namespace, 0 when it is not visible there."""

    __slots__ = ("fh", "gid", "interrupted", "node", "offset", "on_interrupt", "pid", "size", "uid", "unique")

    def __init__(self, unique: int, node: int, pid: int, uid: int = 0, gid: int = 0) -> None:
        self.unique, self.node, self.pid, self.uid, self.gid = unique, node, pid, uid, gid
        self.fh = self.offset = self.size = 0
        """Of a read: what was asked for."""
        self.interrupted = False
        """The asking process got a signal. Raise ``InterruptedError`` then, or it cannot be killed until the answer."""
        self.on_interrupt: Callable[[], None] | None = None
        """Called in another worker at the interrupt, such as the ``set`` of an event that the operation waits for."""

    @property
    def resent(self) -> bool:
        """A server before this one took the request and died."""
        return bool(self.unique >> 63)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the kernel treats the mount. Sizes in bytes, times in seconds. Pages survive the close of a file."""

    name: str = "bootseer"
    """Shown in the mount table, as ``fuse.<name>``."""
    max_readahead: int = 128 << 10
    """Readahead of buffered reads. More than 128 KiB is set through sysfs after the mount, which needs root."""
    entry_timeout: float = 3600.0
    """How long the kernel believes a name."""
    negative_timeout: float = 0.0
    """How long the kernel believes that there is no such name."""
    attr_timeout: float = 3600.0
    """How long the kernel believes attributes."""
    allow_other: bool = False
    """Other users may use it; without root this needs ``user_allow_other`` in /etc/fuse.conf."""
    passthrough: bool = False
    """Files for which the operations have a `Operations.backing` are read by the kernel; nothing may be mounted from
    them then (the mount has a stacking depth)."""
    direct_io: bool = False
    """Reads bypass the page cache. Not for a file under EROFS, which needs its pages."""
    writable: bool = False
    """It is mounted for writing too; its operations are `WritableOperations`."""
    request_timeout: int = 0
    """Seconds, 15 to 65,535, after which the kernel ends the mount because a request has no answer (a quarter of a
    minute later at most); 0: never. Kernels before Linux 6.15 never do."""


class Negotiated(msgspec.Struct, frozen=True, array_like=True):
    """What the kernel granted in INIT."""

    kernel_minor: int
    flags: frozenset[str]

    def encode(self) -> bytes:
        """For the process that may have to serve the mount after this one."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def decode(cls, data: bytes) -> Negotiated:
        """Raises `DataError` for anything but what `encode` gave."""
        try:
            return json_as(data, cls)
        except ValueError as exc:
            raise DataError("the note of what FUSE negotiated is not understood") from exc


class Operations:
    """A read-only file system; subclasses override what they have. An `OSError` is answered with its errno, any other
    exception with EIO and a log line."""

    invalidate: Callable[[int], None] = staticmethod(lambda node: None)
    """Has the kernel forget attributes and pages of a node which nobody has open; set by who serves this."""

    def lookup(self, parent: int, name: str, ctx: Context) -> Entry:
        """The node called ``name`` in directory ``parent``. Raises `FileNotFoundError`."""
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def lookups(self, parent: int, names: Sequence[str], ctx: Context) -> Sequence[Entry | None]:
        """`lookup` of each of ``names``, which are of a listing; None where that fails. Each entry is one reference."""
        found: list[Entry | None] = []
        for name in names:
            try:
                found.append(self.lookup(parent, name, ctx))
            except OSError:
                found.append(None)
        return found

    def getattr(self, node: int, ctx: Context) -> Attr:
        raise NotImplementedError

    def readdir(self, node: int, ctx: Context) -> Iterable[DirEntry]:
        """The whole directory without ``.`` and ``..``; asked for once per opened directory (and per rewind)."""
        raise NotImplementedError

    def open(self, node: int, flags: int, ctx: Context) -> int:
        """Open for reading: a file handle number of the operations' choice."""
        raise NotImplementedError

    def size(self, fh: int) -> int | None:
        """Size of an open file, when it is known. Then a read that returns fewer bytes than the file has there is
        answered with EIO: to the kernel a short read is the end of the file, and it would fill the rest with zeros."""
        return None

    def read(self, fh: int, offset: int, size: int, ctx: Context) -> ReadResult:
        """Exactly ``size`` bytes at ``offset``, fewer only at the end of the file."""
        raise NotImplementedError

    def backing(self, fh: int) -> int | None:
        """Descriptor of a local file with all bytes of the open file ``fh``, from which the kernel may read it by
        itself until `release`; None where there is none. Opens wait for the answer."""
        return None

    def backed(self, node: int, backing: int) -> None:
        """The kernel reads ``node`` by itself from now on, as its backing file number ``backing``; 0: not any more."""

    def backings(self) -> Mapping[int, int]:
        """What servers before this one said with `backed`, where it is not over."""
        return {}

    def release(self, fh: int, ctx: Context) -> None:
        """The last user of ``fh`` closed it; its error goes nowhere."""

    def statfs(self) -> Totals:
        """How large the file system is."""
        return Totals()

    def forget(self, node: int, lookups: int) -> None:
        """The kernel dropped ``lookups`` references (each lookup is one)."""


class WritableOperations(Operations):
    """A file system that is written to, too. The kernel checks owners and modes before it asks, and sends one write at
    a time of one file, except for direct I/O. Names in ``parent`` are without slashes."""

    def create(self, parent: int, name: str, flags: int, mode: int, ctx: Context) -> tuple[Entry, int]:
        """Make a file and open it: its node and a handle. It may exist, unless ``flags`` has ``O_EXCL``."""
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name)

    def write(self, fh: int, offset: int, data: memoryview, ctx: Context) -> None:
        """Take all of ``data``, which is the caller's memory again after the return."""
        raise NotImplementedError

    def flush(self, fh: int, ctx: Context) -> None:
        """A descriptor of ``fh`` is being closed: the error is that of close(2). Others may still be open."""

    def fsync(self, fh: int, ctx: Context) -> None:
        """Make what was written durable."""

    def setattr(self, node: int, change: Change, ctx: Context) -> Attr:
        """Change attributes; returns all of them as they are now."""
        raise NotImplementedError

    def mkdir(self, parent: int, name: str, mode: int, ctx: Context) -> Entry:
        raise NotImplementedError

    def unlink(self, parent: int, name: str, ctx: Context) -> None:
        raise NotImplementedError

    def rmdir(self, parent: int, name: str, ctx: Context) -> None:
        raise NotImplementedError

    def rename(self, parent: int, name: str, to: int, to_name: str, ctx: Context, *, overwrite: bool) -> None:
        """Move ``name`` to the folder ``to`` as ``to_name``, in one step."""
        raise NotImplementedError

    def link(self, node: int, parent: int, name: str, ctx: Context) -> Entry:
        """Give a file the name ``name`` in the folder ``parent``, too; `FileExistsError` when something has it."""
        raise NotImplementedError


class SingleFile(Operations):
    """A file system of one file, ``/<name>`` of ``size`` bytes, whose reads go to ``read(offset, size, ctx)``."""

    def __init__(self, name: str, size: int, read: Callable[[int, int, Context], ReadResult]) -> None:
        self._name, self._read = name, read
        self._attr = Attr(stat.S_IFREG | 0o444, size)

    def lookup(self, parent: int, name: str, ctx: Context) -> Entry:
        if parent != ROOT or name != self._name:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return Entry(2, self._attr)

    def getattr(self, node: int, ctx: Context) -> Attr:
        return self._attr if node == 2 else Attr(stat.S_IFDIR | 0o555, nlink=2)

    def readdir(self, node: int, ctx: Context) -> Iterable[DirEntry]:
        return [DirEntry(self._name, 2, self._attr.mode)]

    def open(self, node: int, flags: int, ctx: Context) -> int:
        return 1

    def size(self, fh: int) -> int:
        return self._attr.size

    def read(self, fh: int, offset: int, size: int, ctx: Context) -> ReadResult:
        return self._read(offset, size, ctx)
