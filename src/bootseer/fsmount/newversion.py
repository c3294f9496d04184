"""The next version of a file that is open for writing: who writes it, and what it gets besides its bytes; and all of
those of a mount."""

from __future__ import annotations

import stat

from bootseer.backends.interface import Backend, entry_at
from bootseer.fsmount.unfinished import Unfinished
from bootseer.kernel import fuse
from bootseer.stripefs.files import rights
from bootseer.stripefs.files.writer import StripeWriter
from bootseer.stripefs.layout import Pointer


class Versions:
    """All of them: by node, by the path at which they differ from the store, and by file handle. With the lock of the
    operations that they belong to."""

    def __init__(self) -> None:
        self._of: dict[int, Writing] = {}
        self._differing: dict[str, int] = {}
        self._opened: dict[int, int] = {}

    def __len__(self) -> int:
        """How many differ from the store."""
        return len(self._differing)

    def all(self) -> list[Writing]:
        return list(self._of.values())

    def get(self, node: int) -> Writing | None:
        """The next version of ``node``, when it is open for writing."""
        return self._of.get(node)

    def open(self, node: int, handle: int, opener: int, made: Writing | None) -> bool:
        """``handle`` is one of ``node``, which is open for writing, or is now as ``made``; False: it is not."""
        writing = self._of.get(node, made)
        if writing is None:
            return False
        self._of[node], self._opened[handle] = writing, node
        writing.openers[handle] = opener
        return True

    def opened(self, handle: int) -> tuple[int, Writing] | None:
        """The node of ``handle``, and its next version."""
        node = self._opened.get(handle)
        return (node, self._of[node]) if node is not None else None

    def close(self, handle: int) -> bool:
        """Whether it was the last one of its node, which then is to `end`, if it is not opened again."""
        openers = self._of[self._opened.pop(handle)].openers
        del openers[handle]
        return not openers

    def end(self, node: int) -> None:
        """Nobody has it open for writing any more."""
        del self._of[node]

    def differ(self, node: int, path: str) -> None:
        """It is not what the store has at ``path``."""
        self._differing[path] = node

    def agree(self, node: int, path: str) -> None:
        """It is what the store has at ``path``, or is not there any more."""
        if self._differing.get(path) == node:
            del self._differing[path]

    def at(self, path: str) -> int:
        """The node that differs from what the store has at ``path``; 0 for none."""
        return self._differing.get(path, 0)

    def gone(self, path: str) -> None:
        """Nothing is at ``path`` any more."""
        self._differing.pop(path, None)

    def names(self, folder: str) -> list[str]:
        """Those in ``folder`` that differ from the store."""
        parts = (path.rpartition("/") for path in self._differing)
        return [name for parent, _, name in parts if parent == folder]

    def differ_below(self, folder: str) -> bool:
        return any(path.startswith(f"{folder}/") for path in self._differing)

    def open_at(self, path: str, *, below: bool) -> list[Writing]:
        """What is open for writing at ``path``, or also ``below`` it."""
        found = self._of.values()
        return [one for one in found if one.file.path == path or (below and one.file.path.startswith(f"{path}/"))]


class Writing:
    """Who has a node open for writing, and what is to be set when its new version is published. ``openers``: by handle,
    the process that opened it."""

    def __init__(self, file: Unfinished) -> None:
        self.file = file
        self.openers: dict[int, int] = {}
        self.written: set[int] = set()
        """Handles through which it was changed since it was published last."""
        self.writers: set[int] = set()
        self.thread = 0
        """That wrote last."""
        self.killed = self.unlinked = False
        self.change = fuse.Change()
        """Attributes that the file gets when it is published."""

    def published(self) -> None:
        """What was to be changed is."""
        self.change = fuse.Change()
        self.written.clear()

    def finish(
        self, backend: Backend, writer: StripeWriter, pointer: Pointer | None, attr: fuse.Attr
    ) -> tuple[fuse.Attr, str]:
        """Give what ``writer`` is about to publish its attributes: those of the version before, and the changes.
        ``attr``: as the node shows them. Returns them as they are then, and its `Entry.version`."""
        change, temporary = self.change, writer.temporary
        old = entry_at(backend, writer.path) if writer.replaces else None
        if change.mtime_ns is not None:
            backend.change(temporary, mtime_ns=change.mtime_ns)
        found = backend.stat(temporary)
        mode = shown = stat.S_IMODE(attr.mode) if change.mode is None else change.mode
        if old is not None and old.permissions is not None:
            rights.keep_owner(backend, writer.path, pointer, old.permissions, found.permissions, at=temporary)
            if change.mode is None:
                mode = old.permissions.kept  # not the fewer rights that this node shows of it
        changed = None if mode == writer.mode else mode
        rights.change(backend, writer.path, pointer, at=temporary, mode=changed, uid=change.uid, gid=change.gid)
        return attr._replace(mode=stat.S_IFREG | shown, mtime_ns=int(found.mtime * 1e9)), found.version
