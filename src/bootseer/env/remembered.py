"""Remembered facts: what was found out once about a file, for as long as it is that very file.

Device, inode, size and the times of the last write and the last change name a file's content where the kernel keeps
these times itself; elsewhere (in images, in FUSE mounts, in overlays) somebody else chooses them, and nothing is
remembered. All facts are in one file of a private folder of the node cache, which is read once (`at_hand`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import msgspec

from bootseer import __version__
from bootseer.closing import whole
from bootseer.config import Config
from bootseer.errors import BootseerError
from bootseer.folders import private_folder
from bootseer.kernel import flock, libc
from bootseer.wiretypes import json_as

_FOLDER, _FILE = "env-facts", "facts.json"
_MOST = 60_000
"""Facts that are kept, the newest."""
_SETTLED = 600.0
"""Seconds after its last change from which on the state of a file tells its content: times are kept in ticks, and by
the clock of the file's server, from which this node's may be off by minutes; what a mapping changes has the time at
which its page was last written to the disk."""
_TICKS = 2.0
"""The same of a file on a disk of this node that nobody has open for writing: each new mapping sets the times anew."""
_LOCAL = {0xEF53, 0x58465342, 0x9123683E}  # ext, xfs, btrfs
_OWN_TIMES = {*_LOCAL, 0x6969}  # and NFS; a mapping in tmpfs changes none


class Facts:
    """Those in the node cache of ``config``; without one nothing is remembered. For one thread."""

    def __init__(self, config: Config | None) -> None:
        self._config = config
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}
        self._systems: dict[int, tuple[int, int]] = {}
        """Device -> kind and number of its file system, where that keeps the times itself."""
        if config and os.path.lexists(Path(config.cache_dir, _FOLDER)):
            with contextlib.suppress(BootseerError):
                self._known = _read(private_folder(Path(config.cache_dir), sub=_FOLDER))

    def known(self, found: os.stat_result, kind: str) -> str | None:
        """The fact ``kind`` of the regular file that is in the state ``found``."""
        return self._known.get(self._name(found, kind))

    def of(self, fd: int, kind: str, find: Callable[[], str]) -> str:
        """The fact ``kind`` of the regular file that ``fd`` has open: what ``find`` says, or said of it before. Raises
        what ``find`` raises."""
        found = os.fstat(fd)
        if self._config and found.st_dev not in self._systems:
            with contextlib.suppress(OSError):
                if has_times(fd):
                    self._systems[found.st_dev] = libc.file_system(fd)
        name = self._name(found, kind)
        if (text := self._known.get(name)) is None:
            keep = name and self._is_settled(fd, found)  # before it is read
            text = find()
            if keep:
                self._known[name] = self._new[name] = text
        return text

    def _name(self, found: os.stat_result, kind: str) -> str:
        """Names the fact; empty for one that is not to be remembered."""
        if (system := self._systems.get(found.st_dev)) is None:
            return ""
        state = (system[1], found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        return hashlib.sha256(repr((__version__, kind, *state)).encode()).hexdigest()[:32]

    def _is_settled(self, fd: int, found: os.stat_result) -> bool:
        age = time.time() - max(found.st_mtime, found.st_ctime)
        if age > _SETTLED or age <= _TICKS or self._systems[found.st_dev][0] not in _LOCAL:
            return age > _SETTLED
        return flock.nobody_writes(fd)

    def save(self) -> None:
        """Write what is new; what another process has written meanwhile stays."""
        if not self._new or not self._config:
            return
        with contextlib.suppress(BootseerError, OSError):
            folder = private_folder(Path(self._config.cache_dir), sub=_FOLDER)
            kept = dict([*{**_read(folder), **self._new}.items()][-_MOST:])
            with whole(folder / _FILE) as file:
                file.write(msgspec.json.encode(kept))


def _read(folder: Path) -> dict[str, str]:
    try:
        return json_as((folder / _FILE).read_bytes(), dict[str, str])
    except (OSError, ValueError):
        return {}


_at_hand: ContextVar[Facts | None] = ContextVar("_at_hand", default=None)


@contextlib.contextmanager
def at_hand(config: Config | None) -> Iterator[Facts]:
    """The facts, which are read once, and written at the end, for all that is asked inside of it."""
    if config and (facts := _at_hand.get()):
        yield facts
        return
    facts = Facts(config)
    token = _at_hand.set(facts)
    try:
        yield facts
    finally:
        _at_hand.reset(token)
        facts.save()


def has_times(fd: int) -> bool:
    """Whether the kernel keeps the times of the file that ``fd`` has open. Raises `OSError`."""
    return libc.file_system(fd)[0] in _OWN_TIMES


def fact(config: Config | None, fd: int, kind: str, find: Callable[[], str]) -> str:
    """`Facts.of`."""
    with at_hand(config) as facts:
        return facts.of(fd, kind, find)


def digest(config: Config | None, fd: int) -> str:
    """SHA-256 (hex) of the file that ``fd`` has open, from its beginning."""

    def find() -> str:
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    return fact(config, fd, "sha256", find)
