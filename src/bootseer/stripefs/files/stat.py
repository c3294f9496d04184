"""What a store tells of one file or folder."""

from __future__ import annotations

import msgspec

from bootseer.backends.interface import Backend, Entry, Permissions
from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import read_pointer


class FileStat(msgspec.Struct, frozen=True, kw_only=True):
    """One file or folder. ``width``, ``unit`` and ``uuid`` are 0 and "" for plain files and folders. ``version``
    changes when the file below the path is replaced (`backends.interface.Source`); ``permissions``: None where they are
    not told."""

    path: str
    size: int
    is_dir: bool
    mtime: float
    width: int = 0
    unit: int = 0
    uuid: str = ""
    digest: str = ""
    version: str = ""
    permissions: Permissions | None = None

    @property
    def striped(self) -> bool:
        return bool(self.width)


def of_entry(backend: Backend, path: str, entry: Entry, *, plain: bool = False) -> FileStat:
    """``entry`` is what ``backend`` tells of ``path``. A small file is read, to see whether it is a pointer, unless it
    is known as ``plain``. Raises `NotFoundError` when it is gone since, `DataError` for a damaged pointer."""
    found = FileStat(
        path=path,
        size=entry.size,
        is_dir=entry.is_dir,
        mtime=entry.mtime,
        version="" if entry.is_dir else entry.version,
        permissions=entry.permissions,
    )
    if plain or entry.is_dir or entry.size > layout.MAX_TEXT or (pointer := read_pointer(backend, path)) is None:
        return found
    return msgspec.structs.replace(
        found,
        size=pointer.size,
        width=pointer.width,
        unit=pointer.unit,
        uuid=pointer.uuid,
        digest=pointer.digest,
    )
