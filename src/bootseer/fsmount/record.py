"""What is known of a mount: what its server is told, what it has moved, and what stays when it has died. Its requests
are ``status``, ``release`` (a prefetch that was held back may begin), ``end``, all answered with an `FsStatus`, and
``accessed``, with an `AccessRecord`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from bootseer.chunks.eviction import Limits
from bootseer.kernel import background
from bootseer.mountrecords import Record
from bootseer.served import client
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint.access import FileAccess
from bootseer.stripefs.files.readahead import MEMORY

SERVER = background.program("bootseer.fsmount.__main__")
SPOOLS = 4 << 30
"""Bytes of all spools of a mount."""
SILENCE = 10.0, 60.0
"""Seconds without a heartbeat after which a server is replaced: one that has nothing unfinished, and one that has."""

LATEST = "@latest"
"""As a path of a prefetch: every file of the newest complete checkpoint in the mounted folder."""

State = Literal["none", "running", "done", "failed"]
"""Of a prefetch."""


class ServerSpec(msgspec.Struct, frozen=True):
    """What a server is told. ``cache_dir``, ``limits``: of the node cache; "" for none.

    ``prefetch``: paths as of `mount.start`; ``ranges`` of files go before; ``hold``: it begins after
    `FsMount.release`; ``memory``: bytes of read-ahead. ``allow_other``: other users may use the mount, with ``shared``
    as far as the owners and modes of the storage let them, else for everything. ``writable``: with files of ``width``
    and ``unit``, and at most ``spool`` bytes of them, unfinished, on this node. ``silence``: as `SILENCE`."""

    url: str
    mountpoint: str
    prefetch: tuple[str, ...] = ()
    ranges: tuple[FileAccess, ...] = ()
    hold: bool = False
    memory: int = MEMORY
    cache_dir: str = ""
    limits: Limits = Limits()
    shared: bool = False
    allow_other: bool = False
    writable: bool = False
    width: int = layout.WIDTH
    unit: int = layout.UNIT
    spool: int = SPOOLS
    silence: tuple[float, float] = SILENCE


class FsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a mount has moved, in bytes. ``fetched_*``: from the store, because a reader waited or ahead of readers.
    ``waited_seconds``: how long readers waited. ``bytes_read``: through the server. ``opened_passthrough``: how often a
    file was opened that the kernel reads from the node cache by itself; ``opened_served``: others. ``pid``: of the
    supervisor, 0 of a mount that has died; ``server_pid``: of the process that serves now, which took over ``restarts``
    times. ``unfinished``: files that are being written and not published."""

    url: str
    mountpoint: str
    pid: int = 0
    server_pid: int = 0
    restarts: int = 0
    supervisor_restarts: int = 0
    alive: bool = True
    bytes_read: int = 0
    bytes_written: int = 0
    unfinished: int = 0
    fetched_demand: int = 0
    fetched_ahead: int = 0
    waited_seconds: float = 0.0
    opened_passthrough: int = 0
    opened_served: int = 0
    prefetch: State = "none"
    prefetch_total: int = 0
    prefetch_done: int = 0


class MountRecord(Record, kw_only=True):
    """What stays known of a mount whose server has died. ``began``: Unix time in ns; no two mounts are the same."""

    url: str
    mountpoint: str
    began: int


def recorded(folder: Path) -> MountRecord | None:
    """That of the server whose state is in ``folder``."""
    return client.records(folder.parent, MountRecord).find(folder.name)


def state_folder(state_dir: str | Path, mountpoint: str | Path) -> Path:
    """Of the server of the mount on ``mountpoint``."""
    return Path(state_dir, "fs", hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16])
