"""Checking a striped store: what is lost, what is damaged, what is garbage. Nothing is changed here. Contents are not
read (`StripeFS.verify` does that), except the headers and footers of stripes. What makes stripes garbage is said in
docs/internals/stripe.md; when in doubt they are kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from bootseer.backends.interface import Backend, clean, join, read_all
from bootseer.backends.pool import parallel
from bootseer.errors import ConfigError, DataError, NotFoundError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.checkpoint.commit import Commit
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.layout import Pointer
from bootseer.stripefs.maintenance import scan
from bootseer.stripefs.maintenance.scan import Folder, Stripe
from bootseer.stripefs.maintenance.verdicts import Facts, verdict

Level = Literal["error", "garbage", "note"]

_GARBAGE = ("unreferenced-stripes", "collected-stripes", "temporary")
_NOTES = ("pointer-copy", "kept-stripes", "unknown-file")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it should be; ``kind`` is a name of the table in docs/howto/stripefs.md. ``path``: of
    the file; for a set of stripes without their index. ``age``: seconds since it was last modified (garbage only);
    ``size``: bytes that it takes. ``repair``: what `repair` would do about it, "" for nothing."""

    kind: str
    level: Level
    path: str
    detail: str
    uuid: str = ""
    size: int = 0
    age: float = 0.0
    repair: str = ""


def _finding(
    kind: str, path: str, detail: str, uuid: str = "", *, size: int = 0, age: float = 0.0, repair: str = ""
) -> Finding:
    level: Level = "garbage" if kind in _GARBAGE else "note" if kind in _NOTES else "error"
    return Finding(kind=kind, level=level, path=path, detail=detail, uuid=uuid, size=size, age=age, repair=repair)


class FsckReport(msgspec.Struct, frozen=True, kw_only=True):
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


def fsck(backend: Backend, path: str = "") -> FsckReport:
    """Check the folder ``path`` and all below it, or one file. Raises `NotFoundError`, and `UnavailableError` for a
    storage that does not answer."""
    path, now = clean(path), time.time()  # what is touched while this goes on is young
    if backend.stat(path).is_dir:
        folders = {folder.path: folder for folder in scan.walk(backend, path)}
        files = sum(len(it.plain) + len(it.pointers) + len(it.damaged) for it in folders.values())
        findings = _Check(backend, folders, now).tree(path)
    else:
        parent, _, name = path.rpartition("/")
        folders, files = {parent: scan.folder(backend, parent)}, 1
        findings = _Check(backend, folders, now).file(folders[parent], name)
    order = sorted(findings, key=lambda finding: (finding.path, finding.kind))
    return FsckReport(url=backend.url, path=path, folders=len(folders), files=files, findings=tuple(order))


class _Check:
    """The findings in ``folders``, by path, all at and below one folder or that of a single file. Ages count to
    ``now``."""

    def __init__(self, backend: Backend, folders: dict[str, Folder], now: float) -> None:
        self._backend, self._folders, self._now = backend, folders, now
        self._base = backend.whole()[1]
        self._listed: dict[tuple[str, str], str] = {}
        """Names of the files that COMMITs list, by (path of their folder in the whole storage, uuid)."""
        self._unread: list[str] = []
        """Paths in the whole storage of the folders with a damaged COMMIT."""

    def file(self, folder: Folder, name: str) -> Iterator[Finding]:
        if name in folder.pointers:
            yield from self._pointer(folder, name, folder.pointers[name])
        elif name in folder.damaged:
            sets = self._sets(folder)
            yield self._damaged(folder, name, self._set_of(folder, name, sets), sets)
        else:
            for uuid, found in self._sets(folder).items():
                if isinstance(found, Pointer) and found.name == name:
                    yield self._unnamed(folder, uuid, found, "", remnants=self._has_remnants(folder))

    def tree(self, path: str) -> Iterator[Finding]:
        for folder in self._folders.values():
            if commit.NAME in folder.entries:
                yield from self._commit(folder.path)
        for store, above, _ in commit.above(self._backend, path):
            with contextlib.suppress(DataError, NotFoundError):
                self._read_commit(store, above)
        for folder in self._folders.values():
            yield from self._folder(folder)

    def _read_commit(self, store: Backend, folder: str) -> Commit:
        full = join(self._base, folder) if store is self._backend else folder
        try:
            manifest = commit.read(store, folder)
        except DataError:
            if commit.is_manifest(store, join(folder, commit.NAME)):
                self._unread.append(full)
            raise
        for file in manifest.files:
            parent, _, name = join(full, file.path).rpartition("/")
            self._listed[parent, file.uuid] = name
        return manifest

    def _listed_name(self, folder: Folder, uuid: str) -> str:
        """The name that a COMMIT says of the file with the stripes ``uuid``, "" when none lists it."""
        return self._listed.get((join(self._base, folder.path), uuid), "")

    def _commit(self, folder: str) -> Iterator[Finding]:
        where = join(folder, commit.NAME)
        try:
            manifest = self._read_commit(self._backend, folder)
        except DataError as exc:
            yield _finding("damaged-commit", where, exc.message)
            return
        for file in manifest.files:
            path = join(folder, file.path)
            parent, _, name = path.rpartition("/")
            seen = self._folders.get(parent)
            if seen is None or name not in seen.entries:
                yield _finding("commit-lacks-file", path, f"{where} lists it")
                continue
            pointer = seen.pointers.get(name)
            found = (pointer.size, pointer.uuid) if pointer else (seen.entries[name].size, "")
            if name not in seen.damaged and found != (file.size, file.uuid):
                yield _finding("commit-other-file", path, f"changed after {where} was written")

    def _folder(self, folder: Folder) -> Iterator[Finding]:
        striped = [it for name, pointer in folder.pointers.items() for it in self._pointer(folder, name, pointer)]
        sets = self._sets(folder)
        claimed = {name: self._set_of(folder, name, sets) for name in folder.damaged}
        striped += [self._damaged(folder, name, uuid, sets) for name, uuid in claimed.items()]
        yield from striped
        unsure, remnants = self._why_unsure(folder, striped), False
        if any(isinstance(found, Pointer) for found in sets.values()):
            # they may have been completed and published since the folder was listed; what is whole now is named now
            folder = scan.folder(self._backend, folder.path, known=folder)
            remnants = self._has_remnants(folder)
        for uuid in sets.keys() & folder.stripes.keys() - set(claimed.values()):
            if not folder.owners(uuid):
                yield self._unnamed(folder, uuid, sets[uuid], unsure, remnants=remnants)
        yield from self._temporaries(folder, unsure)
        for path, entry in folder.unknown.items():
            yield _finding("unknown-file", path, "hidden by its name, and not made by bootseer", size=entry.size)

    def _sets(self, folder: Folder) -> dict[str, Pointer | str]:
        """The sets of stripes that no pointer names: the pointer that each had, or why it is not whole."""
        found: dict[str, Pointer | str] = {}
        for uuid, stripes in folder.stripes.items():
            if folder.owners(uuid):
                continue
            try:
                found[uuid] = scan.inspect(self._backend, folder.path, uuid, stripes)
            except (DataError, ConfigError) as exc:
                found[uuid] = exc.message
        return found

    def _set_of(self, folder: Folder, name: str, sets: dict[str, Pointer | str]) -> str:
        """uuid of the set of the damaged pointer ``name``: by what is left of it, by COMMIT, or the only one of its
        name; "" when that cannot be told."""
        if (uuid := folder.damaged[name].uuid) in sets:
            return uuid
        if listed := [it for it in sets if self._listed_name(folder, it) == name]:
            return listed[0]
        same = [it for it, found in sets.items() if isinstance(found, Pointer) and found.name == name]
        return same[0] if len(same) == 1 and not uuid else ""

    def _damaged(self, folder: Folder, name: str, uuid: str, sets: dict[str, Pointer | str]) -> Finding:
        detail, repair = folder.damaged[name].message, ""
        if isinstance(found := sets.get(uuid, "its stripes cannot be told"), Pointer):
            repair = f"rebuild it from {folder.store}/{uuid}"
        else:
            detail += f"; {found}"
        return _finding("damaged-pointer", join(folder.path, name), detail, uuid, repair=repair)

    def _why_unsure(self, folder: Folder, striped: list[Finding]) -> str:
        """Why stripes that look like garbage may be all that is left of a file, "" when they cannot."""
        if any(it.level == "error" for it in striped):
            return "a striped file of this folder is damaged"
        full = f"{join(self._base, folder.path)}/"
        damaged = any(not above or full.startswith(f"{above}/") for above in self._unread)
        return "a COMMIT that may list it is damaged" if damaged else ""

    def _unnamed(self, folder: Folder, uuid: str, found: Pointer | str, unsure: str, *, remnants: bool) -> Finding:
        """A set of stripes that no pointer names; ``found``: the pointer that it had, or why it is not whole."""
        path, stripes = f"{folder.store}/{uuid}", folder.stripes[uuid]
        size, age = sum(entry.size for entry in stripes.values()), self._age(folder, uuid)
        listed, unfinished = self._listed_name(folder, uuid), uuid in folder.temporaries
        whole = found if isinstance(found, Pointer) else None
        now = folder.pointers.get(whole.name) if whole else None
        facts = Facts(
            whole=whole is not None,
            listed=bool(listed),
            unfinished=unfinished,
            replaced=whole is not None and now is not None and now.epoch >= whole.epoch,
            unsure=bool(unsure),
            remnants=remnants,
        )
        row = verdict(facts)
        if row.kind == "lost-pointer":
            assert whole is not None
            name, detail = listed or whole.name, f"{path} is whole"
            if not name or "/" in name or name in folder.entries:
                detail += f", {name} is another file" if name else ", its stripes do not say its name"
                name = f"recovered-{uuid}"
            target = join(folder.path, name)
            return _finding(row.kind, target, detail, uuid, size=size, age=age, repair="rebuild it")
        if isinstance(found, str):
            garbage = found
        elif unfinished:
            garbage = f"the writer of {found.name or 'its file'} did not finish, or was removing it"
        else:
            garbage = f"an older version of {found.name}"
        detail = f"{len(stripes)} stripes: {garbage}"
        if row.kind == "kept-stripes":
            detail = f"no pointer names it ({garbage}), but {row.why or unsure}"
        return _finding(row.kind, path, detail, uuid, size=size, age=age)

    def _has_remnants(self, folder: Folder) -> bool:
        """Whether a plain file of ``folder`` may be all that is left of a pointer."""
        limit = layout.MAX_REMNANT
        short = [name for name, entry in folder.plain.items() if entry.size <= limit]
        with contextlib.suppress(NotFoundError):
            return any(layout.is_remnant(read_all(self._backend, join(folder.path, it), limit=limit)) for it in short)
        return True  # one has changed since it was listed

    def _temporaries(self, folder: Folder, unsure: str) -> Iterator[Finding]:
        for uuid, entries in folder.temporaries.items():
            if unsure and (uuid in folder.stripes or uuid in folder.trash):
                continue  # kept with them
            writing = uuid in folder.stripes and not folder.owners(uuid)
            for entry in entries:
                path = join(folder.path, entry.name)
                what = (
                    "a folder that was being removed, or of a measurement" if entry.is_dir else "of an unfinished write"
                )
                # as long as its writer writes stripes, the writer is under way
                age = self._age(folder, uuid) if writing else self._now - scan.youngest(self._backend, path, entry)
                yield _finding("temporary", path, what, uuid, size=entry.size, age=age)
        for uuid, trash in folder.trash.items():
            if not folder.owners(uuid):
                size, path = sum(entry.size for entry in trash.values()), f"{folder.store}/{scan.TRASH}{uuid}"
                kind, detail = "collected-stripes", "of an unfinished gc"
                if unsure:
                    kind, detail = "kept-stripes", f"{detail}, but {unsure}"
                yield _finding(kind, path, detail, uuid, size=size, age=self._age(folder, uuid))

    def _age(self, folder: Folder, uuid: str) -> float:
        """Seconds since anything of the set ``uuid`` was modified."""
        stripes = [*folder.stripes.get(uuid, {}).values(), *folder.trash.get(uuid, {}).values()]
        return self._now - max(entry.mtime for entry in stripes + folder.temporaries.get(uuid, []))

    def _pointer(self, folder: Folder, name: str, pointer: Pointer) -> Iterator[Finding]:
        path, owners = join(folder.path, name), folder.owners(pointer.uuid)
        if pointer.name != name and pointer.name in owners:
            detail = f"reads the stripes of {pointer.name}, and only as long as that is there"
            yield _finding("pointer-copy", path, detail, pointer.uuid)
        found = parallel(lambda index: self._stripe(folder, path, pointer, index), range(pointer.width))
        if not any(found) or not self._is_still(path, pointer):  # it was replaced or removed meanwhile
            return
        if all(it is not None and it.kind == "missing-stripe" and not it.repair for it in found):
            detail = f"none of its stripes is in {folder.store}: it was copied or moved without them"
            yield _finding("stripes-elsewhere", path, detail, pointer.uuid)
        else:
            yield from filter(None, found)

    def _is_still(self, path: str, pointer: Pointer) -> bool:
        try:
            return read_pointer(self._backend, path) == pointer
        except (DataError, NotFoundError):
            return False

    def _stripe(self, folder: Folder, path: str, pointer: Pointer, index: int) -> Finding | None:
        """What is wrong with a stripe of the file at ``path``."""
        name, kind = pointer.stripe_path(path, index), "other-version"
        try:
            with contextlib.closing(self._backend.open(name)) as source:
                head = source.read(0, min(layout.HEADER_SIZE, source.size))
                layout.check_version(head, name)
                kind = "damaged-header"
                if source.size != (expected := pointer.geometry.stripe_length(index)):
                    detail = f"{name} has {source.size} bytes of {expected}"
                    return _finding("wrong-length", path, detail, pointer.uuid)
                header = layout.decode_header(head, name)
                kind = "damaged-footer"
                stripe = Stripe(header, *scan.read_footer(source, name, header.unit))
        except NotFoundError:
            trash = index in folder.trash.get(pointer.uuid, {})
            repair = f"rename it back from {folder.trash_path(pointer.uuid, index)}" if trash else ""
            return _finding("missing-stripe", path, f"{name} is missing", pointer.uuid, repair=repair)
        except DataError as exc:
            return _finding(kind, path, exc.message, pointer.uuid)
        if not stripe.belongs(pointer, index):
            return _finding("foreign-stripe", path, f"{name} is not stripe {index} of it", pointer.uuid)
        return None
