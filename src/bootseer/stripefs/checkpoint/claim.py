"""Saves of checkpoints: who saves a folder claims it, and whoever claimed it before can publish nothing any more.

A claim is a file ``.bsx/save.N`` with a random token that is made without overwriting; N counts the saves of the
folder. Taking it renames the temporary files of earlier saves away, so that nothing can be published from them. A
commit takes the next claim. Why this leaves no gap: docs/internals/stripe.md."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping

from bootseer import faults
from bootseer.backends.interface import Backend, Entry, Sink, clean, content_at, exists, holds, join
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, doing
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.checkpoint.commit import Commit, CommittedFile
from bootseer.stripefs.files.reader import PlainFile, read_pointer, refuse_unfinished
from bootseer.stripefs.files.writer import StripeWriter
from bootseer.stripefs.layout import clean_new
from bootseer.stripefs.maintenance.scan import lost_sets, refuse_lost

_log = logging.getLogger(__name__)
_TOKEN = 32


class Save:
    """One save of the checkpoint ``folder``: files by `create`, then `commit`.

    ``epoch`` is the number of its claim, which the processes of one job share: one calls `begin` and at the end
    `commit`, the others make theirs of its ``epoch`` (``token``: only of who made it). Raises `NotWritableError` when
    there is no such claim; from `commit` and each writer's ``finish`` when a later save has begun, the folder was
    removed or renamed meanwhile, or it has a COMMIT."""

    def __init__(self, backend: Backend, folder: str, epoch: int, token: bytes = b"") -> None:
        self.folder, self.epoch = clean(folder), epoch
        self._backend = backend
        self._left: Mapping[str, Entry] | None = None
        """What earlier saves left in the folder; None in a process that joined."""
        self._closing = _new_token()
        """Of the claim that `commit` takes."""
        self._closed: Save | None = None
        self._token = token or self._claimed()
        if len(self._token) != _TOKEN:
            raise NotWritableError(
                f"there is no save {epoch} of {self._shown}", hint="begin one, and pass its epoch to the others"
            )

    def _claimed(self) -> bytes:
        """The token of the claim with the number of this save, b"" when there is none."""
        return content_at(self._backend, _claim(self.folder, self.epoch), limit=_TOKEN) or b""

    def create(
        self, path: str, *, width: int = layout.WIDTH, unit: int = layout.UNIT, striped: bool = False
    ) -> StripeWriter:
        """A writer for the file ``path``, relative to the folder; `StripeWriter` says more."""
        full = join(self.folder, clean_new(path))
        return StripeWriter(
            self._backend, full, width=width, unit=unit, striped=striped, before=lambda pointer: self.check()
        )

    def check(self) -> None:
        """Raise `NotWritableError` when this save can publish nothing any more."""
        commit.refuse_committed(self._backend, self.folder)
        if exists(self._backend, _claim(self.folder, self.epoch + 1)):
            raise self._overtaken()
        if self._claimed() != self._token:
            raise NotWritableError(
                f"save {self.epoch} of {self._shown} has lost its folder: it was removed or renamed", hint="save again"
            )

    def _overtaken(self) -> NotWritableError:
        return NotWritableError(
            f"save {self.epoch} of {self._shown} was overtaken by a later one, or is being committed",
            hint="save to a new folder; commit when all processes of the save are done",
        )

    @property
    def _shown(self) -> str:
        return self.folder or self._backend.url

    def commit(self, *, before: Callable[[Commit], None] | None = None) -> Commit:
        """End this save, and the writes of it that are under way, and publish the manifest of the folder. What an
        earlier save left there and this one did not replace is not listed, where the storage tells versions of a file
        apart. Arguments and errors of `publish`; `NotWritableError` also in a process that joined the save."""
        if self._closed is None:
            closed = Save(self._backend, self.folder, self.epoch + 1, self._closing)
            if closed._claimed() == self._closing:  # an earlier call took it, and failed after that
                _end_writes(closed)
            else:
                self.check()
                if self._left is None:
                    raise NotWritableError(
                        f"save {self.epoch} of {self._shown} was begun by another process", hint="commit it there"
                    )
                try:
                    if _highest(self._backend, self.folder) > self.epoch:
                        raise self._overtaken()
                    _take(closed)
                except FileExistsError:
                    raise self._overtaken() from None
            self._closed = closed
        only = None
        if left := self._left:
            now = _listed(self._backend, self.folder)
            # without a version another file may look the same
            only = {path for path, entry in now.items() if left.get(path) != entry or not entry.version}
        return self._closed.publish(before=before, only=only)

    def publish(
        self,
        *,
        before: Callable[[Commit], None] | None = None,
        only: Collection[str] | None = None,
    ) -> Commit:
        """Publish the manifest of everything in the folder.

        ``before`` is called with the manifest; when it raises, nothing is published. ``only``: the paths to list; the
        log names the others. The digest of a striped file is the one its writer computed; plain files are read. Raises
        `NotWritableError` when there is a COMMIT or a later save, or a file is still being written or changes,
        `DataError` when there is nothing to list, `ConfigError` for names that are not UTF-8."""
        self.check()
        found = _listed(self._backend, self.folder)
        made = Commit(created=time.time(), files=tuple(self._files(found, only)))
        if not made.files:
            raise DataError(f"checkpoint {self._shown} has no files to commit")
        if before is not None:
            before(made)
        now = _listed(self._backend, self.folder)
        if changed := [file.path for file in made.files if now.get(file.path) != found[file.path]]:
            raise NotWritableError(
                f"{join(self.folder, changed[0])} was changed while its checkpoint was committed",
                hint="commit again when its writer is done",
            )
        with doing(f"commit {self._shown}"):
            self._publish(commit.encode(made))
        return made

    def _files(self, found: Mapping[str, Entry], only: Collection[str] | None) -> Iterator[CommittedFile]:
        lost = functools.cache(functools.partial(lost_sets, self._backend))
        for path in sorted(found):
            full = join(self.folder, clean_new(path))
            if only is not None and path not in only:
                _log.warning("%s was not written by this save: COMMIT does not list it", full)
                continue
            if (pointer := read_pointer(self._backend, full)) is None:
                with PlainFile(self._backend, full) as file:
                    refuse_unfinished(file)
                    refuse_lost(file, lost)
                    yield CommittedFile(path=path, size=file.size, digest=commit.digest_of_open(file), uuid="")
            else:
                yield CommittedFile(path=path, size=pointer.size, digest=pointer.digest, uuid=pointer.uuid)

    def _publish(self, content: bytes) -> None:
        tmp, path = join(self.folder, f"{layout.TEMPORARY}{uuid.uuid4().hex}"), join(self.folder, commit.NAME)
        faults.point("stripefs.commit.begin")
        sink = self._backend.create(tmp)
        try:
            faults.point("stripefs.commit.write")
            sink.write(content)
            sink.close()
            self.check()
            faults.point("stripefs.commit.rename")
            self._backend.rename(tmp, path, overwrite=False)
        except (FileExistsError, NotFoundError):
            # also after a rename that was tried again because its answer was lost
            if not holds(self._backend, path, content):
                self._remove(sink, tmp)
                raise NotWritableError(f"checkpoint {self._shown} was committed by another writer meanwhile") from None
        except BaseException:
            self._remove(sink, tmp)
            raise
        faults.point("stripefs.commit.published")

    def _remove(self, sink: Sink, tmp: str) -> None:
        sink.abandon()
        for name in (tmp, tmp + layout.ENDED):  # a closed file stays when its sink is abandoned
            with contextlib.suppress(BootseerError, OSError):
                self._backend.delete(name)


def begin(backend: Backend, folder: str) -> Save:
    """Claim ``folder`` for a new save; other saves of it, and writes into it, that are under way are ended. The files
    that are there stay. Raises `NotWritableError` when the folder has a COMMIT."""
    folder = clean(folder)
    commit.refuse_committed(backend, folder)
    epoch = _highest(backend, folder) + 1
    while True:
        try:
            _take(save := Save(backend, folder, epoch, _new_token()))
            break
        except FileExistsError:
            epoch += 1
    save._left = _listed(backend, folder) if epoch > 1 else {}
    return save


def claimed(backend: Backend, folder: str) -> bool:
    """Whether a save of ``folder`` ever began."""
    return _highest(backend, clean(folder)) > 0


def _new_token() -> bytes:
    return uuid.uuid4().hex.encode()


def _take(save: Save) -> None:
    """Make the claim of ``save``, and end the writes into its folder. `FileExistsError` when its number is taken."""
    # It counts from its creation on, and stays after an error: `Save.check` looks at the next number only.
    sink = save._backend.create(_claim(save.folder, save.epoch))
    try:
        sink.write(save._token)
    finally:
        sink.close()
    faults.point("stripefs.save.claim")
    _end_writes(save)


def _end_writes(save: Save) -> None:
    backend, folder = save._backend, save.folder
    # In this order: a save that claims after the list was made has none of its files in it.
    unfinished = [join(folder, path) for path, _ in commit.walk(backend, folder, temporary=True)]
    save.check()
    for path in unfinished:
        with contextlib.suppress(NotFoundError):  # its writer was quicker
            backend.rename(path, path + layout.ENDED, overwrite=True)
            _log.info("a write into %s that was under way has been ended by a save or a commit", folder)
    save.check()


def _listed(backend: Backend, folder: str) -> dict[str, Entry]:
    """The files of ``folder`` as they are now, but for who may read them."""
    return {path: entry._replace(permissions=None) for path, entry in commit.walk(backend, folder)}


def _claim(folder: str, epoch: int) -> str:
    return join(folder, layout.FOLDER, f"save.{epoch}")


def _highest(backend: Backend, folder: str) -> int:
    try:
        names = [entry.name for entry in backend.list(join(folder, layout.FOLDER))]
    except NotFoundError:
        return 0
    return max((int(found[1]) for name in names if (found := layout.CLAIM.fullmatch(name))), default=0)
