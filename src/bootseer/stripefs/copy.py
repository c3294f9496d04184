"""Copies between stores and imports of plain files: real copies with stripes of their own, whole or not at all. One
that was broken off is resumed file by file: what is there with the same content stays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict, Unpack

import msgspec

from bootseer import faults
from bootseer.backends.interface import FILE_MODE, Permissions, exists, join
from bootseer.errors import DataError, NotFoundError, NotWritableError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.checkpoint.commit import Commit
from bootseer.stripefs.files import rights
from bootseer.stripefs.files.readahead import in_order
from bootseer.stripefs.files.reader import refuse_unfinished
from bootseer.stripefs.files.stat import FileStat
from bootseer.stripefs.files.striped import StripedFile
from bootseer.stripefs.layout import Pointer

if TYPE_CHECKING:
    from bootseer.stripefs.store import StripeFS

Progress = Callable[[int, int], None]


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """One file that was copied. ``skipped``: why it was not, "" when it was; ``path``: of the copy."""

    path: str
    size: int
    digest: str
    striped: bool
    skipped: str = ""


class Options(TypedDict, total=False):
    """``width`` and ``unit``: those of the source when 0, and the defaults for a plain one. ``verify``: read a copy
    back before it is published. ``resume``: leave a copy that has the same content. ``force``: copy also into a
    checkpoint with COMMIT."""

    width: int
    unit: int
    verify: bool
    resume: bool
    force: bool


def copy_file(
    src: StripeFS,
    path: str,
    dst: StripeFS,
    target: str,
    *,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Copied:
    """Copy one file to ``target``, atomically; a file there is replaced.

    ``target`` may be the plain file ``path`` itself: it is replaced by a striped one unless it was changed meanwhile,
    or a COMMIT lists it. `NotWritableError` for a plain file that its writer has not closed, and without ``force`` for
    a ``target`` in a committed checkpoint."""
    stat, verify = src.stat(path), options.get("verify", False)
    in_place = _in_place(src, path, dst, target)
    if in_place and (why := _stays(src, stat)):
        return Copied(path=target, size=stat.size, digest=stat.digest, striped=stat.striped, skipped=why)
    if not stat.striped:
        with src.open(path) as file:
            refuse_unfinished(file)
    expected = stat.digest or src.committed_digest(path)
    if not in_place:
        if options.get("resume") and (there := _same(src, stat, expected, dst, target)):
            return there
        if not options.get("force"):
            dst.refuse_committed(target)
    width = options.get("width") or stat.width or layout.WIDTH
    unit = options.get("unit") or stat.unit or layout.UNIT

    def check(pointer: Pointer | None) -> None:
        """The content that was read is the one that was written."""
        faults.point("stripefs.copy.check")
        if version and dst.backend.stat(target).version != version:
            raise NotWritableError(f"{target} was changed while it was imported", hint="run again")
        if old is not None:
            new = dst.backend.stat(out.temporary).permissions
            rights.keep_owner(dst.backend, target, pointer, old, new, at=out.temporary)
        if expected not in ("", out.digest):
            raise DataError(f"{path} does not have its digest", hint="restore it from a copy")
        if verify and pointer is not None:
            with StripedFile(dst.backend, target, pointer) as copy:
                copy.check_rest()
                if commit.digest_of_open(copy) != pointer.digest:
                    raise DataError(f"{target} reads other than it was written")

    with src.open(path) as file:
        version = ""
        old: Permissions | None = None
        if in_place:
            if dst.backend.writers.has_open(target):
                raise NotWritableError(
                    f"{target} is still being written", hint="run again when its writer has closed it"
                )
            entry = dst.backend.stat(target)
            version, old = entry.version, entry.permissions
        mode = old.kept if old else FILE_MODE
        with dst.create(target, width=width, unit=unit, mode=mode, before=check) as out:
            for piece in in_order(file):
                out.write(piece)
                if progress:
                    progress(out.size, file.size)
            written = out.finish()
    if verify and not written.uuid and commit.digest_of(dst.backend, target) != written.digest:
        raise DataError(f"{target} reads other than it was written")
    return Copied(path=target, size=written.size, digest=written.digest, striped=bool(written.uuid))


def _in_place(src: StripeFS, path: str, dst: StripeFS, target: str) -> bool:
    return src.url == dst.url and path == target


def _stays(src: StripeFS, stat: FileStat) -> str:
    """Why a file is not made striped where it is, "" when it is."""
    if stat.striped:
        return "striped already"
    if stat.size < layout.PLAIN_BELOW:
        return "small files stay plain"
    return "listed by a COMMIT as it is: import to another place" if src.committed_digest(stat.path) else ""


def copy_tree(
    src: StripeFS,
    path: str,
    dst: StripeFS,
    target: str,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Unpack[Options],
) -> list[Copied]:
    """`copy_file` for every file at or below ``path``; ``progress`` is called with (path, bytes done, bytes in all).

    A COMMIT speaks of the stripes of its own folder, so a copy gets one of its own, last, after its files were compared
    with the one of the source. Before the first file `NotWritableError` when files would go into a checkpoint with
    COMMIT; ``resume`` completes one that has the same content, ``force`` takes the COMMIT away first."""

    def one(name: str, there: str) -> Copied:
        report = functools.partial(progress, name) if progress else None
        return copy_file(src, name, dst, there, progress=report, **options)

    if not src.stat(path).is_dir:
        return [one(path, target)]
    in_place = _in_place(src, path, dst, target)
    if not in_place and src.url == dst.url and f"{target}/".startswith(f"{path}/" if path else ""):
        raise NotWritableError(f"cannot copy {path or src.url} into itself")
    names = src.files(path)
    checkpoints = [name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == commit.NAME]
    for folder in checkpoints:
        src.checkpoint(folder)  # a damaged one is an error before the first file

    def of_copy(name: str) -> str:
        return join(target, name.removeprefix(path).strip("/"))

    if not in_place:
        folders = {name.rpartition("/")[0] for name in names}
        _clear(dst, {of_copy(folder): folder in checkpoints for folder in folders}, options)
    done: list[Copied] = []
    for name in names:
        if name.rpartition("/")[2] != commit.NAME:
            done.append(one(name, of_copy(name)))
    if not in_place:
        for folder in sorted(checkpoints, key=lambda folder: (-len(folder), folder)):  # those in others before them
            commit_copy(src, folder, dst, of_copy(folder), resume=options.get("resume", False))
    return done


def _clear(dst: StripeFS, folders: Mapping[str, bool], options: Options) -> None:
    """Refuse a tree that would break a checkpoint before its first file; with ``force`` make that none first.
    ``folders``: those that files are copied to, with whether they become checkpoints."""
    for folder, checkpoint in sorted(folders.items()):
        manifest = join(folder, commit.NAME)
        if not options.get("force"):
            if not options.get("resume"):
                dst.refuse_committed(folder)
        elif checkpoint and exists(dst.backend, manifest):
            dst.remove(manifest, force=True)


def commit_copy(src: StripeFS, folder: str, dst: StripeFS, target: str, *, resume: bool = False) -> None:
    """Give ``target``, to which all files of the checkpoint ``folder`` were copied, a COMMIT of its own.
    `NotWritableError` when it has one (without ``resume``); `DataError`, and no COMMIT, when a file is not what
    ``folder`` says. The COMMIT of a checkpoint in ``folder`` has a copy of its own, which is another."""
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
        dst.commit(target, before=compare, only={file.path for file in wanted})
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
