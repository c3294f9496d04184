"""Copies between stores and imports of plain files: real copies with stripes of their own, whole or not at all.

A copy that was broken off is resumed file by file: what is there with the same content stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from bootseer import faults
from bootseer.errors import DataError, NotFoundError, NotWritableError
from bootseer.storage.interface import Backend, exists, join, read_all
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit, newest
from bootseer.stripefs.checkpoint.commit import Commit
from bootseer.stripefs.files.readahead import in_order
from bootseer.stripefs.files.reader import ChunkFile, StripedFile, open_file, refuse_unfinished
from bootseer.stripefs.layout import Pointer

if TYPE_CHECKING:
    from bootseer.stripefs.store import FileStat, StripeFS

Progress = Callable[[int, int], None]


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """One file that was copied. ``skipped``: why it was not, "" when it was; ``path``: of the copy."""

    path: str
    size: int
    digest: str
    striped: bool
    skipped: str = ""


class _Check:
    """What must hold before a copy is published: the content that was read is the one that was written."""

    def __init__(self, source: ChunkFile, expected: str, backend: Backend, target: str, verify: bool) -> None:
        self._source, self._expected, self._backend = source, expected, backend
        self._target, self._verify = target, verify
        self.version = ""
        self.plain = blake3()  # of what was read, when the copy is small enough to be stored plain

    def __call__(self, pointer: Pointer | None) -> None:
        faults.point("stripefs.copy.check")
        if self.version and self._backend.stat(self._target).version != self.version:
            raise NotWritableError(f"{self._target} was changed while it was imported", hint="run again")
        if pointer is None:
            if self._expected and self.plain.hexdigest() != self._expected:
                raise DataError(f"{self._source.path} does not have its digest", hint="restore it from a copy")
            return
        if pointer.digest != (self._expected or pointer.digest):
            raise DataError(f"{self._source.path} does not have its digest", hint="restore it from a copy")
        if self._verify:
            file = StripedFile(self._backend, self._target, pointer)
            with file:
                file.check_headers()
                if commit.digest_of_open(file) != pointer.digest:
                    raise DataError(f"{self._target} reads other than it was written")


def copy_file(
    src: StripeFS,
    path: str,
    dst: StripeFS,
    target: str,
    *,
    width: int = 0,
    unit: int = 0,
    verify: bool = False,
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Copied:
    """Copy one file to ``target``, atomically; a file there is replaced.

    ``width`` and ``unit``: those of the source when 0, and the defaults for a plain one. ``verify``: read the copy
    back before it is published. ``resume``: leave a copy that has the same content. ``target`` may be the plain file
    ``path`` itself: then it is replaced by a striped one, unless it was changed meanwhile. `NotWritableError` for a
    plain file that its writer has not closed, and without ``force`` for a ``target`` in a committed checkpoint. In
    place, a file that a COMMIT lists is left as it is.
    """
    stat = src.stat(path)
    in_place = src.url == dst.url and path == target
    if in_place and (stat.striped or stat.size < layout.PLAIN_BELOW):
        why = "striped already" if stat.striped else "small files stay plain"
        return Copied(path=target, size=stat.size, digest=stat.digest, striped=stat.striped, skipped=why)
    if in_place and src.committed_digest(path):
        why = "listed by a COMMIT as it is: import to another place"
        return Copied(path=target, size=stat.size, digest=stat.digest, striped=stat.striped, skipped=why)
    if not stat.striped:
        with open_file(src.backend, path) as file:
            refuse_unfinished(file)
    expected = stat.digest or src.committed_digest(path)
    if resume and not in_place and (there := _same(src, stat, expected, dst, target)):
        return there
    if not in_place and not force:
        dst.refuse_committed(target)
    with open_file(src.backend, path) as file:
        check = _Check(file, expected, dst.backend, target, verify)
        if in_place:
            _refuse_open(dst.backend, target)
            check.version = dst.backend.stat(target).version
        with dst.create(
            target, width=width or stat.width or layout.WIDTH, unit=unit or stat.unit or layout.UNIT, before=check
        ) as out:
            for piece in in_order(file):
                out.write(piece)
                if file.size < layout.PLAIN_BELOW:
                    check.plain.update(piece)
                if progress:
                    progress(out.size, file.size)
            written = out.finish()
    if verify and not written.uuid and commit.digest_of(dst.backend, target) != written.digest:
        raise DataError(f"{target} reads other than it was written")
    return Copied(path=target, size=written.size, digest=written.digest, striped=bool(written.uuid))


def copy_tree(
    src: StripeFS,
    path: str,
    dst: StripeFS,
    target: str,
    *,
    width: int = 0,
    unit: int = 0,
    verify: bool = False,
    resume: bool = False,
    force: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Copied]:
    """`copy_file` for every file at or below ``path``; ``progress`` is called with (path, bytes done, bytes in all).

    A COMMIT speaks of the stripes of its own folder, so a copy gets one of its own: last, for each checkpoint below
    ``path``, after its files were compared with the one of the source. Before the first file `NotWritableError` when
    files would go into a checkpoint with COMMIT; ``resume`` completes one that has the same content, ``force`` takes
    the COMMIT of a checkpoint that is replaced away first.
    """
    if not src.stat(path).is_dir:
        report = (lambda done, total: progress(path, done, total)) if progress else None
        flags = {"verify": verify, "resume": resume, "force": force}
        return [copy_file(src, path, dst, target, width=width, unit=unit, progress=report, **flags)]
    in_place = src.url == dst.url and path == target
    if not in_place and src.url == dst.url and f"{target}/".startswith(f"{path}/" if path else ""):
        raise NotWritableError(f"cannot copy {path or src.url} into itself")
    done: list[Copied] = []
    names = src.files(path)
    manifests = {name for name in names if name.rpartition("/")[2] == commit.NAME and _is_checkpoint(src, name)}
    if not in_place:
        _clear(src, path, dst, target, names, resume=resume, force=force)
    for name in names:
        last = name.rpartition("/")[2]
        if name in manifests:
            continue
        if last != newest.NAME or not newest.is_hint(read_all(src.backend, name, limit=64)):
            there = join(target, name.removeprefix(path).strip("/"))
            flags = {"verify": verify, "resume": resume, "force": force}
            done += copy_tree(src, name, dst, there, width=width, unit=unit, progress=progress, **flags)
    if in_place:
        return done
    checkpoints = [name.rpartition("/")[0] for name in manifests]
    for folder in sorted(checkpoints, key=lambda folder: (-len(folder), folder)):  # those in others before them
        there = join(target, folder.removeprefix(path).strip("/"))
        commit_copy(src, folder, dst, there, resume=resume)
    return done


def _clear(
    src: StripeFS, path: str, dst: StripeFS, target: str, names: list[str], *, resume: bool, force: bool
) -> None:
    """Refuse a tree that would break a checkpoint before its first file; with ``force`` make that none first."""
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        there = join(target, folder.removeprefix(path).strip("/"))
        if force:
            if join(folder, commit.NAME) in names and exists(dst.backend, join(there, commit.NAME)):
                dst.remove(join(there, commit.NAME), force=True)
        elif not resume:
            dst.refuse_committed(there)


def _is_checkpoint(fs: StripeFS, name: str) -> bool:
    """Whether a file of that name is a manifest; a damaged one is an error."""
    folder = name.rpartition("/")[0]
    fs.checkpoint(folder)
    return True


def commit_copy(src: StripeFS, folder: str, dst: StripeFS, target: str, *, resume: bool = False) -> None:
    """Give ``target``, to which all files of the checkpoint ``folder`` were copied, a COMMIT of its own.

    `NotWritableError` when it has one (without ``resume``); `DataError` when a file is not what ``folder`` says, and
    then no COMMIT is made. The COMMIT of a checkpoint in ``folder`` has a copy of its own, which is another.
    """
    wanted = src.checkpoint(folder).files
    nested = {
        file.path
        for file in wanted
        if file.path.endswith(f"/{commit.NAME}") and commit.is_manifest(src.backend, join(folder, file.path))
    }

    def compare(found: Commit) -> None:
        there = {file.path: (file.size, file.digest) for file in found.files}
        for file in wanted:
            if file.path not in there:
                why = f"it lacks {file.path}"
            elif file.path not in nested and there[file.path] != (file.size, file.digest):
                why = f"{file.path} differs"
            else:
                continue
            raise DataError(f"the copy {target} is not what {folder} was when it was committed: {why}")

    try:
        found = dst.checkpoint(target)
    except (DataError, NotFoundError):
        dst.commit(target, before=compare)
        return
    if not resume:
        raise NotWritableError(f"checkpoint {target} has a COMMIT already", hint="copy to a new folder")
    compare(found)


def _same(src: StripeFS, stat: FileStat, expected: str, dst: StripeFS, target: str) -> Copied | None:
    try:
        there = dst.stat(target)
    except NotFoundError:
        return None
    if there.is_dir or there.size != stat.size:
        return None
    digest = there.digest or commit.digest_of(dst.backend, target)
    if digest != (expected or commit.digest_of(src.backend, stat.path)):
        return None
    return Copied(path=target, size=there.size, digest=digest, striped=there.striped, skipped="there already")


def _refuse_open(backend: Backend, path: str) -> None:
    if backend.is_open(path):
        raise NotWritableError(f"{path} is still being written", hint="run again when its writer has closed it")
