"""Garbage collection of a striped store: of what fsck names as garbage, what is old enough, and nothing else.

A set of stripes is first renamed aside, then the temporary files go from which its writer could still publish it, then
the pointers are read again; only when none names the set is it deleted, else it is renamed back. So a writer that was
asleep for any time either has published, and keeps its stripes, or fails.

Many sets of one folder take these steps together, so that the folder is listed for hundreds of them at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from bootseer import faults
from bootseer.errors import BootseerError, ConfigError, NotFoundError, UnavailableError
from bootseer.storage.interface import DEADLINE, Backend, clean, join
from bootseer.stripefs.maintenance import scan
from bootseer.stripefs.maintenance.check import Finding, fsck
from bootseer.stripefs.maintenance.repair import restore_trash
from bootseer.stripefs.maintenance.scan import Folder

_log = logging.getLogger(__name__)

AGE = 86400.0
"""Seconds for which garbage is left alone, because its writer may be under way."""


_BATCH = 100
"""Sets of one folder that are set aside together, at most. Who reads one that was published meanwhile meets an error
until the batch is through."""

_ASIDE = "%s/%s is still set aside, `bootseer fs fsck --repair` looks whether a pointer names it: %s"


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one piece of garbage: ``kept`` says why it is still there, "" when it is removed.

    With a dry run ``kept`` is "" for what would be removed. That changes nothing, so it cannot tell a writer on HDFS
    that is alive from one that died: what one has open "may be open".
    """

    kind: str
    path: str
    size: int
    age: float
    kept: str = ""


def gc(
    backend: Backend,
    path: str = "",
    *,
    age: float = AGE,
    dry_run: bool = False,
    lost: bool = False,
    taken: bool = False,
    now: float | None = None,
) -> list[Removal]:
    """Remove the garbage at or below the folder ``path`` that was modified last more than ``age`` seconds ago.

    ``lost``: also whole sets of stripes whose pointer is gone, as after a removal with tools that do not know them.
    ``taken``: also files that a writer on HDFS has open; it is ended. Without it they are kept as long as that writer
    renews its lease (it dies with it after a minute).
    """
    if age < 0:
        raise ConfigError(f"an age of {age:g} s is not possible")
    path, now = clean(path), time.time() if now is None else now
    if not backend.stat(path).is_dir:
        raise NotFoundError(f"{path} is a file, gc cleans folders")
    kinds = ["unreferenced-stripes", "collected-stripes", "temporary", *(["lost-pointer"] if lost else [])]
    garbage = [finding for finding in fsck(backend, path, now=now).findings if finding.kind in kinds]
    # stripes before the temporary files that say whose they are
    garbage.sort(key=lambda finding: finding.kind == "temporary")
    collector = _Collector(backend, now, age, dry_run, taken)
    kept = collector.collect(garbage)
    return [
        Removal(kind=finding.kind, path=finding.path, size=finding.size, age=finding.age, kept=why)
        for finding, why in zip(garbage, kept, strict=True)
    ]


class _Collector:
    def __init__(self, backend: Backend, now: float, age: float, dry_run: bool, taken: bool) -> None:
        self._backend, self._now, self._age = backend, now, age
        self._dry_run, self._taken = dry_run, taken

    def collect(self, garbage: Sequence[Finding]) -> list[str]:
        """Remove what each finding names. For each the reason why not, "" when it is gone.

        Garbage that cannot be removed is kept, and no reason to leave the rest.
        """
        kept = {index: "its writer may be under way" for index, it in enumerate(garbage) if it.age < self._age}
        folders: dict[str, dict[int, str]] = {}  # path: uuids of its sets by the number of their finding
        for index, finding in enumerate(garbage):
            if index not in kept and finding.kind != "temporary":
                parent = finding.path.rpartition("/")[0]
                if finding.kind != "lost-pointer":
                    parent = parent.rpartition("/")[0]  # of the folder of the stripes
                folders.setdefault(parent, {})[index] = finding.uuid
        for parent, sets in folders.items():
            why = self._sets(parent, list(dict.fromkeys(sets.values())))
            kept |= {index: why[uuid] for index, uuid in sets.items()}
        for index, finding in enumerate(garbage):
            if index not in kept:
                kept[index] = _why_not(partial(self._temporary, finding.path))
        return [kept[index] for index in range(len(garbage))]

    def _sets(self, parent: str, uuids: list[str]) -> dict[str, str]:
        """`collect` the sets ``uuids`` of one folder: its stripes are listed once, its files twice for each batch."""
        folder: Folder | None = None

        def look() -> str:
            nonlocal folder
            folder = scan.folder(self._backend, parent)
            return ""

        if (failed := _why_not(look)) or folder is None:
            return dict.fromkeys(uuids, failed)
        kept: dict[str, str] = {}
        for start in range(0, len(uuids), _BATCH):
            batch = uuids[start : start + _BATCH]
            why = {uuid: _why_not(partial(self._in_use, _files(folder, uuid))) for uuid in batch}
            if not self._dry_run:
                self._batch(folder, why)
            kept |= why
        return kept

    def _batch(self, folder: Folder, kept: dict[str, str]) -> None:
        """`collect` the sets in ``kept``, which says why each of them is kept, "" for no reason yet."""
        aside: dict[str, None] = {}  # until it is known to be garbage
        try:
            self._collect(folder, kept, aside)
        except BaseException:
            self._put_back(folder, aside)
            raise

    def _collect(self, folder: Folder, kept: dict[str, str], aside: dict[str, None]) -> None:
        """The steps of a batch; says in ``kept`` why a set is, and in ``aside`` which ones are set aside."""
        for uuid in kept:
            if not kept[uuid] and folder.owners(uuid):
                kept[uuid] = "a pointer names it by now"
            if not kept[uuid]:
                aside[uuid] = None
                kept[uuid] = _why_not(partial(self._set_aside, folder, uuid))
        if not aside:
            return
        faults.point("stripefs.gc.aside")
        named: set[str] = set()

        def fence() -> str:
            for entry in self._backend.list(folder.path):
                if (uuid := scan.owner(entry.name)) in kept and not kept[uuid]:
                    path = join(folder.path, entry.name)
                    kept[uuid] = _why_not(partial(self._backend.delete, path))
            faults.point("stripefs.gc.fenced")
            after = scan.folder(self._backend, folder.path, known=folder, stripes=False)
            named.update(uuid for uuid in aside if after.owners(uuid))
            return ""

        failed = _why_not(fence)
        faults.point("stripefs.gc.delete")
        for uuid in list(aside):
            if uuid in named:
                kept[uuid] = "its writer published it meanwhile"
            if why := kept[uuid] or failed:
                kept[uuid] = why
                # as long as nobody knows that it is garbage, a pointer may name it
                if not_back := _why_not(partial(restore_trash, self._backend, folder, uuid)):
                    _log.warning(_ASIDE, folder.store, uuid, not_back)
                del aside[uuid]
                continue
            del aside[uuid]
            kept[uuid] = _why_not(partial(self._delete, folder, uuid))

    def _put_back(self, folder: Folder, aside: Iterable[str]) -> None:
        """Rename all of ``aside`` back, after an error. A storage that is silent is asked for `DEADLINE` seconds."""
        until, silent = time.monotonic() + DEADLINE, ""
        for uuid in aside:
            try:
                if not silent or time.monotonic() < until:
                    silent = ""
                    restore_trash(self._backend, folder, uuid)
                    continue
                why = silent
            except UnavailableError as exc:
                why = silent = exc.message
            except (BootseerError, OSError) as exc:
                why = str(exc)
            _log.warning(_ASIDE, folder.store, uuid, why)

    def _set_aside(self, folder: Folder, uuid: str) -> None:
        trash = folder.trash.setdefault(uuid, {})
        for index, entry in list(folder.stripes.get(uuid, {}).items()):
            before = trash.get(index)
            trash[index] = entry  # first: a rename whose answer is lost may have been done
            try:
                self._backend.rename(folder.stripe_path(uuid, index), folder.trash_path(uuid, index), overwrite=True)
            except NotFoundError:
                if before is None:
                    del trash[index]

    def _delete(self, folder: Folder, uuid: str) -> None:
        for index in folder.trash.get(uuid, {}):
            self._backend.delete(folder.trash_path(uuid, index))

    def _temporary(self, path: str) -> str:
        try:
            entry = self._backend.stat(path)
        except NotFoundError:
            return ""  # went with its stripes
        if not entry.is_dir and (why := self._in_use([path])):
            return why
        if self._now - scan.youngest(self._backend, path, entry) < self._age:
            return "its writer is under way"
        if not self._dry_run and entry.is_dir:
            self._backend.remove_folder(path)
        elif not self._dry_run:
            self._backend.delete(path)
        return ""

    def _in_use(self, paths: list[str]) -> str:
        for path in paths:
            if self._dry_run:
                if not self._taken and (why := self._backend.may_be_open(path)):
                    return why
                continue
            if not self._backend.is_open(path):
                continue
            if not self._taken:
                return "a writer has it open"
            self._backend.end_writer(path)
        return ""


def _files(folder: Folder, uuid: str) -> list[str]:
    """Stripes and temporary files of a set."""
    stripes = [folder.stripe_path(uuid, index) for index in folder.stripes.get(uuid, {})]
    return stripes + [join(folder.path, entry.name) for entry in folder.temporaries_of(uuid)]


def _why_not(function: Callable[[], str | None]) -> str:
    """What ``function`` says, or its error. A storage that does not answer is an error."""
    try:
        return function() or ""
    except UnavailableError:
        raise
    except (BootseerError, OSError) as exc:
        return exc.message if isinstance(exc, BootseerError) else str(exc)
