"""What fsck can mend without guessing: pointers whose stripes are whole, stripes of a broken-off collection, LATEST."""

from __future__ import annotations

import logging

import msgspec

from bootseer import faults
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.storage.interface import Backend, exists, join, read_all
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit, newest
from bootseer.stripefs.files import namespace
from bootseer.stripefs.layout import Pointer
from bootseer.stripefs.maintenance import scan
from bootseer.stripefs.maintenance.check import Finding, Report

_log = logging.getLogger(__name__)


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """``done``: what was done about the finding at ``path``; ``failed``: why nothing was."""

    kind: str
    path: str
    done: str = ""
    failed: str = ""


def repair(backend: Backend, report: Report) -> list[Repair]:
    """Mend every finding of ``report`` that says a repair. Each is looked at again before.

    Every byte of a file is read and checked before its pointer is made. A finding that cannot be mended after all is
    one with ``failed``; only a storage that does not answer is an error (`UnavailableError`).
    """
    made = []
    for finding in report.findings:
        if not finding.repair:
            continue
        try:
            made.append(Repair(kind=finding.kind, path=finding.path, done=_mend(backend, finding)))
        except UnavailableError:
            raise
        except (BootseerError, OSError) as exc:
            message = exc.message if isinstance(exc, BootseerError) else str(exc)
            made.append(Repair(kind=finding.kind, path=finding.path, failed=message))
    return made


def _mend(backend: Backend, finding: Finding) -> str:
    if finding.kind in ("lost-pointer", "damaged-pointer"):
        return _rebuild(backend, finding.path, finding.uuid, damaged=finding.kind == "damaged-pointer")
    if finding.kind == "missing-stripe":
        return _restore(backend, finding.path)
    if finding.kind == "renamed-file":
        namespace.adopt(backend, finding.path, _intact(backend, finding.path))
        return "it says its name now"
    if finding.kind == "wrong-latest":
        return f"it names {newest.write_hint(backend, finding.path.rpartition('/')[0])} now"
    raise DataError(f"no repair for {finding.kind}")


def _rebuild(backend: Backend, path: str, uuid: str, *, damaged: bool) -> str:
    parent, _, name = path.rpartition("/")
    text = _text(backend, path)  # before the look that says it is damaged
    folder = scan.folder(backend, parent)
    if folder.owners(uuid) or (name in folder.entries) != damaged or (damaged and name not in folder.damaged):
        raise DataError(f"{path} has changed since it was checked", hint="run fsck again")
    whole = scan.inspect(backend, parent, uuid, list(folder.stripes.get(uuid, {})))
    digest = scan.check_content(backend, parent, whole)
    if _committed_digest(backend, path) not in ("", digest):
        raise DataError(f"{path}: the content of its stripes does not have the digest of its COMMIT")
    pointer = msgspec.structs.replace(whole.pointer, digest=digest, name=name)
    tmp = join(parent, f"{layout.TEMPORARY}{uuid}")
    namespace.write_small(backend, tmp, layout.encode_pointer(pointer))
    faults.point("stripefs.repair.rename")
    if damaged and _text(backend, path) != text:  # reading the content took its time
        backend.delete(tmp)
        raise DataError(f"{path} was written since it was checked", hint="run fsck again")
    try:
        backend.rename(tmp, path, overwrite=damaged)
    except FileExistsError:
        backend.delete(tmp)
        raise DataError(f"{path} has appeared since it was checked", hint="run fsck again") from None
    return f"rebuilt it from {folder.store}/{uuid}: {pointer.size} bytes, every chunk checked"


def _text(backend: Backend, path: str) -> bytes:
    """What is at ``path``, as far as a pointer may go; b"" for nothing."""
    try:
        return read_all(backend, path, limit=layout.MAX_TEXT + 1)
    except NotFoundError:
        return b""


def _committed_digest(backend: Backend, path: str) -> str:
    if (found := commit.nearest(backend, path)) is None:
        return ""
    try:
        files = commit.read(*found[:2]).files
    except (DataError, NotFoundError):
        return ""
    return next((file.digest for file in files if file.path == found[2]), "")


def _intact(backend: Backend, path: str) -> Pointer:
    parent, _, name = path.rpartition("/")
    folder = scan.folder(backend, parent)
    if name not in folder.pointers or len(folder.owners(folder.pointers[name].uuid)) != 1:
        raise DataError(f"{path} has changed since it was checked", hint="run fsck again")
    return folder.pointers[name]


def _restore(backend: Backend, path: str) -> str:
    parent, _, name = path.rpartition("/")
    folder = scan.folder(backend, parent)
    if name not in folder.pointers:
        raise DataError(f"{path} has changed since it was checked", hint="run fsck again")
    uuid = folder.pointers[name].uuid
    restore_trash(backend, folder, uuid)
    return "renamed the stripes of a broken-off gc back"


def restore_trash(backend: Backend, folder: scan.Folder, uuid: str) -> None:
    """Undo the first step of a collection of the set ``uuid``."""
    for index in folder.trash.get(uuid, {}):
        if not exists(backend, folder.stripe_path(uuid, index)):
            backend.rename(folder.trash_path(uuid, index), folder.stripe_path(uuid, index), overwrite=False)
