"""A striped store as a read-only file system: what the kernel asks of the FUSE server.

A node stands for one content at one path: when a file is replaced, its next lookup makes a new node, so the page cache
never mixes two versions, and reads through a file opened before either give its own bytes or fail.

Concurrency: the FUSE server calls from several threads; ``_lock`` guards the tables, never held during storage calls.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from bootseer.errors import BootseerError, NotFoundError, NotWritableError
from bootseer.kernel import fuse
from bootseer.storage.interface import join
from bootseer.stripefs.checkpoint.commit import is_hidden
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.files.reader import ChunkFile, plain_identity
from bootseer.stripefs.files.stat import FileStat
from bootseer.stripefs.store import StripeFS

_log = logging.getLogger(__name__)


@dataclass
class _Node:
    path: str
    attr: fuse.Attr
    content: str  # `ChunkFile.identity`, "" of a folder
    lookups: int = 0


def _os_error(code: int, path: str = "") -> OSError:
    return OSError(code, os.strerror(code), path)


def _os_error_of(exc: BootseerError, path: str) -> OSError:
    if isinstance(exc, NotFoundError):
        return _os_error(errno.ENOENT, path)
    if isinstance(exc, NotWritableError):
        return _os_error(errno.EACCES, path)
    _log.error("%s: %s", path, exc)
    return _os_error(errno.EIO, path)


class StripeOperations(fuse.Operations):
    """Read-only operations over ``fs``; contents come through ``ahead``.

    ``shared``: with the owners and modes of the storage, for a mount that others may use; else everything is readable.
    """

    def __init__(self, fs: StripeFS, ahead: ReadAhead, *, shared: bool = False) -> None:
        self._fs, self._ahead, self._shared = fs, ahead, shared
        self._lock = threading.Lock()
        self._nodes: dict[int, _Node] = {fuse.ROOT: _Node("", self._attr(fs.stat("")), "")}
        self._numbers: dict[tuple[str, str], int] = {}
        self._handles: dict[int, tuple[int, ChunkFile]] = {}  # file handle -> node, open file
        self._next_number, self._next_handle = itertools.count(fuse.ROOT + 1), itertools.count(1)
        self.bytes_read = 0

    def lookup(self, parent: int, name: str, ctx: fuse.Context) -> fuse.Entry:
        path = join(self._nodes[parent].path, name)
        if is_hidden(name):
            raise _os_error(errno.ENOENT, path)
        try:
            found = self._fs.stat(path)
        except BootseerError as exc:
            raise _os_error_of(exc, path) from None
        content = "" if found.is_dir else found.uuid or plain_identity(self._fs.backend, path, found.version)
        with self._lock:
            number = self._numbers.get((path, content))
            if number is None:
                number = self._numbers[path, content] = next(self._next_number)
                self._nodes[number] = _Node(path, self._attr(found), content)
            node = self._nodes[number]
            node.attr = self._attr(found)
            node.lookups += 1
        return fuse.Entry(number, node.attr)

    def forget(self, node: int, lookups: int) -> None:
        with self._lock:
            known = self._nodes.get(node)
            if known is None or node == fuse.ROOT:
                return
            known.lookups -= lookups
            if known.lookups <= 0:
                del self._nodes[node]
                if self._numbers.get((known.path, known.content)) == node:
                    del self._numbers[known.path, known.content]

    def getattr(self, node: int, ctx: fuse.Context) -> fuse.Attr:
        known = self._nodes[node]
        if self._shared and not known.content:  # the root, and the folder that a process is in, are not looked up again
            try:
                known.attr = self._attr(self._fs.stat(known.path))
            except BootseerError as exc:
                raise _os_error_of(exc, known.path) from None
        return known.attr

    def readdir(self, node: int, ctx: fuse.Context) -> Iterable[fuse.DirEntry]:
        path = self._nodes[node].path
        try:
            entries = self._fs.backend.list(path)
        except BootseerError as exc:
            raise _os_error_of(exc, path) from None
        return [
            fuse.DirEntry(entry.name, fuse.ROOT, stat.S_IFDIR if entry.is_dir else stat.S_IFREG)
            for entry in entries
            if not is_hidden(entry.name)
        ]

    def open(self, node: int, flags: int, ctx: fuse.Context) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise _os_error(errno.EROFS)
        known = self._nodes[node]
        with self._lock:
            file = next((file for other, file in self._handles.values() if other == node), None)
        try:
            file = file or self._fs.open(known.path)
        except BootseerError as exc:
            raise _os_error_of(exc, known.path) from None
        if file.size != known.attr.size or file.identity != known.content:
            file.close()
            raise _os_error(errno.ESTALE, known.path)  # the kernel looks the name up again
        with self._lock:
            handle = next(self._next_handle)
            self._handles[handle] = (node, file)
        return handle

    def size(self, fh: int) -> int | None:
        held = self._handles.get(fh)
        return held[1].size if held else None

    def read(self, fh: int, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        file = self._handles[fh][1]
        size = min(size, file.size - offset)
        if size <= 0:
            return b""
        try:
            data = self._ahead.read(file, offset, size)
        except BootseerError as exc:
            _log.error("cannot read %s at %d: %s", file.path, offset, exc)
            raise _os_error(errno.EIO, file.path) from None
        self.bytes_read += size
        return data

    def release(self, fh: int, ctx: fuse.Context) -> None:
        # left to its own end: a thread that fetches ahead may still read from it
        with self._lock:
            self._handles.pop(fh, None)

    def _attr(self, found: FileStat) -> fuse.Attr:
        uid, gid, mode = (found.permissions or (0, 0, 0)) if self._shared else (0, 0, 0o555 if found.is_dir else 0o444)
        mtime = int(found.mtime * 1e9)
        if found.is_dir:
            return fuse.Attr(stat.S_IFDIR | mode, nlink=2, mtime_ns=mtime, uid=uid, gid=gid)
        return fuse.Attr(stat.S_IFREG | mode, found.size, mtime_ns=mtime, blksize=found.unit or 4096, uid=uid, gid=gid)
