"""The next version of a file that is open for writing: who writes it, and what it gets besides its bytes."""

from __future__ import annotations

import contextlib
import logging
import stat

from bootseer.backends.interface import Backend, Entry
from bootseer.errors import NotFoundError
from bootseer.fsmount.unfinished import Unfinished
from bootseer.kernel import fuse
from bootseer.stripefs.files import rights
from bootseer.stripefs.files.writer import StripeWriter
from bootseer.stripefs.layout import Pointer

_log = logging.getLogger(__name__)


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
        change, temporary, old = self.change, writer.temporary, _stored(backend, writer)
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


def _stored(backend: Backend, writer: StripeWriter) -> Entry | None:
    """What is at the path of ``writer`` in the store."""
    with contextlib.suppress(NotFoundError):
        return backend.stat(writer.path) if writer.replaces else None
    return None
