"""The server of a mount: FUSE operations, read-ahead, node cache, prefetch, and the record of it.

Concurrency: FUSE workers, read threads, read-ahead threads, and for the prefetch one thread with two of its own; the
main thread writes the record while it waits for the unmount or for SIGTERM.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.kernel import fuse
from bootseer.private import enterable
from bootseer.storage.interface import clean, join
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.files.nodecache import NodeCache
from bootseer.stripefs.files.readahead import MEMORY, ReadAhead
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.mount.operations import StripeOperations
from bootseer.stripefs.mount.unfinished import SPOOLS, Spools
from bootseer.stripefs.mount.writing import WritableStripes
from bootseer.stripefs.store import StripeFS, open_fs

_log = logging.getLogger(__name__)

CACHE_BUDGET = 64 << 30
LATEST = "@latest"
"""In ``prefetch``: every file of the newest complete checkpoint in the mounted folder."""
_WORKERS = 8
_PIECE = 16 << 20
_END_SECONDS = 15.0


class ServerSpec(msgspec.Struct, frozen=True):
    """What a server is told. ``cache_dir``: of the node cache, ``state_dir``: of its record and log; "" for none.

    ``prefetch``: paths as of `mount.start`; ``memory``: bytes of read-ahead that it holds. ``writable``: with files of
    ``width`` and ``unit``, and at most ``spool`` bytes of them, unfinished, in ``cache_dir``.
    """

    url: str
    mountpoint: str
    prefetch: tuple[str, ...] = ()
    memory: int = MEMORY
    cache_dir: str = ""
    state_dir: str = ""
    writable: bool = False
    width: int = layout.WIDTH
    unit: int = layout.UNIT
    spool: int = SPOOLS


class FsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a mount has moved, in bytes. ``fetched_*``: from the store, because a reader waited or ahead of readers."""

    url: str
    mountpoint: str
    pid: int
    alive: bool = True
    bytes_read: int = 0
    bytes_written: int = 0
    fetched_demand: int = 0
    fetched_ahead: int = 0
    prefetch: Literal["none", "running", "done", "failed"] = "none"
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
    def read(path: Path) -> Record | None:
        """The record of a mount, alive or not."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None

    def is_of(self, other: Record) -> bool:
        """Whether both are of one server."""
        return (self.status.pid, self.born) == (other.status.pid, other.born)


def born(pid: int) -> int:
    """Start time of a process; 0 when there is none, or it has ended and only waits to be reaped."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return 0
    fields = text.rsplit(")", 1)[1].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


class Server:
    """Serves a mount. Raises what reading the folder at its URL raises."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec, self._fs = spec, open_fs(spec.url)
        self._cache = NodeCache(Path(spec.cache_dir), CACHE_BUDGET) if spec.cache_dir else None
        self._ahead = ReadAhead(self._cache, memory=spec.memory)
        root, closed = os.geteuid() == 0, not enterable(Path(spec.mountpoint))
        shared = root and not closed and _may_be_shared(self._fs)
        self._ops = StripeOperations(self._fs, self._ahead, shared=shared)
        if spec.writable:
            spools = Spools(Path(spec.cache_dir), spec.spool)
            shape = {"width": spec.width, "unit": spec.unit}
            self._ops = WritableStripes(self._fs, self._ahead, spools, shared=shared, **shape)
        self._stop = threading.Event()
        self._prefetch: Literal["none", "running", "done", "failed"] = "running" if spec.prefetch else "none"
        self._total = self._done = 0
        self._record: Record | None = None
        self._born = born(os.getpid())
        # A pointer may be replaced at any time: names are believed for a second, contents (one node each) for ever,
        # permissions as long as names.
        options = fuse.Options(
            name="bootseer-fs",
            max_readahead=4 << 20 if os.geteuid() == 0 else 128 << 10,
            entry_timeout=1.0,
            attr_timeout=1.0 if shared or spec.writable else 3600.0,
            allow_other=shared or (root and closed),  # closed: others are those whom root lets see it, as containers
            writable=spec.writable,
        )
        self._server = fuse.Server(self._ops, Path(spec.mountpoint), workers=_WORKERS, options=options)

    def run(self, stop: threading.Event, started: Callable[[Record], None]) -> None:
        """Mount, call ``started``, then prefetch and serve until the mount has ended or ``stop`` is set.

        Errors as of `kernel.mount`. Nothing is left running.
        """
        pulling = threading.Thread(target=self._pull, name="prefetch", daemon=True)
        try:
            self._server.start()
            started(self._write_record())
            pulling.start()
            while not self._server.wait(0.2) and not stop.is_set():
                with contextlib.suppress(OSError):  # a full disk does not end the mount
                    self._write_record()
        finally:
            self._stop.set()
            self._server.stop(timeout=2.0)
            if pulling.ident is not None:
                pulling.join(_END_SECONDS)
            if isinstance(self._ops, WritableStripes):
                self._ops.close()
            self._ahead.close()
            if self._cache:
                self._cache.close()

    def _pull(self) -> None:
        if self._prefetch == "none":
            return
        try:
            files = [self._fs.open(path) for path in self._paths()]
            self._total = sum(file.size for file in files)
            with ThreadPoolExecutor(2, thread_name_prefix="bootseer-prefetch") as pool:
                for file in files:
                    limit, step = file.geometry.chunks, max(1, _PIECE // file.unit)
                    if self._cache is None or self._cache.add(file) is None:
                        limit = min(limit, self._spec.memory // 2 // file.unit)
                        self._done += file.size - min(file.size, limit * file.unit)
                    for count in pool.map(partial(self._pull_piece, file, step, limit), range(0, limit, step)):
                        self._done += count
            self._prefetch = "done"
        except (BootseerError, OSError) as exc:
            self._prefetch = "failed"
            _log.warning("prefetch stopped: %s", exc)

    def _pull_piece(self, file: ChunkFile, step: int, limit: int, first: int) -> int:
        if self._stop.is_set():
            raise UnavailableError("the mount ended")
        last = min(first + step, limit)
        self._ahead.prefetch(file, first, last)
        return min(last * file.unit, file.size) - first * file.unit

    def _paths(self) -> list[str]:
        found: dict[str, None] = {}
        for item in self._spec.prefetch:
            path = self._fs.latest("") if item == LATEST else clean(item)
            try:
                names = [join(path, file.path) for file in self._fs.checkpoint(path).files]
            except (NotFoundError, DataError):
                names = [name for name in self._fs.files(path) if name.rpartition("/")[2] != commit.NAME]
            found |= dict.fromkeys(names)
        return list(found)

    def _write_record(self) -> Record:
        status = FsStatus(
            url=self._fs.url,
            mountpoint=self._spec.mountpoint,
            pid=os.getpid(),
            bytes_read=self._ops.bytes_read,
            bytes_written=self._ops.bytes_written if isinstance(self._ops, WritableStripes) else 0,
            fetched_demand=self._ahead.demand,
            fetched_ahead=self._ahead.ahead,
            prefetch=self._prefetch,
            prefetch_total=self._total,
            prefetch_done=self._done,
        )
        record = Record(status, self._born)
        if self._spec.state_dir and record != self._record:
            path = Record.path(self._spec.state_dir, self._spec.mountpoint)
            there = Record.read(path)
            if there is not None and not there.is_of(record) and born(there.status.pid) == there.born:
                if self._record is None:
                    raise NotWritableError(f"{self._spec.mountpoint} is already a mount of {there.status.url}")
                return record  # this mount was detached, and has a successor
            tmp = path.with_suffix(".new")
            tmp.write_bytes(msgspec.json.encode(record))
            os.replace(tmp, path)
        self._record = record
        return record


def _may_be_shared(fs: StripeFS) -> bool:
    """Whether users besides this one may use a mount of ``fs``: the kernel holds them to its owners and modes, so the
    storage must tell those, and everybody must have the right to go through the folders above."""
    above = [store.stat(folder).permissions for store, folder, _ in commit.above(fs.backend, "")]
    if fs.stat("").permissions is None or None in above:
        _log.info("%s does not tell owners and modes: the mount is for this user alone", fs.url)
        return False
    if any(found is not None and not found.mode & 0o001 for found in above):
        _log.info("a folder above %s is not open to everybody: the mount is for this user alone", fs.url)
        return False
    return True
