"""Removing the stripes of a file that is gone, unless they may be another file's. What a pointer says is its writer's
word: its name, and whose stripes it names. So each removal looks who else names them, among the files of the folder
that can by their length (`layout.may_name`), which no forged pointer changes."""

from __future__ import annotations

import logging

from bootseer.backends.interface import Backend, Permissions, entry_at, join, read_all
from bootseer.backends.pool import parallel
from bootseer.errors import DataError, NotFoundError
from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.layout import Pointer

_log = logging.getLogger(__name__)

UNFINISHED = "the stripes of %s are left in place: a temporary file names them, of a writer that may not have ended"
_MOST = 16_384
_named: dict[tuple[str, str, str], str] = {}
"""The uuids that files name, "" for a plain one, by store, path and version: when many files of a folder are removed,
none of the others is read twice."""


def remove_stripes(backend: Backend, path: str, pointer: Pointer, owned: Permissions | None) -> bool:
    """Remove the stripes of the file that had ``pointer`` at ``path``, which is not there any more; ``owned``: whose it
    was, None where that is not told.

    They stay while another file of the folder names them (the file under a new name, a copy of the pointer, a forgery),
    also a damaged pointer, and when they are somebody else's. False when only a damaged pointer is in the way: the
    temporary file that calls them garbage is to stay then, too."""
    whole, damaged = _namers(backend, path.rpartition("/")[0], pointer)
    if whole or damaged:
        _log.warning("the stripes of %s are left in place: another file may name them", path)
        return whole
    stripes = [pointer.stripe_path(path, index) for index in range(pointer.width)]
    if owned is not None and any(parallel(lambda stripe: _is_anothers(backend, stripe, owned), stripes)):
        _log.warning("the stripes of %s are left in place: they belong to another user than it did", path)
        return True
    for stripe in stripes:
        backend.delete(stripe)
    return True


def _namers(backend: Backend, folder: str, pointer: Pointer) -> tuple[bool, bool]:
    """Whether a pointer in ``folder`` names the stripes of ``pointer``; whether a damaged or unreadable one may."""
    uuid = pointer.uuid

    def read(one: tuple[str, str, str]) -> str | None:
        """What it names; None: ``uuid``, but it is damaged."""
        try:
            try:
                found = read_pointer(backend, one[1])
            except DataError:
                return None if uuid.encode() in read_all(backend, one[1], limit=layout.MAX_TEXT) else ""
        except NotFoundError:
            return ""
        except DataError:
            return None
        named = found.uuid if found else ""
        if one[2]:
            _named[one] = named
        return named

    files = [
        (backend.url, join(folder, entry.name), entry.version)
        for entry in backend.list(folder)
        if not entry.is_dir and layout.may_name(entry.size, pointer) and not entry.name.startswith(layout.TEMPORARY)
    ]
    if len(_named) > _MOST:
        _named.clear()
    known = {one: named for one in files if (named := _named.get(one)) is not None}
    found = {*known.values(), *parallel(read, [one for one in files if one not in known])}
    return uuid in found, None in found


def owned_by(backend: Backend, path: str) -> Permissions | None:
    """Whose the file at ``path`` is; None where that is not told, or there is none."""
    return entry.permissions if (entry := entry_at(backend, path)) else None


def _is_anothers(backend: Backend, path: str, owned: Permissions) -> bool:
    if (found := owned_by(backend, path)) is None:
        return False
    return found.owner[0] != owned.owner[0] if found.owner and owned.owner else found.uid != owned.uid
