"""Checking a striped store: what is lost, what is damaged, what is garbage. Nothing is changed here.

Contents are not read (`StripeFS.verify` does that), except the headers and footers of stripes. What makes stripes
garbage is said in docs/internals/stripe.md; when in doubt they are kept.
"""

from __future__ import annotations

import posixpath
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnavailableError
from bootseer.storage.interface import Backend, Entry, clean, join, read_all
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit, newest
from bootseer.stripefs.checkpoint.commit import Commit, CommittedFile
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.layout import Pointer
from bootseer.stripefs.maintenance import scan
from bootseer.stripefs.maintenance.scan import Damaged, Folder, Whole

_THREADS = 8

Level = Literal["error", "garbage", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it should be.

    ``kind`` is a name of the table in docs/howto/stripefs.md. ``path``: of the file; for a set of stripes without
    their index. ``age``: seconds since it was last modified (garbage only); ``size``: bytes that it takes.
    ``repair``: what `repair` would do about it, "" for nothing.
    """

    kind: str
    level: Level
    path: str
    detail: str
    uuid: str = ""
    size: int = 0
    age: float = 0.0
    repair: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``files``: striped and plain ones that were looked at. ``findings``: in path order."""

    url: str
    path: str
    folders: int
    files: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def garbage(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "garbage")


def fsck(backend: Backend, path: str = "", *, now: float | None = None) -> Report:
    """Check the folder ``path`` and all below it, or one file. ``now``: in seconds since the epoch, for ages.

    Raises `NotFoundError`, and `UnavailableError` for a storage that does not answer.
    """
    path = clean(path)
    check = _Check(backend, time.time() if now is None else now)
    if backend.stat(path).is_dir:
        return check.tree(path)
    return check.file(path)


class _Check:
    def __init__(self, backend: Backend, now: float) -> None:
        self._backend, self._now = backend, now
        self._folders: dict[str, Folder] = {}
        self._commits: dict[str, Commit] = {}
        self._committed: dict[tuple[str, str], CommittedFile] = {}  # (folder, uuid) of what COMMITs list
        self._named: set[tuple[str, str]] = set()  # (folder of stripes, uuid) of all pointers
        self._findings: list[Finding] = []

    def file(self, path: str) -> Report:
        parent, _, name = path.rpartition("/")
        folder = scan.folder(self._backend, parent)
        if name in folder.pointers:
            self._pointer(folder, name, folder.pointers[name])
        elif name in folder.damaged:
            self._damaged(folder, name, folder.damaged[name], self._sets(folder))
        return self._report(path, 1, 1)

    def tree(self, path: str) -> Report:
        self._folders = {folder.path: folder for folder in scan.walk(self._backend, path)}
        for folder in self._folders.values():
            for pointer in folder.pointers.values():
                self._named.add((posixpath.normpath(join(folder.path, pointer.dir)), pointer.uuid))
            if commit.NAME in folder.entries:
                self._read_commit(folder.path)
        for store, above, rest in commit.above(self._backend, path):
            try:
                manifest = commit.read(store, above)
            except (DataError, NotFoundError):
                continue
            # the folder, as far as it is in this store, and its path in the manifest
            inside = store is self._backend
            base = "" if inside else rest.removesuffix(path).strip("/")
            self._list_committed(above if inside else "", manifest, base)
        for folder in self._folders.values():
            self._folder(folder)
        for where, manifest in self._commits.items():
            self._commit(where, manifest)
        files = sum(len(it.plain) + len(it.pointers) + len(it.damaged) for it in self._folders.values())
        return self._report(path, len(self._folders), files)

    def _report(self, path: str, folders: int, files: int) -> Report:
        order = sorted(self._findings, key=lambda finding: (finding.path, finding.kind))
        return Report(url=self._backend.url, path=path, folders=folders, files=files, findings=tuple(order))

    def _add(self, kind: str, level: Level, path: str, detail: str, **more: str | int | float) -> None:
        made = {"kind": kind, "level": level, "path": path, "detail": detail, **more}
        self._findings.append(msgspec.convert(made, Finding))

    # -- manifests ------------------------------------------------------------------------------------------------

    def _read_commit(self, folder: str) -> None:
        try:
            self._commits[folder] = commit.read(self._backend, folder)
            self._list_committed(folder, self._commits[folder])
        except DataError as exc:
            self._add("damaged-commit", "error", join(folder, commit.NAME), exc.message)

    def _list_committed(self, folder: str, manifest: Commit, base: str = "") -> None:
        """``folder`` is that of the manifest, or with ``base`` the folder which has that path in the manifest."""
        for file in manifest.files:
            if file.uuid and file.path.startswith(f"{base}/" if base else ""):
                path = join(folder, file.path.removeprefix(base).strip("/"))
                self._committed[path.rpartition("/")[0], file.uuid] = file

    def _commit(self, folder: str, manifest: Commit) -> None:
        for file in manifest.files:
            path = join(folder, file.path)
            parent, _, name = path.rpartition("/")
            seen = self._folders.get(parent)
            if seen is None or name not in seen.entries:
                self._add("commit-lacks-file", "error", path, f"{join(folder, commit.NAME)} lists it")
                continue
            pointer = seen.pointers.get(name)
            found = (pointer.size, pointer.uuid) if pointer else (seen.entries[name].size, "")
            if name not in seen.damaged and found != (file.size, file.uuid):
                self._add("commit-other-file", "error", path, f"changed after {join(folder, commit.NAME)} was written")

    # -- one folder -----------------------------------------------------------------------------------------------

    def _folder(self, folder: Folder) -> None:
        sets = self._sets(folder)
        for name, pointer in folder.pointers.items():
            self._pointer(folder, name, pointer)
        for name, damaged in folder.damaged.items():
            self._damaged(folder, name, damaged, sets)
        claimed = {uuid for name in folder.damaged if (uuid := self._set_of(folder, name, sets))}
        now = folder
        if any(isinstance(whole, Whole) for whole in sets.values()):
            # they may have been completed and published since the folder was listed; what is whole now is named now
            now = scan.folder(self._backend, folder.path, known=folder)
        for uuid, whole in sets.items():
            if uuid not in claimed:
                self._unnamed(now if isinstance(whole, Whole) else folder, uuid, whole)
        self._temporaries(folder)
        for entry in folder.strange:
            path = join(folder.path, entry.name)
            self._add("unknown-file", "note", path, "hidden by its name, and not made by bootseer", size=entry.size)
        for entry in folder.stray:
            self._add("unknown-file", "note", join(folder.store, entry.name), "not made by bootseer", size=entry.size)
        if newest.NAME in folder.entries:
            self._latest(folder)

    def _sets(self, folder: Folder) -> dict[str, Whole | str]:
        """The sets of stripes that no pointer names; those that are not whole by the reason why."""
        found: dict[str, Whole | str] = {}
        for uuid, stripes in folder.stripes.items():
            if (folder.store, uuid) in self._named or folder.owners(uuid):
                continue
            try:
                found[uuid] = scan.inspect(self._backend, folder.path, uuid, list(stripes))
            except (DataError, ConfigError) as exc:
                found[uuid] = exc.message
        return found

    def _set_of(self, folder: Folder, name: str, sets: dict[str, Whole | str]) -> str:
        """The set of the damaged pointer ``name``: by the uuid in it, by COMMIT, or the only one of its name."""
        if (uuid := folder.damaged[name].uuid) in sets:
            return uuid
        for it in sets:
            if (listed := self._committed.get((folder.path, it))) and listed.path.rpartition("/")[2] == name:
                return it
        same = [it for it, whole in sets.items() if isinstance(whole, Whole) and whole.name == name]
        return same[0] if len(same) == 1 and not folder.damaged[name].uuid else ""

    def _damaged(self, folder: Folder, name: str, damaged: Damaged, sets: dict[str, Whole | str]) -> None:
        uuid = self._set_of(folder, name, sets)
        whole = sets.get(uuid, "its stripes cannot be told")
        repair = f"rebuild it from {folder.store}/{uuid}" if isinstance(whole, Whole) else ""
        detail = damaged.message if isinstance(whole, Whole) else f"{damaged.message}; {whole}"
        self._add("damaged-pointer", "error", join(folder.path, name), detail, uuid=uuid, repair=repair)

    def _unnamed(self, folder: Folder, uuid: str, whole: Whole | str) -> None:
        if isinstance(whole, Whole) and (folder.owners(uuid) or uuid not in folder.stripes):
            return
        path, stripes = f"{folder.store}/{uuid}", folder.stripes[uuid]
        more: dict[str, str | int | float] = {
            "uuid": uuid,
            "size": sum(entry.size for entry in stripes.values()),
            "age": self._age(folder, uuid),
        }
        listed = self._committed.get((folder.path, uuid))
        if isinstance(whole, Whole) and (listed or self._is_lost(folder, uuid, whole)):
            name = listed.path.rpartition("/")[2] if listed else whole.name
            if name and name not in folder.entries:
                target = join(folder.path, name)
                self._add("lost-pointer", "error", target, f"{path} is whole", repair="rebuild it", **more)
                return
            target = join(folder.path, f"recovered-{uuid}")
            why = f"{name} is another file" if name else "its stripes do not say its name"
            self._add("lost-pointer", "error", target, f"{path} is whole, {why}", repair="rebuild it", **more)
        elif listed or any(not damaged.uuid for damaged in folder.damaged.values()):
            why = "a COMMIT lists it" if listed else "a pointer of this folder is damaged"
            self._add("kept-stripes", "note", path, f"no pointer names it, but {why}", **more)
        else:
            detail = whole if isinstance(whole, str) else self._why_garbage(folder, uuid, whole)
            self._add("unreferenced-stripes", "garbage", path, f"{len(stripes)} stripes: {detail}", **more)

    def _is_lost(self, folder: Folder, uuid: str, whole: Whole) -> bool:
        """Whether a whole set without pointer had one: not when something says that it is an old or unfinished one."""
        if folder.temporaries_of(uuid):
            return False
        pointer = folder.pointers.get(whole.name)
        if pointer is not None:
            return pointer.epoch < whole.pointer.epoch
        plain = folder.plain.get(whole.name)
        return plain is None or not plain.size

    def _why_garbage(self, folder: Folder, uuid: str, whole: Whole) -> str:
        if folder.temporaries_of(uuid):
            return f"the writer of {whole.name or 'its file'} did not finish, or was removing it"
        return f"an older version of {whole.name}"

    def _age(self, folder: Folder, uuid: str) -> float:
        """Seconds since anything of the set ``uuid`` was modified."""
        entries = [*folder.stripes.get(uuid, {}).values(), *folder.temporaries_of(uuid)]
        return self._now - max(entry.mtime for entry in entries)

    def _temporaries(self, folder: Folder) -> None:
        for name, entry in folder.temporaries.items():
            path, uuid = join(folder.path, name), scan.owner(name)
            age = self._now - scan.youngest(self._backend, path, entry)
            if uuid in folder.stripes and not folder.owners(uuid):
                age = self._age(folder, uuid)  # as long as its writer writes stripes, the writer is under way
            what = "a folder that was being removed, or of a measurement" if entry.is_dir else "of an unfinished write"
            self._add("temporary", "garbage", path, what, uuid=uuid, size=entry.size, age=age)
        for uuid, trash in folder.trash.items():
            if not folder.owners(uuid):
                size, age = sum(it.size for it in trash.values()), self._now - max(it.mtime for it in trash.values())
                path = f"{folder.store}/{scan.TRASH}{uuid}"
                self._add("collected-stripes", "garbage", path, "of an unfinished gc", uuid=uuid, size=size, age=age)

    # -- one striped file -----------------------------------------------------------------------------------------

    def _pointer(self, folder: Folder, name: str, pointer: Pointer) -> None:
        path = join(folder.path, name)
        if not pointer.owns_stripes(path):
            if pointer.name in folder.owners(pointer.uuid):
                detail = f"reads the stripes of {pointer.name}, and only as long as that is there"
                self._add("pointer-copy", "note", path, detail, uuid=pointer.uuid)
            elif pointer.dir == layout.FOLDER and len(folder.owners(pointer.uuid)) == 1:
                detail = f"written as {pointer.name!r}: its stripes stay when it is removed"
                self._add("renamed-file", "note", path, detail, uuid=pointer.uuid, repair="let it say its name")
        before = len(self._findings)
        there = folder.stripes.get(pointer.uuid, {}) if pointer.dir == layout.FOLDER else None
        with ThreadPoolExecutor(min(_THREADS, pointer.width)) as pool:
            list(pool.map(lambda index: self._stripe(folder, path, pointer, index, there), range(pointer.width)))
        if len(self._findings) > before and not self._is_still(path, pointer):
            del self._findings[before:]  # it was replaced or removed while its stripes were looked at

    def _is_still(self, path: str, pointer: Pointer) -> bool:
        try:
            return read_pointer(self._backend, path) == pointer
        except (DataError, NotFoundError):
            return False

    def _stripe(self, folder: Folder, path: str, pointer: Pointer, index: int, there: dict[int, Entry] | None) -> None:
        name = pointer.stripe_path(path, index)
        more = {"uuid": pointer.uuid}
        try:
            if there is not None and index not in there:
                raise NotFoundError(name)
            size = there[index].size if there is not None else self._backend.stat(name).size
            if size != (expected := pointer.geometry.stripe_length(index)):
                self._add("wrong-length", "error", path, f"{name} has {size} bytes of {expected}", **more)
                return
            header = scan.read_header(self._backend, name)
        except NotFoundError:
            trash = index in folder.trash.get(pointer.uuid, {})
            repair = f"rename it back from {folder.trash_path(pointer.uuid, index)}" if trash else ""
            self._add("missing-stripe", "error", path, f"{name} is missing", repair=repair, **more)
            return
        except DataError as exc:
            self._add("damaged-header", "error", path, exc.message, **more)
            return
        try:
            footer, crc = scan.read_footer(self._backend, name)
        except (DataError, NotFoundError) as exc:
            self._add("damaged-footer", "error", path, exc.message, **more)
            return
        said = (header.uuid.hex(), header.stripe, header.width, header.unit, header.epoch)
        wanted = (pointer.uuid, index, pointer.width, pointer.unit, pointer.epoch)
        if said != wanted or (crc, footer.stripe, footer.size) != (pointer.footers[index], index, pointer.size):
            self._add("foreign-stripe", "error", path, f"{name} is not stripe {index} of it", **more)

    # -- LATEST ---------------------------------------------------------------------------------------------------

    def _latest(self, folder: Folder) -> None:
        path = join(folder.path, newest.NAME)
        if folder.entries[newest.NAME].is_dir or not newest.is_hint(read_all(self._backend, path, limit=64)):
            return
        try:
            name = newest.find(self._backend, folder.path, quiet=True).rpartition("/")[2]
        except NotFoundError:
            name = ""
        try:
            hint = newest.read(self._backend, folder.path)
            if hint is None or hint.checkpoint == name:
                return
            detail = f"it names {hint.checkpoint}, the newest complete checkpoint is {name or 'none'}"
        except UnavailableError:
            raise
        except BootseerError as exc:
            detail = exc.message
        repair = f"let it name {name}" if name else ""
        self._add("wrong-latest", "error", path, detail, repair=repair)
