"""What fsck can mend without guessing: pointers whose stripes are whole, stripes of a broken-off collection."""

from __future__ import annotations

import msgspec

from bootseer import faults
from bootseer.backends.interface import Backend, content_at, exists, join
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.files import namespace, rights
from bootseer.stripefs.maintenance import scan
from bootseer.stripefs.maintenance.check import Finding, FsckReport
from bootseer.stripefs.maintenance.scan import Folder


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """``done``: what was done about the finding at ``path``; ``failed``: why nothing was."""

    kind: str
    path: str
    done: str = ""
    failed: str = ""


def repair(backend: Backend, report: FsckReport) -> list[Repair]:
    """Mend every finding of ``report`` that says a repair, looked at again before; every byte of a file is read and
    checked before its pointer is made. One that cannot be mended after all is one with ``failed``; only a storage that
    does not answer is an error (`UnavailableError`)."""
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
    path = finding.path
    parent, _, name = path.rpartition("/")
    text = _text(backend, path)  # before the look that says that it is damaged
    folder = scan.folder(backend, parent)
    pointer = folder.pointers.get(name)
    if finding.kind in ("lost-pointer", "damaged-pointer"):
        damaged = finding.kind == "damaged-pointer"
        if not folder.owners(finding.uuid) and (name in folder.damaged if damaged else name not in folder.entries):
            return _rebuild(backend, folder, name, finding.uuid, text)
    elif finding.kind == "missing-stripe" and pointer is not None:
        restore_trash(backend, folder, pointer.uuid)
        return "renamed the stripes of a broken-off gc back"
    raise DataError(f"{path} has changed since it was checked", hint="run fsck again")


def _rebuild(backend: Backend, folder: Folder, name: str, uuid: str, text: bytes) -> str:
    """Make the pointer ``name`` of the stripes ``uuid`` anew, if ``text`` is still there: b"" for nothing."""
    path = join(folder.path, name)
    whole = msgspec.structs.replace(scan.inspect(backend, folder.path, uuid, folder.stripes.get(uuid, {})), name=name)
    digest = scan.check_content(backend, folder.path, whole)
    if _committed_digest(backend, path) not in ("", digest):
        raise DataError(f"{path}: the content of its stripes does not have the digest of its COMMIT")
    tmp = join(folder.path, f"{layout.TEMPORARY}{uuid}")
    pointer = msgspec.structs.replace(whole, digest=digest)
    namespace.write_small(backend, tmp, layout.encode_pointer(pointer))
    before = backend.stat(path if name in folder.damaged else folder.stripe_path(uuid, 0)).permissions
    if before is not None:
        rights.keep_owner(backend, path, None, before, backend.stat(tmp).permissions, at=tmp)
        rights.change(backend, path, None, at=tmp, mode=before.kept)
    faults.point("stripefs.repair.rename")
    try:
        if text != _text(backend, path):  # reading the content took its time
            raise FileExistsError(path)
        backend.rename(tmp, path, overwrite=name in folder.damaged)
    except FileExistsError:
        backend.delete(tmp)
        raise DataError(f"{path} was written since it was checked", hint="run fsck again") from None
    return f"rebuilt it from {folder.store}/{uuid}: {pointer.size} bytes, every chunk checked"


def _text(backend: Backend, path: str) -> bytes:
    """What is at ``path``, as far as a pointer may go; b"" for nothing."""
    return content_at(backend, path, limit=layout.MAX_TEXT + 1) or b""


def _committed_digest(backend: Backend, path: str) -> str:
    if (found := commit.nearest(backend, path)) is None:
        return ""
    try:
        files = commit.read(*found[:2]).files
    except (DataError, NotFoundError):
        return ""
    return next((file.digest for file in files if file.path == found[2]), "")


def restore_trash(backend: Backend, folder: Folder, uuid: str) -> None:
    """Undo the first step of a collection of the set ``uuid``."""
    for index in folder.trash.get(uuid, {}):
        if not exists(backend, folder.stripe_path(uuid, index)):
            backend.rename(folder.trash_path(uuid, index), folder.stripe_path(uuid, index), overwrite=False)
