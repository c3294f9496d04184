"""A node's place among the events of its job's attempts. Where no scheduler has named the attempt, nodes agree on it by
the events folder. Others may write to that folder too: below it no name is followed (`kernel.beneath`), and whatever is
put in the way there ends no start."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bootseer.closing import descriptor
from bootseer.errors import logged
from bootseer.folders import foothold
from bootseer.kernel import beneath
from bootseer.launch.identity import Identity

_log = logging.getLogger(__name__)

_TOGETHER = 120.0
"""Nodes that begin within these seconds of each other are of one start."""
_ATTEMPT = re.compile(r"attempt-(0|[1-9][0-9]{0,17})")
_MOST_SKIPPED = 100_000
"""A number so far above all smaller ones was not counted up to: somebody made it up."""
_TRIES = 100


def begin_events(folder: Path, identity: Identity, own: Path) -> tuple[Identity, Path, int]:
    """``identity`` with its attempt, the path of its file of events in ``folder``, and a descriptor as of
    `open_events`. Where these cannot be had, a warning says so, and the file is in ``own``, the start's private folder.
    Raises `OSError` when that cannot be written to."""
    with logged(_log.warning, "the events of this start are not kept: cannot write them in %s", folder):
        if not identity.attempt:
            identity = msgspec.structs.replace(identity, attempt=join_attempt(folder, identity))
        path = folder / identity.job / f"attempt-{identity.attempt}" / f"{identity.node}.jsonl"
        return identity, path, open_events(folder, identity)
    identity = msgspec.structs.replace(identity, attempt=identity.attempt or "0")
    path = own / f"{identity.node}.jsonl"
    return identity, path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def join_attempt(folder: Path, identity: Identity) -> str:
    """The newest attempt in ``folder`` if another node joined it within `_TOGETHER`, this one has not, and not all
    nodes have, else a new one; a restart by torchrun is of the newest one. Nodes that share ``folder`` agree on it.
    Raises `OSError`."""
    name = f"{identity.node}.jsonl"
    with _opened(folder) as top, contextlib.ExitStack() as stack:
        attempts = beneath.make_folders(top, identity.job)
        stack.callback(os.close, attempts)
        with tempfile.TemporaryFile(dir=beneath.shown(attempts)) as file:
            now = os.fstat(file.fileno()).st_mtime  # by the clock of the folder's server, as all times of files there
        for _ in range(_TRIES):
            newest = _newest(os.listdir(attempts))
            changed, nodes = _look(attempts, newest)
            if identity.restarts and name in nodes:
                return str(newest)
            full = identity.nodes and len(nodes) >= identity.nodes
            if changed is None or abs(now - changed) > _TOGETHER or name in nodes or full:
                newest += 1
                with contextlib.suppress(FileExistsError):
                    os.mkdir(f"attempt-{newest}", dir_fd=attempts)
            with contextlib.suppress(FileExistsError):  # another start on this node was quicker
                os.close(beneath.open_at(attempts, f"attempt-{newest}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                return str(newest)
    raise OSError(errno.EBUSY, "others make attempts all the time", str(folder / identity.job))


def _newest(names: list[str]) -> int:
    """The largest number of an attempt among ``names``, but for those that nobody can have counted up to; -1: none."""
    newest = -1
    for number in sorted(int(match[1]) for match in map(_ATTEMPT.fullmatch, names) if match):
        if number - newest > _MOST_SKIPPED:
            break
        newest = number
    return newest


def _look(attempts: int, number: int) -> tuple[float | None, set[str]]:
    """When the attempt changed and the events in it; None for one that is no folder."""
    try:
        with beneath.folder(f"attempt-{number}", root=attempts) as place:
            return os.fstat(place).st_mtime, {name for name in os.listdir(place) if name.endswith(".jsonl")}
    except OSError:
        return None, set()


def open_events(folder: Path, identity: Identity) -> int:
    """A descriptor that appends to this node's file of events, which is made, with all above it, where it is missing;
    the caller closes it. Raises `OSError`, also where somebody has put something else than a file there."""
    path = f"{identity.job}/attempt-{identity.attempt}/{identity.node}.jsonl"
    with _opened(folder) as top, beneath.parent(top, path, make=0o777) as (place, name):
        fd = beneath.open_at(place, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no file of its own", path)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The folder of events, made where it is missing. Root follows no link to it that others can change."""
    base, rest = (folder, Path()) if os.geteuid() else foothold(folder)
    base.mkdir(parents=True, exist_ok=True)
    with beneath.folder(base) as top:
        fd = beneath.make_folders(top, str(rest))
    with descriptor(fd):
        yield fd
