"""Renaming and removing in a striped store: one atomic step for whoever looks, stripes after it. A process that is
killed here leaves whole files, and garbage that `stripefs.maintenance` recognises: before a pointer goes, a temporary
file names its stripes."""

from __future__ import annotations

import contextlib
import logging
import uuid

from bootseer import faults
from bootseer.backends.interface import FILE_MODE, Backend, Permissions, exists, is_folder, join, write_file
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnsupportedError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.files import rights
from bootseer.stripefs.files.publication import alone
from bootseer.stripefs.files.readahead import in_order
from bootseer.stripefs.files.reader import ChunkFile, read_pointer, refuse_unfinished
from bootseer.stripefs.files.removal import UNFINISHED, owned_by, remove_stripes
from bootseer.stripefs.files.striped import open_file
from bootseer.stripefs.files.writer import StripeWriter
from bootseer.stripefs.layout import Pointer

_log = logging.getLogger(__name__)


def remove(backend: Backend, path: str) -> None:
    """Remove a file: first its pointer, then its stripes, as far as `remove_stripes` does."""
    pointer = _pointer(backend, path)
    if pointer is None:
        backend.stat(path)
        backend.delete(path)
        return
    owned = owned_by(backend, path)
    tmp = _set_aside(backend, path, pointer)
    faults.point("stripefs.remove.stripes")
    _discard(backend, path, pointer, owned, tmp)


def remove_tree(backend: Backend, path: str) -> None:
    """Remove a folder with everything in it; it vanishes in one step (in an object store, which has none: in many).
    COMMIT goes before the files: none ever names files that are gone."""
    backend.check_removable(path)
    tmp = _temporary(path, uuid.uuid4().hex)
    try:
        backend.rename(path, tmp, overwrite=False)
    except UnsupportedError:
        tmp = path
        backend.delete(join(path, commit.NAME))
    faults.point("stripefs.remove.tree")
    backend.remove_folder(tmp, first=(commit.NAME,))


def remove_all(backend: Backend) -> None:
    """Remove what is in the store, COMMIT first; its folder stays."""
    backend.check_removable("")
    entries = [entry for entry in backend.list("") if not commit.is_hidden(entry.name)]
    for entry in sorted(entries, key=lambda entry: entry.name != commit.NAME):
        if entry.is_dir:
            remove_tree(backend, entry.name)
        else:
            remove(backend, entry.name)


def new_folder(backend: Backend, path: str) -> None:
    """A folder, and those above it, in a store that `has_folders`. `FileExistsError` when something is there: of those
    who make it at once, one does."""
    backend.check_new(path)
    new = _temporary(path, uuid.uuid4().hex)  # HDFS makes none exclusively
    backend.make_folder(new)
    try:
        backend.rename(new, path, overwrite=False)
    except BaseException:
        with contextlib.suppress(BootseerError, OSError):
            backend.remove_folder(new)
        raise


def rename(backend: Backend, src: str, dst: str, *, overwrite: bool = True) -> None:
    """Give a file or a folder another name; a folder is never put over another. Atomic, except for a striped file that
    moves to another folder: it is copied there, and removed here afterwards. Raises `NotFoundError`, `NotWritableError`
    when ``dst`` is a folder, or exists and ``overwrite`` is off."""
    if src == dst:
        backend.stat(src)
        return
    backend.check_new(dst)
    try:
        folder, parent = backend.stat(src).is_dir, dst.rpartition("/")[0]
        if f"{dst}/".startswith(f"{src}/"):
            raise NotWritableError(f"cannot rename {src} to {dst}: that is inside of it")
        if parent and not exists(backend, parent):
            backend.make_folder(parent)
        if folder:
            backend.rename(src, dst, overwrite=False)
            return
        pointer = read_pointer(backend, src)
        if is_folder(backend, dst):
            raise NotWritableError(f"cannot rename {src} to {dst}: that is a folder")
        if pointer is not None and src.rpartition("/")[0] != dst.rpartition("/")[0]:
            _move(backend, src, dst, pointer, overwrite=overwrite)
            return
        replaced = _pointer(backend, dst) if overwrite else None
        if replaced is not None and replaced.uuid == (pointer and pointer.uuid):
            replaced = None  # a copy of the pointer
        if replaced is not None:
            owned, tmp = owned_by(backend, dst), _temporary(dst, replaced.uuid)
            if exists(backend, tmp):
                _log.warning(UNFINISHED, dst)
                replaced = None
            else:
                write_small(backend, tmp, layout.encode_pointer(replaced))
        faults.point("stripefs.rename.rename")
        # who adds to it, or writes it anew, is to see that it is another now
        with alone(backend, dst) if overwrite and exists(backend, dst) else contextlib.nullcontext():
            backend.rename(src, dst, overwrite=overwrite)
    except FileExistsError:
        raise NotWritableError(f"cannot rename {src} to {dst}: that exists") from None
    faults.point("stripefs.rename.cleanup")
    if replaced is not None:
        _discard(backend, dst, replaced, owned, tmp)


def copy_open(file: ChunkFile, writer: StripeWriter) -> None:
    """Write the content of ``file`` to ``writer``; `NotWritableError` when its own writer has not finished it."""
    refuse_unfinished(file)
    for piece in in_order(file):
        writer.write(piece)


def _move(backend: Backend, src: str, dst: str, pointer: Pointer, *, overwrite: bool) -> None:
    """Copy the striped file at ``src``, whose ``pointer`` is given, to ``dst`` in another folder, then remove it."""
    if not overwrite and exists(backend, dst):
        raise FileExistsError(dst)
    written = NotWritableError(f"{src} was written while it was moved: that version stays", hint="run again")

    def attributes(copied: Pointer | None) -> None:
        """The copy gets those of the source."""
        found, at = backend.stat(src), writer.temporary
        backend.change(at, mtime_ns=int(found.mtime * 1e9))
        if found.permissions is not None:
            rights.keep_owner(backend, dst, copied, found.permissions, backend.stat(at).permissions, at=at)
            if found.permissions.kept != writer.mode:
                rights.change(backend, dst, copied, at=at, mode=found.permissions.kept)
        if _pointer(backend, src) != pointer:
            raise written

    old = backend.stat(src).permissions
    mode, width, unit = old.kept if old else FILE_MODE, pointer.width, pointer.unit
    writer = StripeWriter(backend, dst, width=width, unit=unit, striped=True, mode=mode, before=attributes)
    try:
        try:
            with open_file(backend, src) as file:
                faults.point("stripefs.move.copy")
                copy_open(file, writer)
        except DataError:
            if _pointer(backend, src) != pointer:
                raise written from None
            raise
        if not overwrite and exists(backend, dst):
            raise FileExistsError(dst)
        writer.finish()
    finally:
        writer.abandon()
    owned = owned_by(backend, src)
    faults.point("stripefs.move.remove")
    tmp = _set_aside(backend, src, pointer)
    if _pointer(backend, tmp) != pointer:
        with contextlib.suppress(FileExistsError):  # a still later one
            backend.rename(tmp, src, overwrite=False)
        raise written
    _discard(backend, src, pointer, owned, tmp)


def _pointer(backend: Backend, path: str) -> Pointer | None:
    """The pointer at ``path``; None for a plain file, no file, and with a warning for a damaged pointer."""
    try:
        return read_pointer(backend, path)
    except NotFoundError:
        return None
    except DataError as exc:
        _log.warning("%s; its stripes are left in place", exc.message)
        return None


def _set_aside(backend: Backend, path: str, pointer: Pointer) -> str:
    """Rename what is at ``path`` to the temporary file that names the stripes of ``pointer``, or, when there is one
    already, to another. Which one that is."""
    tmp = _temporary(path, pointer.uuid)
    try:
        backend.rename(path, tmp, overwrite=False)
    except FileExistsError:
        backend.rename(path, tmp := _temporary(path, uuid.uuid4().hex), overwrite=True)
    return tmp


def _discard(backend: Backend, path: str, pointer: Pointer, owned: Permissions | None, tmp: str) -> None:
    """Remove what is left of the file of ``pointer``, and then ``tmp``; arguments of `remove_stripes`."""
    if tmp != _temporary(path, pointer.uuid):
        _log.warning(UNFINISHED, path)
        backend.delete(tmp)
    elif remove_stripes(backend, path, pointer, owned):
        backend.delete(tmp)


def _temporary(path: str, uuid: str) -> str:
    return join(path.rpartition("/")[0], f"{layout.TEMPORARY}{uuid}")


def write_small(backend: Backend, path: str, content: bytes) -> None:
    """Write a small file at ``path``, which nobody else writes; what is there goes."""
    backend.delete(path)
    write_file(backend, path, content)
