"""Changes of names and attributes in a writable mount of a striped store (docs/reference/mount.md); bytes are written
by `openfiles` and `unfinished`. Concurrency: ``_changing`` is taken before the lock of an `Unfinished`, and this before
``_lock``, which guards the tables and is never held during storage calls."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator

from bootseer.backends.interface import FILE_MODE, exists, is_folder, join
from bootseer.errors import NotFoundError, NotWritableError, ReplacedError
from bootseer.fsmount.newversion import Writing
from bootseer.fsmount.openfiles import OpenFiles
from bootseer.fsmount.refusals import numbered, refusal
from bootseer.kernel import fuse
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.files import rights
from bootseer.stripefs.files.namespace import new_folder
from bootseer.stripefs.files.reader import content_of, read_pointer

_log = logging.getLogger(__name__)
_LINKED = 4 << 20
"""Bytes: below it a hard link is a copy; a larger file is refused one."""


class WritableStripes(OpenFiles):
    """`OpenFiles`, and changes of names and attributes."""

    def statfs(self) -> fuse.Totals:
        with numbered(""):
            return fuse.Totals(*self._fs.backend.space())

    def setattr(self, node: int, change: fuse.Change, ctx: fuse.Context) -> fuse.Attr:
        self._refuse_others(ctx)
        path = self._path(node)
        with self._lock:
            writing = self._versions.get(node)
        if change.size is not None:
            self._protect(path)
            if change.fh is not None:
                self._opened_here(change.fh)
            if not self._truncate(node, change.size, change.fh or 0):
                self._truncate_closed(node, change.size, ctx)
        if not self._shared:
            change = change._replace(uid=None, gid=None)  # the mounting user owns all that is shown
        change = change._replace(size=None, fh=None)
        if change != fuse.Change() and not (writing is not None and self._change_unfinished(writing, change)):
            with writing.file.lock if writing is not None else contextlib.nullcontext():
                self._change_stored(node, path, change, writing)
        return self.getattr(node, ctx)

    def mkdir(self, parent: int, name: str, mode: int, ctx: fuse.Context) -> fuse.Entry:
        self._refuse_others(ctx)
        path = self._new(parent, name)
        with self._changing, numbered(path):
            self._protect(path)
            if not ctx.resent or not is_folder(self._fs.backend, path):  # a server before this one may have made it
                new_folder(self._fs.backend, path)
            if mode != 0o755:
                self._fs.backend.change(path, mode=mode & 0o777)
            self._listings = {}
            return super().lookup(parent, name, ctx)

    def unlink(self, parent: int, name: str, ctx: fuse.Context) -> None:
        self._refuse_others(ctx)
        path, whole = self._old(parent, name), name == commit.NAME
        with self._changing:
            self._protect(self._path(parent) if whole else path, removal=True)
            with self._unpublished(path) as gone, numbered(path):
                new = self._versions.at(path)
                try:
                    self._fs.remove(path, force=whole)
                    if whole:
                        _log.info("%s is removed: the checkpoint is finished no more", path)
                except NotFoundError:
                    if not new and not ctx.resent:
                        raise
                gone()

    def rmdir(self, parent: int, name: str, ctx: fuse.Context) -> None:
        self._refuse_others(ctx)
        path = self._old(parent, name)
        with self._changing, numbered(path):
            self._protect(path, removal=True)
            if ctx.resent and not exists(self._fs.backend, path):
                return
            names = [entry.name for entry in self._fs.backend.list(path)]
            if any(not commit.is_hidden(other) for other in names) or self._below(path):
                raise refusal(errno.ENOTEMPTY, path)
            try:
                if layout.FOLDER in names:
                    inner = join(path, layout.FOLDER)
                    left = [entry.name for entry in self._fs.backend.list(inner)]
                    if all(layout.CLAIM.fullmatch(other) for other in left):  # the saves of it end with the folder
                        for other in left:
                            self._fs.backend.delete(join(inner, other))
                    self._fs.backend.remove_empty_folder(inner)
                self._fs.backend.remove_empty_folder(path)
            except FileExistsError:
                _log.warning("%s has stripes that no file names, or that somebody writes; see `bootseer fs gc`", path)
                raise refusal(errno.ENOTEMPTY, path) from None
            self._listings = {}

    def rename(self, parent: int, name: str, to: int, to_name: str, ctx: fuse.Context, *, overwrite: bool) -> None:
        self._refuse_others(ctx)
        path, target = self._old(parent, name), self._new(to, to_name)
        with self._changing, numbered(path):
            self._protect(path, removal=True)
            self._protect(target)
            before = self._renamed_before(path, target, ctx)
            moves = self._path(parent) != self._path(to)
            if moves and not before and not is_folder(self._fs.backend, path):
                raise refusal(errno.EXDEV, path)  # its stripes lie in its folder: mv(1) copies it
            with self._unpublished(target) as gone, self._unpublished(path, below=True):
                if self._below(path):
                    _log.warning("%s cannot be renamed: files in it are being written", path)
                    raise refusal(errno.EBUSY, path)
                with self._lock:
                    node, taken = self._versions.at(path), self._versions.at(target)
                    writing = self._versions.get(node)
                if writing is not None:
                    self._publish(node, writing)
                if taken and not overwrite:
                    raise refusal(errno.EEXIST, target)
                try:
                    if not before:
                        self._fs.rename(path, target, overwrite=overwrite)
                except NotWritableError:
                    if not overwrite and exists(self._fs.backend, target):
                        raise refusal(errno.EEXIST, target) from None
                    if is_folder(self._fs.backend, target):
                        raise refusal(errno.ENOTEMPTY, target) from None
                    raise
                gone()
                self._moved(path, target)

    def link(self, node: int, parent: int, name: str, ctx: fuse.Context) -> fuse.Entry:
        """A copy of a small file: bytes that were published stay, so it differs from a link in its number alone. Who
        writes beside a name and may not replace a file there makes a link and removes the first name (zarr, git)."""
        self._refuse_others(ctx)
        path, target = self._path(node), self._new(parent, name)
        with self._changing, numbered(target):
            self._protect(target)
            with self._lock:
                writing, taken = self._versions.get(node), self._versions.at(target)
            if writing is not None and writing.written:  # half of it would have a name that never gets the rest
                raise refusal(errno.EBUSY, path)
            if writing is not None:
                self._publish(node, writing)
            if taken or exists(self._fs.backend, target):
                if not ctx.resent:  # else a server before this one may have made it, and died
                    raise refusal(errno.EEXIST, target)
                return self.lookup(parent, name, ctx)
            with self._fs.open(path) as file:
                if file.size >= _LINKED:
                    _log.warning("%s is not linked to %s: it is copied, and too large for that", path, target)
                    raise refusal(errno.EPERM, target)
                permissions = self._fs.backend.stat(path).permissions
                mode = permissions.kept if permissions else FILE_MODE
                try:
                    with self._fs.create(target, mode=mode, known="", exclusive=True) as out:
                        out.write(file.read(0, file.size))
                except ReplacedError:
                    raise refusal(errno.EEXIST, target) from None
            self._listings = {}
            return super().lookup(parent, name, ctx)

    def _renamed_before(self, path: str, target: str, ctx: fuse.Context) -> bool:
        """Whether a server before this one did what is asked, and died before it could say so."""
        backend = self._fs.backend
        return ctx.resent and not exists(backend, path) and exists(backend, target)

    def _old(self, parent: int, name: str) -> str:
        path = join(self._path(parent), name)
        if commit.is_hidden(name):
            raise refusal(errno.ENOENT, path)
        return path

    def _truncate_closed(self, node: int, size: int, ctx: fuse.Context) -> None:
        handle = self.open(node, os.O_WRONLY | (0 if size else os.O_TRUNC), ctx)
        try:
            self._truncate(node, size, handle)
            self.fsync(handle, ctx)
        finally:
            self.release(handle, ctx)

    def _change_unfinished(self, writing: Writing, change: fuse.Change) -> bool:
        """Keep a change of attributes until the file is published; False when it is."""
        with writing.file.lock:
            if change.mode is not None:  # also of a version to come
                writing.file.mode = change.mode
            if not (writing.file.changed or writing.unlinked):
                return False
            given = {key: value for key, value in change._asdict().items() if value is not None}
            writing.change = writing.change._replace(**given)
            return True

    def _change_stored(self, node: int, path: str, change: fuse.Change, writing: Writing | None) -> None:
        with numbered(path):
            backend, pointer = self._fs.backend, None
            ours = writing is not None and change.mtime_ns is not None and writing.file.replaces == self._content(path)
            if (change.mode, change.uid, change.gid) != (None, None, None) and self._nodes[node].content:
                pointer = read_pointer(backend, path)
            rights.change(backend, path, pointer, mode=change.mode, uid=change.uid, gid=change.gid)
            if change.mtime_ns is not None:
                backend.change(path, mtime_ns=change.mtime_ns)
            found, content = self._fs.stat(path), self._nodes[node].content
            if ours and writing is not None:
                writing.file.content = writing.file.replaces = content_of(found.version, found.uuid)
            if found.uuid and content.startswith(f"{found.uuid}-"):  # the one that was changed
                content = content_of(found.version, found.uuid)
            # that of a plain file keeps its name: when it has another by now, its next look-up makes a new node
            self._nodes.change(node, attr=self._attr(found), content=content, version="")
            self._listings = {}

    def _below(self, path: str) -> bool:
        """Whether anything in the folder ``path`` is unfinished."""
        with self._lock:
            return self._versions.differ_below(path)

    @contextlib.contextmanager
    def _unpublished(self, path: str, *, below: bool = False) -> Iterator[Callable[[], None]]:
        """Nobody else publishes at ``path`` meanwhile (nor ``below`` it), nor, after this is called, what is open
        now."""
        with self._lock:
            found = self._versions.open_at(path, below=below)

        def gone() -> None:
            for writing in found:
                writing.unlinked = True
            with self._lock:
                self._versions.gone(path)
                self._listings = {}

        with contextlib.ExitStack() as stack:
            for writing in found:
                stack.enter_context(writing.file.lock)
            yield gone

    def _moved(self, path: str, target: str) -> None:
        """Nodes at and below ``path`` are at ``target`` now."""
        for number in self._nodes.move(os.fsencode(path), os.fsencode(target)):
            if (writing := self._versions.get(number)) is not None:
                writing.file.path = self._path(number)
        self._listings = {}
