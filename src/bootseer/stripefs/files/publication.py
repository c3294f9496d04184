"""The publication of a file: a temporary file is renamed to its path, and what was there before goes.

Order matters: whoever ends a writer from outside (a garbage collection, a later save of the checkpoint) first moves the
stripes or claims the folder, then takes the temporary file away. So each check comes after the temporary file is whole,
and one that passed is void when the rename finds no source.

No storage replaces a file only where it is still the one that its writer knew: who replaces one claims its name first,
with a file of its own, and looks then (`alone`)."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from blake3 import blake3

from bootseer import faults
from bootseer.backends.interface import DEADLINE, Backend, Permissions, Sink, entry_at, exists, holds, join, read_all
from bootseer.errors import (
    BootseerError,
    DataError,
    FullError,
    NotFoundError,
    NotWritableError,
    ReplacedError,
    UnavailableError,
)
from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import content_of, read_pointer
from bootseer.stripefs.files.removal import UNFINISHED, owned_by, remove_stripes
from bootseer.stripefs.layout import Pointer

_log = logging.getLogger(__name__)
T = TypeVar("T")

OUTAGE = 3 * DEADLINE
"""Seconds for which publishing is tried again while the storage does not answer."""
UNKNOWN = 30 * DEADLINE
"""The same of the rename that publishes: when its answer is lost it may have happened, or may happen when a storage
that stood still goes on. Whoever is told of an error must not find the file published."""
_UUIDS = 8
"""Of what a damaged pointer says: it has one."""
_STEP, _POLL = 10.0, 0.02
"""Seconds of waiting, while the storage answers, after which who has claimed a name is taken for dead; and a pause."""


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


@contextlib.contextmanager
def alone(backend: Backend, path: str, version: str | None = None) -> Iterator[Callable[[], None]]:
    """Nobody else replaces the file at ``path`` meanwhile; gives what raises `ReplacedError` when it has not this
    ``version``, as before. `NotWritableError` when others claim it all the time."""
    parent, _, name = path.rpartition("/")
    claim = join(parent, f"{layout.TEMPORARY}{blake3(name.encode()).hexdigest()[:32]}")
    began = time.monotonic()
    holder, waited, until, claimed = "", 0.0, began + OUTAGE, False

    def check() -> None:
        now = patiently(lambda: entry_at(backend, path)) if version is not None else None
        if version is not None and (now is None or now.version != version):
            raise replaced(path)

    try:
        while not claimed:
            with contextlib.suppress(FileExistsError):
                patiently(lambda: backend.create(claim).close())
                claimed, began = True, time.monotonic()
            check()
            if claimed:
                continue
            other = patiently(lambda: entry_at(backend, claim))
            if other is not None and other.version != holder:
                holder, waited = other.version, 0.0
            if other is not None and waited >= _STEP:
                _log.warning("%s was to be replaced by another writer, which seems to be dead", path)
                backend.delete(claim)
            elif time.monotonic() >= until:
                raise NotWritableError(f"{path} is being replaced by others all the time", hint="run again")
            time.sleep(_POLL)
            waited += _POLL
        yield check
    finally:
        if claimed and time.monotonic() - began < _STEP:  # else it may be another's by now
            with contextlib.suppress(BootseerError, OSError):
                backend.delete(claim)


def _same(one: str, other: str) -> bool:
    """Whether both name one content; a new pointer has a new uuid, and the attributes of a file may change."""
    (kind, _, version), (other_kind, _, other_version) = one.partition("-"), other.partition("-")
    return kind == other_kind and (kind not in ("", "plain") or version == other_version)


def replaced(path: str) -> ReplacedError:
    return ReplacedError(f"{path} was written by another writer meanwhile", hint="run again")


class Publication:
    """Of the file ``uuid`` at ``path``, with ``mode``: `begin`, `fill`, `rename`; `undo` after an error of these.

    ``known``: `content_of` what is to be replaced, "" for nothing; None: what is there now. When something else is
    there, then or at the end, `rename` raises `ReplacedError`; without ``exclusive`` not for the bytes of a plain file
    that are there already. ``temporary``: what is renamed into place. ``replaces``: whether there was a file at the
    path at first. ``epoch``: of the new file. Raises `NotWritableError` for a ``path`` that is a folder."""

    def __init__(
        self, backend: Backend, path: str, uuid: str, mode: int, *, known: str | None = None, exclusive: bool = False
    ) -> None:
        self._backend, self._path, self._uuid, self._mode = backend, path, uuid, mode
        self._exclusive = exclusive
        self._parent = path.rpartition("/")[0]
        self.temporary = join(self._parent, f"{layout.TEMPORARY}{uuid}")
        self._marker = ""
        self._sink: Sink | None = None
        self._renaming = False
        self._left = False  # the stripes that are replaced, for others to remove
        self._old: Pointer | None = None
        self.epoch = 1
        # without, the rename does not overwrite, and of two writers one gives up
        self._known = known if known == "" else self._look()
        self.replaces = bool(self._known)
        self._lost = known is not None and not _same(known, self._known)

    def _look(self) -> str:
        """`content_of` what is at the path, "" for nothing."""
        if (entry := entry_at(self._backend, self._path)) is None:
            return ""
        if entry.is_dir:
            raise NotWritableError(f"cannot write {self._path}: it is a folder")
        if not entry.size or layout.may_be_pointer(entry.size):  # an empty one may be a device
            try:
                self._old = read_pointer(self._backend, self._path)
            except NotFoundError:
                return ""
            except DataError as exc:
                _log.warning("replacing %s: %s", self._path, exc)
                self.epoch = self._epoch_of_damaged() + 1
        else:
            self._backend.open(self._path).close()  # what may not be read, or is a device, is not replaced
        if self._old is not None:
            self.epoch = self._old.epoch + 1
        self.epoch = min(self.epoch, layout.MAX_EPOCH)  # that of a forged one
        return content_of(entry.version, self._old.uuid if self._old else "")

    def _uuid_now(self) -> str:
        """uuid of the pointer at the path, "" when there is none, or a damaged one."""
        try:
            now = read_pointer(self._backend, self._path)
        except (NotFoundError, DataError):
            return ""
        return now.uuid if now else ""

    def _epoch_of_damaged(self) -> int:
        """The epoch of the damaged pointer at the path, as far as it can be made out in it or in a header: with a
        smaller one the new version would look older than what is left of it."""
        said: list[int] = []
        try:
            text = read_all(self._backend, self._path, limit=layout.MAX_TEXT)
            said += [int(found) for found in re.findall(rb'"epoch":([0-9]{1,18})\b', text)]
            for name in re.findall(rb'"uuid":"([0-9a-f]{32})"', text)[:_UUIDS]:
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
        Raises `ReplacedError` when another writer replaced the path meanwhile."""
        owned = None
        try:
            with self._alone() as check:
                owned = self._mark()
                faults.point("stripefs.write.rename")
                self._renaming = True
                began = time.monotonic()

                def step() -> None:
                    if time.monotonic() - began >= _STEP:  # others may have taken this writer for dead
                        check()
                    self._backend.rename(self.temporary, self._path, overwrite=self.replaces)

                patiently(step, UNKNOWN)
        except (FileExistsError, NotFoundError, ReplacedError):
            # also after a rename that was tried again because its answer was lost
            here = patiently(lambda: exists(self._backend, self.temporary), UNKNOWN)
            if (here and self._exclusive) or not patiently(lambda: holds(self._backend, self._path, content), UNKNOWN):
                raise replaced(self._path) from None
            if here:
                self._remove(self.temporary)
                self._old = None  # for the other writer to clean up
        faults.point("stripefs.write.cleanup")
        if self._left:
            _log.warning(UNFINISHED, self._path)
        elif self._old is not None:
            try:
                if remove_stripes(self._backend, self._path, self._old, owned):
                    self._remove(self._marker)
            except (BootseerError, OSError) as exc:  # the mark says that they are garbage
                _log.warning("stripes of the replaced %s are left behind: %s", self._path, exc)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Callable[[], None]]:
        """What is at the path is what is to be replaced, and nobody else replaces it meanwhile. Gives a check of it."""
        if self._lost:
            raise replaced(self._path)
        if not self.replaces:  # the rename itself tells, where that is one step
            if not self._backend.exclusive and patiently(lambda: entry_at(self._backend, self._path)) is not None:
                raise replaced(self._path)
            yield lambda: None
            return
        version = self._known.partition("-")[2]
        if self._old is not None:  # perhaps only its attributes have changed since
            now = patiently(lambda: entry_at(self._backend, self._path))
            if now is None or patiently(self._uuid_now) != self._old.uuid:
                raise replaced(self._path)
            version = now.version
        with alone(self._backend, self._path, version) as check:
            yield check

    def _mark(self) -> Permissions | None:
        """Before the old pointer goes, a temporary file names its stripes, so that they are known as garbage if this
        process dies (not by their name and epoch: the file may have had another name). Whose the old one is."""
        if self._old is None:
            return None
        self._marker = join(self._parent, f"{layout.TEMPORARY}{self._old.uuid}")
        try:
            self._backend.create(self._marker).close()
        except FileExistsError:  # of another writer that replaces it, or of one that died, or whose stripes they are
            self._left = True
        return owned_by(self._backend, self._path)

    def may_have_happened(self, exc: BaseException) -> bool:
        """Whether the rename has happened, or may have, or may still, when `rename` ended with ``exc``: without its
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
