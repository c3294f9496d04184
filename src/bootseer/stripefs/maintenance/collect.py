"""Garbage collection of a striped store: of what fsck names as garbage, what is old enough, and nothing else.

A set of stripes is first renamed aside. Then its temporary files are removed, because its writer could still publish it
from one of them. Then the pointers are read again: when none names the set it is deleted, else it is renamed back. So a
writer that slept for any time has either published, and keeps its stripes, or it fails. Many sets of one folder take
these steps together, for one listing of it."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from bootseer import faults
from bootseer.backends.interface import DEADLINE, Backend, clean, join
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnavailableError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit, newest
from bootseer.stripefs.files import namespace
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
    """What became of one piece of garbage: ``kept`` says why it is still there, "" when it is removed. With a dry run
    "" is for what would be removed; that changes nothing, so it cannot tell a writer on HDFS that is alive from one
    that died."""

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
    keep: int = 0,
    now: Callable[[], float] = time.time,
) -> list[Removal]:
    """Remove the garbage at or below the folder ``path`` that was modified last more than ``age`` seconds ago.

    ``lost``: also whole sets of stripes whose pointer is gone, as after a removal with tools that do not know them.
    ``taken``: also files that a writer on HDFS has open, which fails then; without it they are kept while the writer
    renews its lease, which ends a minute after the writer has died. ``keep``: also the complete checkpoints directly in
    ``path`` but for so many of the newest whose names differ in numbers alone, and for what was the newest one less
    than ``age`` seconds ago: a start may load it. 0: all stay. Garbage that cannot be removed is kept, and no reason to
    leave the rest; a storage that does not answer is an error."""
    if age < 0 or keep < 0:
        raise ConfigError(f"an age of {age:g} s and {keep} kept checkpoints are not possible")
    path = clean(path)
    if not backend.stat(path).is_dir:
        raise NotFoundError(f"{path} is a file, gc cleans folders")
    removed = _outdated(backend, path, age, keep, dry_run, now()) if keep else []
    findings = fsck(backend, path).findings
    garbage = [it for it in findings if it.level == "garbage" or (lost and it.kind == "lost-pointer")]
    collector = _Collector(backend, age, dry_run, taken)
    folders: dict[str, dict[str, str]] = {}  # path: why a set in it is kept, "" when it is removed, by uuid
    for finding in garbage:
        if finding.age >= age and finding.kind != "temporary":
            folders.setdefault(_folder_of(finding.path), {})[finding.uuid] = ""
    for folder, kept in folders.items():
        collector.sets(folder, kept)
    # after the stripes of the sets that they belong to
    temporaries = {finding.path: "" for finding in garbage if finding.age >= age and finding.kind == "temporary"}
    for path in temporaries:
        with _kept_on_error(temporaries, path):
            temporaries[path] = collector.temporary(path)

    def why(finding: Finding) -> str:
        if finding.age < age:
            return "its writer may be under way"
        if finding.kind == "temporary":
            return temporaries[finding.path]
        return folders[_folder_of(finding.path)][finding.uuid]

    return removed + [Removal(kind=it.kind, path=it.path, size=it.size, age=it.age, kept=why(it)) for it in garbage]


def _outdated(backend: Backend, path: str, age: float, keep: int, dry_run: bool, now: float) -> list[Removal]:
    """The checkpoints in ``path`` after the newest ``keep`` of their series (names that are the same but for numbers:
    ``final`` or ``best-80`` do not go because of ``step-N``), and what became of each."""
    commit.refuse_inside(backend, path)
    found, complete, passed = list[Removal](), Counter[str](), now
    for folder in newest.listing(backend, path):
        try:
            manifest = backend.stat(join(folder, commit.NAME))
            size = commit.check(backend, folder).size
        except (NotFoundError, DataError):  # its save may be under way, or it is a folder of something else
            continue
        series = re.sub(r"\d+", "", folder.rpartition("/")[2])
        complete[series] += 1
        if complete[series] <= keep:
            passed = min(passed, manifest.mtime)
            continue
        kept = {folder: "" if now - passed >= age else "a start may load it: the next one is younger"}
        if not kept[folder] and not dry_run:
            with _kept_on_error(kept, folder), contextlib.suppress(NotFoundError):
                namespace.remove_tree(backend, folder)
        found.append(Removal(kind="checkpoint", path=folder, size=size, age=now - manifest.mtime, kept=kept[folder]))
        passed = min(passed, manifest.mtime)
    return found


def _folder_of(path: str) -> str:
    """The folder whose files have the stripes of which a finding says ``path``: of the set, or of a lost pointer."""
    parent, _, name = path.rpartition("/")[0].rpartition("/")
    return parent if name == layout.FOLDER else join(parent, name)


@contextlib.contextmanager
def _kept_on_error(kept: dict[str, str], *names: str) -> Iterator[None]:
    """An error is why all of ``names`` are kept. A storage that does not answer is an error."""
    try:
        yield
    except UnavailableError:
        raise
    except (BootseerError, OSError) as exc:
        kept.update(dict.fromkeys(names, exc.message if isinstance(exc, BootseerError) else str(exc)))


class _Collector:
    def __init__(self, backend: Backend, age: float, dry_run: bool, taken: bool) -> None:
        self._backend, self._age = backend, age
        self._dry_run, self._taken = dry_run, taken

    def sets(self, path: str, kept: dict[str, str]) -> None:
        """Remove the sets in ``kept`` of one folder: its stripes are listed once, its files twice for each batch."""
        uuids, folder = list(kept), None
        with _kept_on_error(kept, *uuids):
            folder = scan.folder(self._backend, path)
        if folder is not None:
            for start in range(0, len(uuids), _BATCH):
                self._batch(folder, uuids[start : start + _BATCH], kept)

    def _batch(self, folder: Folder, uuids: list[str], kept: dict[str, str]) -> None:
        for uuid in uuids:
            with _kept_on_error(kept, uuid):
                named = "a pointer names it by now" if folder.owners(uuid) else ""
                kept[uuid] = named or self._in_use(_files(folder, uuid))
        aside = [uuid for uuid in uuids if not kept[uuid]]
        if self._dry_run or not aside:
            return
        try:
            for uuid in aside:
                with _kept_on_error(kept, uuid):
                    self._set_aside(folder, uuid)
            faults.point("stripefs.gc.aside")
            with _kept_on_error(kept, *aside):
                self._fence(folder, aside, kept)
            faults.point("stripefs.gc.delete")
            # as long as nobody knows that they are garbage, a pointer may name them
            if silent := self._put_back(folder, [uuid for uuid in aside if kept[uuid]]):
                raise silent
        except BaseException:
            self._put_back(folder, aside)
            raise
        for uuid in aside:
            if not kept[uuid]:
                with _kept_on_error(kept, uuid):
                    for index in folder.trash.get(uuid, {}):
                        self._backend.delete(folder.trash_path(uuid, index))

    def _fence(self, folder: Folder, aside: list[str], kept: dict[str, str]) -> None:
        """Remove the temporary files from which a writer could still publish a set, and see whether one has."""
        for entry in self._backend.list(folder.path):
            if (uuid := scan.owner(entry.name)) in aside and not kept[uuid]:
                with _kept_on_error(kept, uuid):
                    self._backend.delete(join(folder.path, entry.name))
        faults.point("stripefs.gc.fenced")
        after = scan.folder(self._backend, folder.path, known=folder, stripes=False)
        kept.update({uuid: "its writer published it meanwhile" for uuid in aside if after.owners(uuid)})

    def _put_back(self, folder: Folder, aside: Iterable[str]) -> UnavailableError | None:
        """Rename all of ``aside`` back. A storage that is silent is asked for `DEADLINE` seconds; returns its error."""
        until, silent = time.monotonic() + DEADLINE, None
        for uuid in aside:
            try:
                if silent is not None and time.monotonic() >= until:
                    raise silent
                restore_trash(self._backend, folder, uuid)
                silent = None
            except (BootseerError, OSError) as exc:
                silent = exc if isinstance(exc, UnavailableError) else None
                _log.warning(_ASIDE, folder.store, uuid, exc)
        return silent

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

    def temporary(self, path: str) -> str:
        """Remove a temporary file or folder. Returns why it is kept, "" when it is gone."""
        try:
            entry = self._backend.stat(path)
        except NotFoundError:
            return ""  # went with its stripes
        if not entry.is_dir and (why := self._in_use([path])):
            return why
        if time.time() - scan.youngest(self._backend, path, entry) < self._age:
            return "its writer is under way"
        if not self._dry_run and entry.is_dir:
            self._backend.remove_folder(path)
        elif not self._dry_run:
            self._backend.delete(path)
        return ""

    def _in_use(self, paths: list[str]) -> str:
        for path in paths:
            if self._dry_run:
                if not self._taken and (why := self._backend.writers.may_have_open(path)):
                    return why
                continue
            if not self._backend.writers.has_open(path):
                continue
            if not self._taken:
                return "a writer has it open"
            self._backend.writers.end(path)
        return ""


def _files(folder: Folder, uuid: str) -> list[str]:
    """Stripes and temporary files of a set."""
    stripes = [folder.stripe_path(uuid, index) for index in folder.stripes.get(uuid, {})]
    return stripes + [join(folder.path, entry.name) for entry in folder.temporaries.get(uuid, [])]
