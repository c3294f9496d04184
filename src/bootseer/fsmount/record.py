"""What is on record of a mount: what its server is told, what it has moved, and the file that says so."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from bootseer.chunks.eviction import Limits
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint.access import AccessRecord, FileAccess
from bootseer.stripefs.files.readahead import MEMORY

SPOOLS = 4 << 30
"""Bytes of all spools of a mount."""
SILENCE = 10.0, 60.0
"""Seconds without a heartbeat after which a server is replaced: one that has nothing unfinished, and one that has."""

LATEST = "@latest"
"""As a path of a prefetch: every file of the newest complete checkpoint in the mounted folder."""

State = Literal["none", "running", "done", "failed"]
"""Of a prefetch."""


class ServerSpec(msgspec.Struct, frozen=True):
    """What a server is told. ``cache_dir``: of the node cache, ``state_dir``: of its record and log; "" for none.
    ``limits``: of the node cache.

    ``prefetch``: paths as of `mount.start`; ``ranges`` of files go before; ``hold``: it begins after
    `FsMount.release`; ``memory``: bytes of read-ahead. ``allow_other``: other users may use the mount, with ``shared``
    as far as the owners and modes of the storage let them, else for everything. ``writable``: with files of ``width``
    and ``unit``, and at most ``spool`` bytes of them, unfinished, on this node. ``silence``: as `SILENCE`.
    """

    url: str
    mountpoint: str
    prefetch: tuple[str, ...] = ()
    ranges: tuple[FileAccess, ...] = ()
    hold: bool = False
    memory: int = MEMORY
    cache_dir: str = ""
    limits: Limits = Limits()
    state_dir: str = ""
    shared: bool = False
    allow_other: bool = False
    writable: bool = False
    width: int = layout.WIDTH
    unit: int = layout.UNIT
    spool: int = SPOOLS
    silence: tuple[float, float] = SILENCE


class FsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a mount has moved, in bytes. ``fetched_*``: from the store, because a reader waited or ahead of readers.

    ``bytes_read``: through the server. ``opened_passthrough``: how often a file was opened that the kernel reads from
    the node cache by itself; ``opened_served``: others. ``pid``: of the supervisor; ``server_pid``: of the process that
    serves now, which took over ``restarts`` times. ``unfinished``: files that are being written and not published.
    """

    url: str
    mountpoint: str
    pid: int
    server_pid: int = 0
    restarts: int = 0
    alive: bool = True
    bytes_read: int = 0
    bytes_written: int = 0
    unfinished: int = 0
    fetched_demand: int = 0
    fetched_ahead: int = 0
    opened_passthrough: int = 0
    opened_served: int = 0
    prefetch: State = "none"
    prefetch_total: int = 0
    prefetch_done: int = 0


class Record(msgspec.Struct, frozen=True):
    """A server and its latest status, in ``<id>.json`` of the state folder: ``<id>`` is the hashed mount point.

    ``born``: its start time in clock ticks since boot, so that a reused pid is not mistaken.
    """

    status: FsStatus
    born: int

    @staticmethod
    def path(state_dir: str | Path, mountpoint: str | Path) -> Path:
        return Path(state_dir, "fs", hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16] + ".json")

    @staticmethod
    def hold(path: Path) -> Path:
        """Beside the record at ``path``: while it exists the prefetch does not begin."""
        return path.with_suffix(".hold")

    @staticmethod
    def accessed(path: Path) -> Path:
        """Beside the record at ``path``: the `AccessRecord` of the mount's readers."""
        return path.with_suffix(".access")

    @staticmethod
    def asked(path: Path) -> Path:
        """Beside the record at ``path``: exists until the server has written down what was read before it was made."""
        return path.with_suffix(".asked")

    @staticmethod
    def beside(path: Path) -> tuple[Path, ...]:
        """The files beside the record at ``path`` that go with it."""
        return Record.hold(path), Record.accessed(path), Record.asked(path)

    @staticmethod
    def read_accessed(path: Path) -> AccessRecord:
        """What the readers of the mount with the record at ``path`` have read, as far as it was written down."""
        try:
            return msgspec.json.decode(Record.accessed(path).read_bytes(), type=AccessRecord)
        except (OSError, ValueError):
            return AccessRecord()

    @staticmethod
    def read(path: Path) -> Record | None:
        """The record of a mount, alive or not."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, ValueError):
            return None

    def is_of(self, other: Record) -> bool:
        """Whether both are of one server."""
        return (self.status.pid, self.born) == (other.status.pid, other.born)
