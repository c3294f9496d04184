"""The publication of a file: a temporary file is renamed to its path, and what was there before goes.

Order matters: whoever ends a writer from outside (a garbage collection, a later save of the checkpoint) first moves the
stripes or claims the folder, then takes the temporary file away. So each check comes after the temporary file is whole,
and one that passed is void when the rename finds no source.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

from bootseer import faults
from bootseer.backends.interface import DEADLINE, Backend, Permissions, Sink, holds, join, read_all
from bootseer.errors import BootseerError, DataError, FullError, NotFoundError, NotWritableError, UnavailableError
from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.files.removal import UNFINISHED, owned_by, remove_stripes
from bootseer.stripefs.layout import Pointer

_log = logging.getLogger(__name__)
T = TypeVar("T")

OUTAGE = 3 * DEADLINE
"""Seconds for which publishing is tried again while the storage does not answer."""
UNKNOWN = 30 * DEADLINE
"""The same of the rename that publishes: when its answer is lost it may have happened, or may happen when a storage
that stood still goes on. Whoever is told of an error must not find the file published."""


def patiently(step: Callable[[], T], seconds: float = 0.0) -> T:
    """``step()``, tried again for so many ``seconds`` (0: `OUTAGE`) while the storage does not answer: NameNodes
    restart."""
    until, pause = time.monotonic() + (seconds or OUTAGE), 0.2
    while True:
        try:
            return step()
        except UnavailableError as exc:
            if time.monotonic() >= until:
                raise
            _log.warning("publishing goes on when the storage answers: %s", exc)
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


class Publication:
    """Of the file ``uuid`` at ``path``, with ``mode``: `begin`, `fill`, `rename`; `undo` after an error of these.

    ``temporary``: what is renamed into place. ``replaces``: whether there was a file at the path at first. ``epoch``:
    of the new file. ``absent``: a listing has shown that there is none. Raises `NotWritableError` for a ``path`` that
    is a folder.
    """

    def __init__(self, backend: Backend, path: str, uuid: str, mode: int, *, absent: bool = False) -> None:
        self._backend, self._path, self._uuid, self._mode = backend, path, uuid, mode
        self._parent = path.rpartition("/")[0]
        self.temporary = join(self._parent, f"{layout.TEMPORARY}{uuid}")
        self._marker = ""
        self._sink: Sink | None = None
        self._renaming = False
        self._left = False  # the stripes that are replaced, for others to remove
        self._old: Pointer | None = None
        self.replaces, epoch = not absent, 0
        try:
            self._old = None if absent else self._look()
            epoch = self._old.epoch if self._old else 0
        except NotFoundError:
            self.replaces = False  # then the rename does not overwrite, and of two writers one gives up
        except DataError as exc:
            _log.warning("replacing %s: %s", path, exc)
            epoch = self._epoch_of_damaged()
        self.epoch = epoch + 1

    def _look(self) -> Pointer | None:
        found = self._backend.stat(self._path)  # first: mostly there is none, or it is no pointer by its size
        if found.is_dir:
            raise NotWritableError(f"cannot write {self._path}: it is a folder")
        return read_pointer(self._backend, self._path) if layout.may_be_pointer(found.size) else None

    def _uuid_now(self) -> str:
        """uuid of the pointer at the path, "" when there is none, or a damaged one."""
        try:
            now = self._look()
        except (NotFoundError, DataError):
            return ""
        return now.uuid if now else ""

    def _epoch_of_damaged(self) -> int:
        """The epoch of the damaged pointer at the path, as far as it can still be made out: in it or in a header.

        With a smaller one the new version would look older than the stripes that are left of the damaged one.
        """
        said: list[int] = []
        try:
            text = read_all(self._backend, self._path, limit=layout.MAX_TEXT)
            said += [int(found) for found in re.findall(rb'"epoch":([0-9]{1,18})\b', text)]
            for name in re.findall(rb'"uuid":"([0-9a-f]{32})"', text):
                path = join(self._parent, layout.FOLDER, f"{name.decode()}.0")
                header = read_all(self._backend, path, limit=layout.HEADER_SIZE)
                said.append(layout.decode_header(header, path).epoch)
        except (DataError, NotFoundError):
            pass
        return max(said, default=0)

    def begin(self) -> None:
        """Create the temporary file: before any stripe is complete. So a complete set of stripes with neither a
        temporary file nor a pointer is that of a lost pointer, and not what a killed writer left."""
        self._sink = self._backend.create(self.temporary, mode=self._mode)
        faults.point("stripefs.write.intent")

    def fill(self, content: bytes) -> None:
        """Make the temporary file whole."""
        assert self._sink is not None
        faults.point("stripefs.write.pointer")
        self._sink.write(content)
        self._sink.close()

    def rename(self, content: bytes) -> None:
        """Let the temporary file, which has ``content``, appear at the path; then remove the stripes that it replaced.
        Raises `NotWritableError` when another writer replaced the path meanwhile."""
        # of a new file the rename itself tells, where that is one step
        looked = self.replaces or not self._backend.exclusive
        if looked and patiently(self._uuid_now) != (self._old.uuid if self._old else ""):
            raise NotWritableError(f"{self._path} was replaced by another writer meanwhile", hint="run again")
        owned = self._mark()
        faults.point("stripefs.write.rename")
        self._renaming = True
        try:
            patiently(lambda: self._backend.rename(self.temporary, self._path, overwrite=self.replaces), UNKNOWN)
        except (FileExistsError, NotFoundError):
            # also after a rename that was tried again because its answer was lost
            if not patiently(lambda: holds(self._backend, self._path, content), UNKNOWN):
                raise NotWritableError(
                    f"{self._path} was written by another writer meanwhile", hint="run again"
                ) from None
        faults.point("stripefs.write.cleanup")
        if self._left:
            _log.warning(UNFINISHED, self._path)
        elif self._old is not None:
            try:
                if remove_stripes(self._backend, self._path, self._old, owned):
                    self._remove(self._marker)
            except (BootseerError, OSError) as exc:  # the mark says that they are garbage
                _log.warning("stripes of the replaced %s are left behind: %s", self._path, exc)

    def _mark(self) -> Permissions | None:
        """Before the old pointer goes, a temporary file names its stripes, so that they are known as garbage if this
        process dies. By their name and epoch alone they are not: the file may have had another name before. Whose the
        old one is.
        """
        if self._old is None:
            return None
        self._marker = join(self._parent, f"{layout.TEMPORARY}{self._old.uuid}")
        try:
            self._backend.create(self._marker).close()
        except FileExistsError:  # of another writer that replaces it, or of one that died, or whose stripes they are
            self._left = True
        return owned_by(self._backend, self._path)

    def may_have_happened(self, exc: BaseException) -> bool:
        """Whether the rename has happened when `rename` ended with ``exc``, or may have, or may still: without its
        stripes the file would be lost then. A refusal can come after it, as of a folder that is renamed in and cannot
        be synced."""
        if not self._renaming or not isinstance(exc, NotWritableError | FullError):
            return self._renaming
        try:
            now = read_pointer(self._backend, self._path)
        except (NotFoundError, DataError):
            return False
        except (BootseerError, OSError):
            return True
        return now is not None and now.uuid == self._uuid

    def undo(self) -> None:
        """After an error: the old version is what there is."""
        with contextlib.suppress(BootseerError, OSError):
            if self._marker and not self._left and self._old and self._uuid_now() == self._old.uuid:
                self._remove(self._marker)
        if self._sink:
            self._sink.abandon()
            self._remove(self.temporary)  # a sink may keep what was closed

    def _remove(self, path: str) -> None:
        for name in (path, path + layout.ENDED):
            with contextlib.suppress(BootseerError, OSError):
                self._backend.delete(name)
