"""Files that are open for writing through a mount (docs/reference/mount.md): from their opening to their publication.

A file that is being written (`Unfinished`) appears in the store when the process that opened it closes it, when it is
synced or renamed, or when its last descriptor is closed; not when its writer dies of a signal. Until then it is seen
through this mount only, under its node. Its node becomes that of the published content, whose pages the kernel has.

Concurrency: ``_lock`` of `StripeOperations` guards the tables here as well, and is never held during storage calls;
each `Unfinished` has a lock of its own."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from bootseer.backends.interface import Entry, entry_at, exists, join
from bootseer.errors import ConfigError, ReplacedError
from bootseer.fsmount.callers import caller
from bootseer.fsmount.memory import Journal
from bootseer.fsmount.newversion import Versions, Writing
from bootseer.fsmount.operations import FRESH, StripeOperations
from bootseer.fsmount.refusals import numbered, refusal
from bootseer.fsmount.spool import Spools
from bootseer.fsmount.unfinished import Unfinished
from bootseer.kernel import fuse
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.files.reader import ChunkFile, content_of
from bootseer.stripefs.files.stat import of_entry
from bootseer.stripefs.files.writer import StripeWriter
from bootseer.stripefs.layout import Pointer
from bootseer.stripefs.store import StripeFS

_log = logging.getLogger(__name__)
_NOT_STORED = "not stored"
"""The content of a node that the store does not have (any more)."""


class OpenFiles(StripeOperations, fuse.WritableOperations):
    """`StripeOperations` with files that are written, by this user only, also where it is ``shared``."""

    def __init__(
        self,
        fs: StripeFS,
        ahead: ReadAhead,
        spools: Spools,
        *,
        shared: bool = False,
        journal: Journal | None = None,
        generation: int = 0,
        width: int = layout.WIDTH,
        unit: int = layout.UNIT,
    ) -> None:
        self._user, self._group = os.geteuid(), os.getegid()
        super().__init__(fs, ahead, shared=shared, journal=journal, generation=generation)
        self._spools, self._shape = spools, (width, unit)
        self._versions = Versions()
        self._free: dict[str, float] = {}
        """Folders that are in no finished checkpoint, and until when that is believed of those above them."""
        self._changing = threading.RLock()  # one change of names at a time

    @property
    def unfinished(self) -> int:
        return len(self._versions)

    def lookup(self, parent: int, name: str, ctx: fuse.Context) -> fuse.Entry:
        if name != name.encode(errors="ignore").decode():  # not UTF-8: the store has no such names
            raise refusal(errno.ENOENT)
        return self._look_up_unfinished(join(self._path(parent), name)) or super().lookup(parent, name, ctx)

    def lookups(self, parent: int, names: Sequence[str], ctx: fuse.Context) -> Sequence[fuse.Entry | None]:
        folder = self._path(parent)
        mine = {name: entry for name in names if (entry := self._look_up_unfinished(join(folder, name)))}
        others = [name for name in names if name not in mine]
        found = dict(zip(others, super().lookups(parent, others, ctx), strict=True)) if others else {}
        return [mine.get(name) or found[name] for name in names]

    def _look_up_unfinished(self, path: str) -> fuse.Entry | None:
        with self._lock:
            if not (number := self._versions.at(path)):
                return None
            self._nodes.refer(number)
            return fuse.Entry(number, self._attr_now(number))

    def getattr(self, node: int, ctx: fuse.Context) -> fuse.Attr:
        with self._lock:
            writing = self._versions.get(node)
            if writing is not None and (writing.file.changed or writing.unlinked):
                return self._attr_now(node)
        return super().getattr(node, ctx)

    def readdir(self, node: int, ctx: fuse.Context) -> Iterable[fuse.DirEntry]:
        path = self._path(node)
        found = {entry.name: entry for entry in super().readdir(node, ctx)}
        with self._lock:
            new = self._versions.names(path)
        for name in new:
            found[name] = fuse.DirEntry(name, fuse.ROOT, stat.S_IFREG)
        # COMMIT first: what removes a whole folder unlinks in this order, and a COMMIT goes before what it names
        return sorted(found.values(), key=lambda entry: entry.name != commit.NAME)

    def _attr_of(self, entry: Entry, size: int, unit: int) -> fuse.Attr:
        attr = super()._attr_of(entry, size, unit)
        if self._shared:
            return attr
        told = entry.permissions.kept if entry.permissions else 0o755 if entry.is_dir else 0o644
        mode = stat.S_IFMT(attr.mode) | told | (0o700 if entry.is_dir else 0o600)
        return attr._replace(mode=mode, uid=self._user, gid=self._group)

    def _attr_now(self, node: int) -> fuse.Attr:
        """Attributes of a node that differs from the store. With the lock."""
        attr, writing = self._nodes[node].attr, self._versions.get(node)
        assert writing is not None
        change = writing.change
        mode = attr.mode if change.mode is None else stat.S_IFREG | change.mode
        mtime = attr.mtime_ns if change.mtime_ns is None else change.mtime_ns
        return attr._replace(size=writing.file.size, mode=mode, mtime_ns=mtime)

    def open(self, node: int, flags: int, ctx: fuse.Context) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            with self._lock:
                writing = self._versions.get(node)
                if writing is not None and writing.file.changed:
                    handle = next(self._next_handle)
                    self._handles[handle] = node, None
                    return handle
            return super().open(node, flags, ctx)
        opener = self._opener(ctx)
        path = self._path(node)
        self._protect_soon(path)
        found: int | None = None
        made: Writing | None = None
        while found is None:
            with self._lock:
                holds = next(self._next_handle)  # the node stays what it is
            try:
                if self._versions.get(node) is None:
                    base = None if flags & os.O_TRUNC else self._open_now(node, holds, newest=True)
                    made = self._begin(path, base, "" if base else self._content(path))
                    made.file.mode = stat.S_IMODE(self._nodes[node].attr.mode)
                found = self.hand_out(node, opener, made)  # None: what was open is closed by now
            finally:
                super().release(holds, ctx)
        if flags & os.O_TRUNC:
            try:
                self._truncate(node, 0, found)
            except BaseException:
                if made is not None:
                    made.file.failed = True
                self.release(found, ctx)
                raise
        return found

    def create(self, parent: int, name: str, flags: int, mode: int, ctx: fuse.Context) -> tuple[fuse.Entry, int]:
        opener = self._opener(ctx)
        path = self._new(parent, name)
        with self._changing:
            self._protect_soon(path)
            try:
                entry = self.lookup(parent, name, ctx)
            except OSError as exc:
                if exc.errno != errno.ENOENT:
                    raise
            else:  # another mount made it, or this one since the kernel asked
                if flags & os.O_EXCL or not stat.S_ISREG(entry.attr.mode):
                    self.forget(entry.node, 1)
                    raise refusal(errno.EEXIST, path)
                return entry, self.open(entry.node, flags, ctx)
            writing = self._begin(path)
            writing.change, writing.file.mode = fuse.Change(mode=mode), mode
            writing.file.exclusive = bool(flags & os.O_EXCL)
            attr = fuse.Attr(
                stat.S_IFREG | mode, mtime_ns=time.time_ns(), blksize=self._shape[1], uid=self._user, gid=self._group
            )
            node = self._nodes.make(os.fsencode(path), _NOT_STORED, attr)
            handle = self.hand_out(node, opener, writing)
            assert handle is not None
            with self._lock:
                self._versions.differ(node, path)
                if flags & os.O_EXCL:  # an empty one is published at the close, too, which can fail
                    writing.written.add(handle)
            return fuse.Entry(node, attr), handle

    def _is_idle(self, node: int) -> bool:
        return self._versions.get(node) is None and super()._is_idle(node)

    def size(self, fh: int) -> int | None:
        writing = self._written_at(fh)
        return writing.file.size if writing is not None else super().size(fh)

    def read(self, fh: int, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        writing = self._written_at(fh)
        if writing is not None:
            with numbered(writing.file.path):
                data = writing.file.read(self._ahead, offset, size)
            self.bytes_read += size
            return data
        return super().read(fh, offset, size, ctx)

    def write(self, fh: int, offset: int, data: memoryview, ctx: fuse.Context) -> None:
        node, writing = self._opened_here(fh)
        if ctx.pid != writing.thread and ctx.pid:
            writing.writers.add(caller(ctx.pid).process)
            writing.thread = ctx.pid
        with self._changes(node, writing, fh if ctx.pid else 0):
            writing.file.write(offset, data)
        self.bytes_written += len(data)

    def flush(self, fh: int, ctx: fuse.Context) -> None:
        node, writing = self._opened_here(fh)
        process, killed = caller(ctx.pid)
        if killed:
            writing.killed = writing.killed or process in writing.writers or process == writing.openers[fh]
        elif fh in writing.written and process == writing.openers[fh]:
            writing.killed = False
            self._publish(node, writing)

    def fsync(self, fh: int, ctx: fuse.Context) -> None:
        self._publish(*self._opened_here(fh), again=True)

    def release(self, fh: int, ctx: fuse.Context) -> None:
        with self._lock:
            found = self._versions.opened(fh)
            last = found is not None and self._versions.close(fh)
        if found is None:
            super().release(fh, ctx)
            return
        if not last:
            return
        node, writing = found
        with writing.file.lock:  # who opens it now waits before anything changes
            with self._lock:
                if writing.openers:  # opened again meanwhile
                    return
            path = writing.file.path
            if writing.file.changed and not writing.unlinked:
                if writing.killed:
                    _log.warning("%s is not published: its writer was killed", path)
                elif not writing.file.failed:
                    try:
                        self._publish(node, writing)
                    except OSError as exc:
                        _log.error("%s is not published: %s", path, exc.strerror)
            with self._lock:
                if writing.openers:
                    return
                self._versions.end(node)
                if writing.file.changed:
                    self._versions.agree(node, path)
                    self._set_content(node, _NOT_STORED)
            writing.file.discard()

    def close(self) -> None:
        """After the end of the mount: give up what nobody closed."""
        for writing in self._versions.all():
            if writing.file.changed and not writing.unlinked:
                _log.warning("%s is not published: the mount ended before it was closed", writing.file.path)
            writing.file.discard()

    def _refuse_others(self, ctx: fuse.Context) -> None:
        """The store is written to as this user, so no other may have it written to. Root of this node may."""
        if ctx.uid not in (self._user, 0):
            raise refusal(errno.EACCES)

    def _opener(self, ctx: fuse.Context) -> int:
        self._refuse_others(ctx)
        if not (found := caller(ctx.pid).process):
            _log.warning("a process that cannot be seen from here may not write: its end could not be told")
            raise refusal(errno.EPERM)
        return found

    def _new(self, parent: int, name: str) -> str:
        path = join(self._path(parent), name)
        if commit.is_hidden(name) or name == commit.NAME:
            what = "`bootseer fs commit` makes a COMMIT" if name == commit.NAME else "that name is the store's own"
            _log.warning("%s is not made: %s", path, what)
            raise refusal(errno.EPERM, path)
        try:
            layout.clean_new(path)
        except ConfigError:
            raise refusal(errno.EILSEQ, path) from None
        with numbered(path):
            self._fs.backend.check_new(path)
        return path

    def _protect(self, path: str, *, removal: bool = False) -> None:
        """Refuse to change a checkpoint that is finished."""
        try:
            with numbered(path):
                if removal:
                    commit.refuse_removal(self._fs.backend, path)
                else:
                    self._fs.refuse_committed(path)
        except PermissionError:  # which numbered has logged
            raise refusal(errno.EPERM, path) from None

    def _protect_soon(self, path: str) -> None:
        """`_protect`, which `_publish` does once more; of the folders above that of ``path`` as a moment ago."""
        folder, now = path.rpartition("/")[0], time.monotonic()
        with numbered(path):
            if now < self._free.get(folder, 0.0) and not exists(self._fs.backend, join(folder, commit.NAME)):
                return
        self._protect(path)
        self._free = {other: until for other, until in self._free.items() if now < until} | {folder: now + FRESH}

    def _begin(self, path: str, base: ChunkFile | None = None, replaces: str = "") -> Writing:
        width, unit = self._shape
        return Writing(Unfinished(self._fs, path, self._spools, width=width, unit=unit, base=base, replaces=replaces))

    def _content(self, path: str) -> str:
        """`content_of` what the store has at ``path``, "" for nothing."""
        with numbered(path):
            if (entry := entry_at(self._fs.backend, path)) is None:
                return ""
            if (known := self._nodes.find(os.fsencode(path), entry.version)) is not None:
                return known.content
            found = of_entry(self._fs.backend, path, entry)
            return content_of(found.version, found.uuid)

    def hand_out(self, node: int, opener: int, made: Writing | None) -> int | None:
        """A handle of a node that is open for writing, or is now as ``made``; None: it is not."""
        with self._lock:
            handle = next(self._next_handle)
            return handle if self._versions.open(node, handle, opener, made) else None

    def _opened_here(self, fh: int) -> tuple[int, Writing]:
        """The node of a handle for writing. EIO for one of a server before this one: what was written is lost."""
        with self._lock:
            if (found := self._versions.opened(fh)) is None:
                raise refusal(errno.EIO)
            return found

    def _written_at(self, fh: int) -> Writing | None:
        """What a handle reads from, when that is not in the store."""
        with self._lock:
            if found := self._versions.opened(fh):
                return found[1]
            writing = self._versions.get(self._handles.get(fh, (0, None))[0])
            return writing if writing is not None and writing.file.changed else None

    def _set_content(self, node: int, content: str, **changes: object) -> None:
        """A node stands for another content from now on. With the lock."""
        if node not in self._nodes:
            return
        self._nodes.change(node, content=content, version="", **changes)
        self._listings = {}
        self._handles |= {handle: (node, None) for handle, held in self._handles.items() if held[0] == node}

    def _differs(self, node: int, path: str) -> None:
        """A node is no more what the store has at ``path``: a server after this one must not take it for the stored
        content, as the kernel has other pages of it. With the lock."""
        self._versions.differ(node, path)
        self._set_content(node, _NOT_STORED)

    def _truncate(self, node: int, size: int, fh: int = 0) -> bool:
        """Through a handle, or by name; False when the node is not open for writing."""
        with self._lock:
            writing = self._versions.get(node)
        if writing is None:
            return False
        with self._changes(node, writing, fh):
            if self._versions.get(node) is not writing:
                return False
            writing.file.truncate(size)
        return True

    @contextlib.contextmanager
    def _changes(self, node: int, writing: Writing, fh: int) -> Iterator[None]:
        """The file may change meanwhile; ``fh``: through which handle, 0 when that is not known."""
        with writing.file.lock, numbered(writing.file.path):
            writing.file.written = False
            try:
                yield
            finally:
                if writing.file.written:
                    writing.written.update((fh,) if fh else writing.openers)
                self._note_changed(node, writing)

    def _note_changed(self, node: int, writing: Writing) -> None:
        if self._versions.at(writing.file.path) != node:
            with self._lock:
                if writing.file.changed and not writing.unlinked:
                    self._differs(node, writing.file.path)

    def _publish(self, node: int, writing: Writing, *, again: bool = False) -> None:
        """Let what was written appear in the store. Does nothing for what is there, or has no name any more. After it
        has failed, only a write or ``again`` makes it be tried again: who was told so must not find it published."""
        file = writing.file
        with file.lock, numbered(file.path):
            if not file.changed or writing.unlinked:
                return
            if file.failed and not again:
                raise refusal(errno.EIO, file.path)
            file.failed = True  # until it is done
            self._protect(file.path)
            attr, content = self._nodes[node].attr, ""

            def finish(writer: StripeWriter, pointer: Pointer | None) -> str:
                nonlocal attr, content
                backend = self._fs.backend
                attr, version = writing.finish(backend, writer, pointer, attr)
                content = content_of(version, pointer.uuid if pointer else "")
                return content

            try:
                size = file.publish(finish).size
            except ReplacedError as exc:
                _log.warning("%s is not published: %s", file.path, exc)
                raise refusal(errno.ESTALE if file.replaces else errno.EEXIST, file.path) from None
            with self._lock:
                self._set_content(node, content, attr=attr._replace(size=size))
                writing.published()
                self._versions.agree(node, file.path)
