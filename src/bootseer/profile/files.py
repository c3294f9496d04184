"""Files of start-ups below the paths that were named: found, and opened so that no neighbour's link leads elsewhere.
Who writes events shares the folders with others. A path that was named is followed wherever it leads; below it the only
links that count are those to files that this user made. A folder is looked through down to `_DEPTH` levels."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer.closing import descriptor
from bootseer.errors import DataError, NotFoundError
from bootseer.kernel import beneath

log = logging.getLogger(__name__)

_DEPTH = 32
_MOST = 1_000_000
"""Names in folders that are looked at for one path."""


class Found(NamedTuple):
    """``name`` lies below the folder ``top``; "" is the file ``top`` itself."""

    top: Path
    name: str = ""

    def __str__(self) -> str:
        return str(self.top / self.name)

    @property
    def ending(self) -> str:
        """Such as ``.jsonl``."""
        return (self.top / self.name).suffix

    def open(self) -> int:
        """A descriptor; the caller closes it. Raises `OSError`, and `DataError` for what is no regular file."""
        try:
            if not self.name:
                return beneath.open_regular(os.path.realpath(self.top))
            with beneath.folder(self.top) as top:
                return beneath.open_regular(self.name, root=top)
        except OSError as exc:
            # opening a socket is ENXIO; a pipe is EINVAL, and nobody waits for its writer
            if exc.errno in (errno.EINVAL, errno.ENXIO, errno.ELOOP):
                raise DataError(f"{self} is no file to read: it is a pipe or a device, or somebody's link") from None
            raise

    def mark(self) -> tuple[int, int]:
        """Size and time of change: others when it was written to. Raises what `open` does."""
        with descriptor(self.open()) as fd:
            found = os.fstat(fd)
        return found.st_size, found.st_mtime_ns


def find(path: Path, endings: Collection[str], what: str = "file or folder") -> Iterator[Found]:
    """The file ``path``, or those below the folder with one of the ``endings``, in the order of their names. Raises
    `NotFoundError` when there is neither; ``what`` it should have been."""
    if not path.is_dir():
        if not path.exists():
            raise NotFoundError(f"no {what} {path}")
        yield Found(path)
        return
    with beneath.folder(path) as top:
        yield from sorted(_below(path, top, endings), key=lambda found: str(found).split("/"))


def _below(path: Path, top: int, endings: Collection[str]) -> Iterator[Found]:
    seen, others = 0, 0
    waiting = [""]
    while waiting:
        here = waiting.pop()
        try:
            fd = beneath.open_at(top, here, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # not for us, or it went just now
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if (seen := seen + 1) > _MOST:
                        log.warning("%s: only the first %d names below it are looked at", path, _MOST)
                        return
                    name = f"{here}/{entry.name}" if here else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if name.count("/") < _DEPTH:
                            waiting.append(name)
                    elif os.path.splitext(entry.name)[1] in endings:
                        if entry.is_symlink():
                            target = _own(fd, entry.name)
                            others += target is None
                            if target is not None and (real := path / here / target).is_file():
                                yield Found(real)
                        elif entry.is_file(follow_symlinks=False):
                            yield Found(path, name)
        except OSError as exc:
            log.debug("cannot look through %s: %s", path / here, exc)
        finally:
            os.close(fd)
    if others:
        log.info("%s: %d links that other users made are not followed", path, others)


def _own(folder: int, name: str) -> str | None:
    """Where a link of this user leads; None for somebody else's."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError), descriptor(os.open(name, flags, dir_fd=folder)) as fd:
        found = os.fstat(fd)
        if stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():
            return os.readlink("", dir_fd=fd)
    return None
