"""The server of a mount: FUSE operations, read-ahead, node cache, prefetch, and a status file.

Concurrency: FUSE workers, read threads, read-ahead threads, two prefetch threads, and one that writes the status file;
the main thread waits for the unmount or for SIGTERM.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.kernel import fuse
from bootseer.storage.interface import clean, join
from bootseer.stripefs.checkpoint.commit import NAME as COMMIT
from bootseer.stripefs.files.readahead import MEMORY, ReadAhead
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.mount.nodecache import NodeCache
from bootseer.stripefs.mount.operations import StripeOperations
from bootseer.stripefs.store import StripeFS

_log = logging.getLogger(__name__)

CACHE_BUDGET = 64 << 30
LATEST = "@latest"
"""In ``prefetch``: every file of the newest complete checkpoint in the mounted folder."""
_WORKERS = 8
_PIECE = 16 << 20
_END_SECONDS = 15.0


class Record(msgspec.Struct, frozen=True):
    """A running server. ``born``: its start time in clock ticks since boot, so that a reused pid is not mistaken."""

    url: str
    mountpoint: str
    pid: int
    born: int


class ServerSpec(msgspec.Struct, frozen=True):
    """What a server process is told."""

    url: str
    mountpoint: str
    state: str
    cache_dir: str
    cache_budget: int
    memory: int
    prefetch: tuple[str, ...]


class FsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a mount has moved, in bytes. ``fetched_*``: from the store, because a reader waited or ahead of readers."""

    url: str
    mountpoint: str
    pid: int
    alive: bool = True
    bytes_read: int = 0
    fetched_demand: int = 0
    fetched_ahead: int = 0
    prefetch: Literal["none", "running", "done", "failed"] = "none"
    prefetch_total: int = 0
    prefetch_done: int = 0


class Paths:
    """What a server leaves in the state folder, one set of files per mount point (its path hashed).

    ``<id>.json``: who serves what (`Record`); ``<id>.status``: the latest `FsStatus`; ``<id>.log``: its log.
    """

    def __init__(self, state_dir: Path, mountpoint: Path) -> None:
        self.folder = state_dir / "fs"
        name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
        self.record, self.status, self.log = (
            self.folder / f"{name}{suffix}" for suffix in (".json", ".status", ".log")
        )

    def remove(self) -> None:
        for path in (self.record, self.status, self.log):
            path.unlink(missing_ok=True)


def born(pid: int) -> int:
    """Start time of a process; 0 when there is none, or it has ended and only waits to be reaped."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return 0
    fields = text.rsplit(")", 1)[1].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def write_atomically(path: Path, data: bytes) -> None:
    tmp = path.with_name(f"{path.name}.new")
    tmp.write_bytes(data)
    os.replace(tmp, path)


class Server:
    """Serves ``fs`` on ``mountpoint``; parameters as of `mount.serve`."""

    def __init__(
        self,
        fs: StripeFS,
        mountpoint: Path,
        *,
        prefetch: Sequence[str] = (),
        cache_dir: Path | None = None,
        cache_budget: int = CACHE_BUDGET,
        memory: int = MEMORY,
        status_file: Path | None = None,
    ) -> None:
        self._fs, self._mountpoint, self._status_file = fs, mountpoint, status_file
        self._wanted = tuple(prefetch)
        self._cache = NodeCache(cache_dir, cache_budget) if cache_dir else None
        self._ahead, self._memory = ReadAhead(self._cache, memory=memory), memory
        self._stop = threading.Event()
        self._prefetch: Literal["none", "running", "done", "failed"] = "running" if prefetch else "none"
        self._total = self._done = 0
        self._done_lock = threading.Lock()
        try:
            self._ops = StripeOperations(fs, self._ahead)
        except BaseException:
            self._ahead.close()
            raise
        # a pointer may be replaced at any time: names are believed for a second, contents (one node each) for ever
        options = fuse.Options(
            name="bootseer-fs",
            max_readahead=4 << 20 if os.geteuid() == 0 else 128 << 10,
            entry_timeout=1.0,
            attr_timeout=3600.0,
            allow_other=os.geteuid() == 0,
        )
        self._server = fuse.Server(self._ops, mountpoint, workers=_WORKERS, options=options)

    def start(self) -> None:
        """Mount. Errors as of `kernel.mount`; then nothing is left running."""
        try:
            self._server.start()
        except BaseException:
            self._ahead.close()
            raise
        self._write_status()

    def run(self, stop: threading.Event) -> None:
        """Prefetch and serve until the mount has ended or ``stop`` is set, then end everything."""
        threads = [threading.Thread(target=self._report, name="status", daemon=True)]
        if self._wanted:
            threads.append(threading.Thread(target=self._pull, name="prefetch", daemon=True))
        for thread in threads:
            thread.start()
        try:
            while not self._server.wait(0.2):
                if stop.is_set():
                    break
        finally:
            self._stop.set()
            self._server.stop(timeout=2.0)
            for thread in threads:
                thread.join(_END_SECONDS)
            self._ahead.close()
            if self._cache:
                self._cache.close()

    def _pull(self) -> None:
        try:
            files = [self._fs.open(path) for path in self._paths()]
            self._total = sum(file.size for file in files)
            with ThreadPoolExecutor(2, thread_name_prefix="bootseer-prefetch") as pool:
                for file in files:
                    limit = file.geometry.chunks
                    if self._cache is None or self._cache.add(file) is None:
                        limit = min(limit, self._memory // 2 // file.unit)
                        self._done += file.size - min(file.size, limit * file.unit)
                    step = max(1, _PIECE // file.unit)
                    list(
                        pool.map(
                            lambda first: self._pull_piece(file, first, min(first + step, limit)),  # noqa: B023
                            range(0, limit, step),
                        )
                    )
            self._prefetch = "done"
        except (BootseerError, OSError) as exc:
            self._prefetch = "failed"
            _log.warning("prefetch stopped: %s", exc)
        self._write_status()

    def _pull_piece(self, file: ChunkFile, first: int, last: int) -> None:
        if self._stop.is_set():
            raise UnavailableError("the mount ended")
        self._ahead.prefetch(file, first, last)
        with self._done_lock:
            self._done += min(last * file.unit, file.size) - first * file.unit

    def _paths(self) -> list[str]:
        found: list[str] = []
        for item in self._wanted:
            path = self._fs.latest("") if item == LATEST else clean(item)
            try:
                names = [join(path, file.path) for file in self._fs.checkpoint(path).files]
            except (NotFoundError, DataError):
                names = [name for name in self._fs.files(path) if name.rpartition("/")[2] != COMMIT]
            found += [name for name in names if name not in found]
        return found

    def _status(self) -> FsStatus:
        stats = self._ahead.stats
        return FsStatus(
            url=self._fs.url,
            mountpoint=str(self._mountpoint),
            pid=os.getpid(),
            bytes_read=self._ops.bytes_read,
            fetched_demand=stats.demand,
            fetched_ahead=stats.ahead,
            prefetch=self._prefetch,
            prefetch_total=self._total,
            prefetch_done=self._done,
        )

    def _write_status(self) -> None:
        if self._status_file is not None:
            with contextlib.suppress(FileNotFoundError), self._done_lock:
                write_atomically(self._status_file, msgspec.json.encode(self._status()))

    def _report(self) -> None:
        last = None
        while not self._stop.wait(0.2):
            if (now := self._status()) != last:
                self._write_status()
                last = now
