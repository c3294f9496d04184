"""A striped store as a read-only file system: what the kernel asks of the FUSE server.

A node stands for one content at one path: when a file is replaced, its next lookup makes a new node, so the page cache
never mixes two versions, and reads through a file opened before either give its own bytes or fail. A node that nobody
has open stands for the new content when it is opened, as the kernel forgets what it had of it.

A file handle that an earlier server of the mount gave out is opened again at its first read, by the path of its node;
when another content is there now, that read fails.

Concurrency: the FUSE server calls from several threads; ``_lock`` guards the tables, never held during storage calls.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bootseer.backends.interface import Entry, join
from bootseer.backends.pool import parallel
from bootseer.errors import BootseerError
from bootseer.fsmount.memory import Journal, Known
from bootseer.fsmount.nodes import GENERATION_SHIFT, Nodes
from bootseer.fsmount.refusals import numbered, refusal
from bootseer.kernel import fuse
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint.access import AccessLog, FileAccess, Ranges
from bootseer.stripefs.checkpoint.commit import is_hidden
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.files.reader import NOWHERE, ChunkFile, content_of
from bootseer.stripefs.files.stat import FileStat, of_entry
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.store import StripeFS
from bootseer.stripefs.waiting import Waited

_log = logging.getLogger(__name__)

FRESH = 1.0
"""Seconds for which names, missing names and, on a mount that others may use, attributes are believed."""
_LISTED, _LISTINGS = 30.0, 4
"""Most seconds for which a listing is believed while a folder is read in parts, and how many are kept."""
_TRIES = 5
"""How often a file that is replaced all the time is opened."""
_COMPARE_SECONDS = 1.0
"""For which an open waits until a file of the node cache is compared with its checksums; then the file is served."""


class _Listing(NamedTuple):
    """``entries`` of a folder by name, when it was listed, and whether there are ``striped`` files among them: without
    a folder of stripes no file is a pointer."""

    at: float
    entries: dict[str, Entry]
    striped: bool

    @property
    def lasts(self) -> float:
        """Seconds for which its entries are told to who reads the folder in parts."""
        return min(_LISTED, len(self.entries) * 1e-4)


class StripeOperations(fuse.Operations):
    """Read-only operations over ``fs``; contents come through ``ahead``.

    ``cache``: where files that are open are kept on the node's disk. ``shared``: with the owners and modes of the
    storage, for a mount that others may use; else everything is readable. ``expected``: what a start before read; it is
    noted of files that the kernel reads by itself, all of a file that is not in it."""

    def __init__(
        self,
        fs: StripeFS,
        ahead: ReadAhead,
        *,
        cache: NodeCache | None = None,
        shared: bool = False,
        expected: Iterable[FileAccess] = (),
        journal: Journal | None = None,
        generation: int = 0,
    ) -> None:
        """``journal``: of the nodes; ``generation``: how many servers the mount had before this one."""
        self._fs, self._ahead, self._cache, self._shared = fs, ahead, cache, shared
        self._lock = threading.Lock()
        known = journal.read() if journal else []
        root = None if known else Known(fuse.ROOT, b"", "", "", self._attr(fs.stat("")))
        self._nodes = Nodes(root, known=known, journal=journal, generation=generation)
        self._handles: dict[int, tuple[int, ChunkFile | None]] = {}
        """By file handle: node, and open file; None where that is to be opened at the next read."""
        self._first = generation << GENERATION_SHIFT
        self._next_handle = itertools.count((generation << GENERATION_SHIFT) + 1)
        self._listings: dict[str, _Listing] = {}  # `ls -l` asks for attributes in parts
        self.bytes_read = self.bytes_written = 0
        self.accessed = AccessLog()
        self._expected = {file.path: file.ranges for file in expected}
        self.waited = Waited()

    @property
    def unfinished(self) -> int:
        """How many files are being written."""
        return 0

    def expect(self, read: Iterable[tuple[str, Ranges]]) -> None:
        """A start before read these ranges of files."""
        self._expected |= dict(read)

    def lookup(self, parent: int, name: str, ctx: fuse.Context) -> fuse.Entry:
        path = join(self._path(parent), name)
        if is_hidden(name):
            raise refusal(errno.ENOENT, path)
        with numbered(path):
            return self._look(path, self._fs.backend.stat(path))

    def lookups(self, parent: int, names: Sequence[str], ctx: fuse.Context) -> Sequence[fuse.Entry | None]:
        folder = self._path(parent)
        try:
            listing = self._list(folder, FRESH / 2)
        except BootseerError:
            return [None] * len(names)
        entries, plain = listing.entries, not listing.striped

        def look(name: str) -> fuse.Entry | None:
            try:
                return self._look(join(folder, name), entries[name], plain=plain) if name in entries else None
            except (BootseerError, OSError):
                return None  # who asks for it meets the error

        # side by side where a small file is read, to see whether it is a pointer
        return [look(name) for name in names] if plain else parallel(look, names)

    def _look(self, path: str, entry: Entry, *, plain: bool = False) -> fuse.Entry:
        """A reference to the node of what the storage tells of ``path``, which is no pointer where it is ``plain``; a
        pointer that is known is not read again."""
        raw = os.fsencode(path)
        if (known := self._nodes.find(raw, entry.version)) is not None:
            content, attr = known.content, self._attr_of(entry, known.attr.size, known.attr.blksize)
        else:
            found = of_entry(self._fs.backend, path, entry, plain=plain)
            content = "" if found.is_dir else content_of(found.version, found.uuid)
            attr = self._attr(found)
        return fuse.Entry(self._nodes.enter(raw, content, "" if entry.is_dir else entry.version, attr), attr)

    def forget(self, node: int, lookups: int) -> None:
        self._nodes.forget(node, lookups)

    def getattr(self, node: int, ctx: fuse.Context) -> fuse.Attr:
        known = self._nodes[node]
        if self._shared and not known.content:  # the root, and the folder that a process is in, are not looked up again
            path = self._path(node)
            with numbered(path):
                known = self._nodes.change(node, attr=self._attr(self._fs.stat(path)))
        return known.attr

    def readdir(self, node: int, ctx: fuse.Context) -> Iterable[fuse.DirEntry]:
        path = self._path(node)
        with numbered(path):
            entries = self._list(path, 0)
        return [
            fuse.DirEntry(entry.name, fuse.ROOT, stat.S_IFDIR if entry.is_dir else stat.S_IFREG)
            for entry in entries.entries.values()
        ]

    def _list(self, path: str, age: float) -> _Listing:
        """That of a folder, as it was at most ``age`` seconds ago, or a tenth of a millisecond for each entry: so much
        longer is it read in parts. Errors as of `Backend.list`."""
        listing, now = self._listings.get(path), time.monotonic()
        if listing is None or not age or now - listing.at >= max(age, listing.lasts):
            found = self._fs.backend.list(path)
            entries = {entry.name: entry for entry in found if not is_hidden(entry.name)}
            striped = any(entry.name == layout.FOLDER for entry in found)
            listing = _Listing(time.monotonic(), entries, striped)
            with self._lock:
                kept = {
                    folder: other
                    for folder, other in list(self._listings.items())[-_LISTINGS:]
                    if now - other.at < max(FRESH, other.lasts)
                }
                self._listings = {**kept, path: listing}
        return listing

    def open(self, node: int, flags: int, ctx: fuse.Context) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise refusal(errno.EROFS)
        with self._lock:
            handle = next(self._next_handle)
        self._hold(handle, node, self._open_now(node, handle))
        return handle

    def _hold(self, handle: int, node: int, file: ChunkFile) -> ChunkFile:
        """Have ``handle`` stand for ``file``, read by way of the node cache; or for what it does already."""
        with self._lock:
            held = self._handles.get(handle, (node, None))[1] or file
            self._handles[handle] = node, held
        if self._cache is not None and held.local is NOWHERE:
            held.attach(self._cache.open(held, join(self._fs.url, self._path(node))) or NOWHERE)
        return held

    def backing(self, fh: int) -> int | None:
        _, file = self._handles.get(fh, (0, None))
        return file.local.fd_of_all(_COMPARE_SECONDS) if file is not None else None

    def backed(self, node: int, backing: int) -> None:
        if node not in self._nodes:
            return
        known = self._nodes.change(node, backing=backing)
        if backing:
            path, size = os.fsdecode(known.path), known.attr.size
            before = self._expected.get(path)
            for first, last in before if before and before[-1][1] <= size else ((0, size),):
                self.accessed.add(path, size, first, last - first)

    def backings(self) -> Mapping[int, int]:
        return self._nodes.backings()

    def _open(self, node: int) -> ChunkFile:
        """The file of ``node``. ESTALE when another content is at its path."""
        with self._lock:
            file = self._file_of(node)
        if file is not None:
            return file
        known, path = self._nodes[node], self._path(node)
        with numbered(path):
            file = self._fs.open(path)
        if file.size != known.attr.size or file.content != known.content:
            file.close()
            self._nodes.change(node, version="")
            raise refusal(errno.ESTALE, path)  # the kernel looks the name up again
        return file

    def _open_now(self, node: int, handle: int, *, newest: bool = False) -> ChunkFile:
        """The file at the path of ``node``, of which ``handle`` is one from now on: what others have open, unless the
        ``newest`` is wanted. When that has another content than the node, the node stands for it, if nobody has the
        node open. ESTALE when somebody has: the kernel looks the name up again, but not more than once."""
        path = self._path(node)
        for _ in range(_TRIES):
            with self._lock:
                shared, known = None if newest else self._file_of(node), self._nodes[node]
            with numbered(path):
                file, attr = shared or self._fs.open(path), None
                if file.content != known.content:
                    found = self._fs.stat(path)
                    attr = self._attr(found) if content_of(found.version, found.uuid) == file.content else None
            with self._lock:
                if attr is not None and self._nodes[node] == known and self._is_idle(node):
                    self.invalidate(node)
                    self._nodes.change(node, content=file.content, version=found.version, attr=attr)
                if self._nodes[node].content == file.content:
                    self._handles[handle] = node, file
                    return file
            if shared is None:
                file.close()
        self._nodes.change(node, version="")
        raise refusal(errno.ESTALE, path)

    def _file_of(self, node: int) -> ChunkFile | None:
        """What who has the node open reads. With the lock."""
        return next((file for other, file in self._handles.values() if other == node and file), None)

    def _is_idle(self, node: int) -> bool:
        """Whether nobody has it open, since before this server, too. With the lock."""
        return node > self._first and all(other != node for other, _ in self._handles.values())

    def _reopen(self, fh: int, node: int) -> ChunkFile:
        """The file of a handle that an earlier server gave out, or whose node has another content since."""
        try:
            file = self._open(node)
        except OSError as exc:
            _log.error("%s: what was open cannot be opened again: %s", self._path(node), exc)
            raise refusal(errno.EIO, self._path(node)) from None
        return self._hold(fh, node, file)

    def _path(self, node: int) -> str:
        return os.fsdecode(self._nodes[node].path)

    def size(self, fh: int) -> int | None:
        held = self._handles.get(fh)
        return held[1].size if held and held[1] else None

    def read(self, fh: int, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        held = self._handles.get(fh)
        file = (held[1] if held else None) or self._reopen(fh, ctx.node)
        size = min(size, file.size - offset)
        if size <= 0:
            return b""
        try:
            with self.waited:
                data = self._ahead.read(file, offset, size)
        except BootseerError as exc:
            _log.error("cannot read %s at %d: %s", file.path, offset, exc)
            raise refusal(errno.EIO, file.path) from None
        self.bytes_read += size
        self.accessed.add(file.path, file.size, offset, size)
        return data

    def release(self, fh: int, ctx: fuse.Context) -> None:
        with self._lock:  # so that who opens it meanwhile finds it with the cache, or without and attaches it
            _, file = self._handles.pop(fh, (0, None))
            if file is not None and not any(file is other for _, other in self._handles.values()):
                # the rest is left to its own end: a thread that fetches ahead may still read from it
                file.attach(NOWHERE)

    def _attr(self, found: FileStat) -> fuse.Attr:
        told = Entry("", found.size, found.is_dir, found.mtime, permissions=found.permissions)
        return self._attr_of(told, found.size, found.unit or 4096)

    def _attr_of(self, entry: Entry, size: int, unit: int) -> fuse.Attr:
        uid, gid, mode = (0, 0, 0o555 if entry.is_dir else 0o444)
        if self._shared:
            uid, gid, mode = entry.permissions[:3] if entry.permissions else (0, 0, 0)
        mtime = int(entry.mtime * 1e9)
        if entry.is_dir:
            return fuse.Attr(stat.S_IFDIR | mode, nlink=2, mtime_ns=mtime, uid=uid, gid=gid)
        return fuse.Attr(stat.S_IFREG | mode, size, mtime_ns=mtime, blksize=unit, uid=uid, gid=gid)
