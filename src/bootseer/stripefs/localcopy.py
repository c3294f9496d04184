"""Local files that copies out of a store become: each appears whole or not at all. Folders of others may be written
to: what they lead elsewhere is not followed (`bootseer.kernel.links`)."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from stat import S_ISREG
from typing import IO

from bootseer.backends.folder import FolderBackend
from bootseer.closing import descriptor, whole
from bootseer.errors import ConfigError, NotWritableError, doing, from_os_error
from bootseer.folders import settled
from bootseer.kernel import beneath, links

_MOST_LINKS = 40


def place(local: Path) -> Path:
    """Where the file ``local`` is to be: what a link leads to, but not a link that others may have led there, which
    gives way. `NotWritableError` for what is no file."""
    for _ in range(_MOST_LINKS):
        if not os.path.islink(local):
            break
        if not _is_ours(local, follow=False):
            return local
        local = Path(local.parent, os.readlink(local))
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
        if _is_ours(path):
            path.mkdir(parents=True, exist_ok=True)
        else:
            FolderBackend(path).make_folder("")
    except FileExistsError:
        raise NotWritableError(f"{path} is a file, a folder is needed") from None
    except OSError as exc:
        raise from_os_error(exc, f"make folder {path}") from exc


@contextlib.contextmanager
def new(local: Path) -> Iterator[BufferedWriter]:
    """A new file, which is at `place` ``local`` after the context, unless that raises."""
    above = str(local.parent.absolute())
    with (
        doing(f"write {local}"),
        descriptor(links.open_followed(above, os.O_PATH | os.O_DIRECTORY, base=above, writing=True)) as folder,
        whole(Path(beneath.shown(folder), local.name)) as out,
    ):
        yield out


@contextlib.contextmanager
def written(local: Path) -> Iterator[IO[bytes]]:
    """The file, device or pipe ``local``, emptied; for root, where others may say where the name leads, as `new`."""
    if _is_ours(local):
        with doing(f"write {local}"), local.open("wb") as out:
            yield out
        return
    with new(place(local)) as out:
        yield out


@contextlib.contextmanager
def replaced(local: Path) -> Iterator[BufferedWriter]:
    """As `new`. A link that has the name gives way, whoever made it; root's own, as /dev/stdout is, is followed."""
    with new(place(local) if os.geteuid() == 0 else local) as out:
        yield out


def _is_ours(path: Path, *, follow: bool = True) -> bool:
    """Whether root alone says where the name leads, or a user asks. ``follow``: a link at its end, too."""
    if os.geteuid() != 0:
        return True
    try:
        return bool(settled(path, follow=follow))
    except (ConfigError, OSError):
        return False
