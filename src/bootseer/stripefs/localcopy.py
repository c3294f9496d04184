"""Local files that copies out of a store become: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from stat import S_ISREG

from bootseer.closing import whole
from bootseer.errors import NotWritableError, doing, from_os_error


def place(local: Path) -> Path:
    """Where the file ``local`` is to be: what a link leads to. `NotWritableError` for what is no file."""
    local = Path(os.path.realpath(local)) if os.path.islink(local) else local
    try:
        if not S_ISREG(local.stat().st_mode):  # as /dev/stdout: a file would take its place
            raise NotWritableError(f"cannot write {local}: it is not a file", hint="name a file or folder")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as exc:
        if exc.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise from_os_error(exc, f"write {local}") from exc
        why = "it is a link to itself" if exc.errno == errno.ELOOP else exc.strerror
        raise NotWritableError(f"cannot write {local}: {why}", hint="name a file or folder") from None
    return local


def refuse_folder(local: Path) -> None:
    if os.path.isdir(local):  # of Path, it raises for too long a name
        raise NotWritableError(f"cannot write {local}: it is a folder")


def folder(path: Path) -> None:
    """Make the folder ``path`` where it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotWritableError(f"{path} is a file, a folder is needed") from None
    except OSError as exc:
        raise from_os_error(exc, f"make folder {path}") from exc


@contextlib.contextmanager
def new(local: Path) -> Iterator[BufferedWriter]:
    """A new file, which is at `place` ``local`` after the context, unless that raises."""
    with doing(f"write {local}"), whole(local) as out:
        yield out
