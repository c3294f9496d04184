"""Mounting a striped store: `start` (a background process), `serve` (this process), `find` and `FsMount.unmount`.

The server process has a session of its own and outlives its starter. When it dies, every access fails with ENOTCONN:
the mount never shows wrong bytes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bootseer import config as settings
from bootseer.config import Config
from bootseer.errors import BootseerError, NotFoundError, NotWritableError, UnavailableError, from_os_error
from bootseer.kernel import mount as mounts
from bootseer.stripefs.fs import open_fs
from bootseer.stripefs.mounted import _daemon
from bootseer.stripefs.mounted._daemon import FsStatus, Paths, Record, ServerSpec
from bootseer.stripefs.mounted.loader import MEMORY
from bootseer.stripefs.mounted.server import CACHE_BUDGET, LATEST, Server

__all__ = ["LATEST", "FsMount", "FsStatus", "find", "serve", "start"]

_log = logging.getLogger(__name__)

_BUSY_SECONDS = 5.0
_END_SECONDS = 15.0


class FsMount:
    """A mount served by a background process."""

    def __init__(self, record: Record, state_dir: Path) -> None:
        self.url, self.mountpoint, self.pid = record.url, Path(record.mountpoint), record.pid
        self._record, self._state_dir = record, state_dir
        self._paths = Paths(state_dir, self.mountpoint)

    def status(self) -> FsStatus:
        """The server's figures, at most half a second old."""
        alive = _daemon.born(self.pid) == self._record.born
        try:
            found = msgspec.json.decode(self._paths.status.read_bytes(), type=FsStatus)
        except (OSError, msgspec.DecodeError):
            found = FsStatus(url=self.url, mountpoint=str(self.mountpoint), pid=self.pid)
        return msgspec.structs.replace(found, alive=alive)

    def wait_prefetched(self, seconds: float) -> FsStatus:
        """Wait until nothing is left to prefetch; `UnavailableError` when that takes longer or the server ended."""
        until = time.monotonic() + seconds
        while (status := self.status()).prefetch == "running":
            if not status.alive:
                raise UnavailableError(f"the server of {self.mountpoint} has ended", hint=f"see {self._paths.log}")
            if time.monotonic() >= until:
                done = f"{status.prefetch_done} of {status.prefetch_total} bytes"
                raise UnavailableError(f"prefetch into {self.mountpoint} has {done} after {seconds:.0f} s")
            time.sleep(0.05)
        return status

    def unmount(self) -> None:
        """Unmount, and wait for the server to end. A busy mount is detached with a log line. Safe to call twice."""
        until = time.monotonic() + _BUSY_SECONDS
        while _is_ours(self.mountpoint):
            late = time.monotonic() >= until
            if late:
                _log.warning("%s is in use; detaching it, its users get errors", self.mountpoint)
            try:
                mounts.unmount(self.mountpoint, lazy=late)
            except BootseerError:
                if late:
                    raise
                time.sleep(0.05)
        _daemon.await_end(self._record, _END_SECONDS)
        if (now := _daemon.find(self._state_dir, self.mountpoint)) is None or now.pid == self.pid:
            self._paths.remove()


def _is_ours(mountpoint: Path) -> bool:
    entry = mounts.find(mountpoint)
    return entry is not None and entry.fstype == "fuse.bootseer-fs"


def start(
    url: str,
    mountpoint: Path,
    *,
    prefetch: bool | Sequence[str] = False,
    commit: bool = False,
    config: Config | None = None,
    memory: int = MEMORY,
    cache_budget: int = CACHE_BUDGET,
) -> FsMount:
    """Mount the store at ``url`` on ``mountpoint`` (made when missing), read-only, by a process of its own.

    ``prefetch``: paths of files and folders that the server pulls into the node cache from the start; True: all files
    (of the COMMIT, if there is one); `LATEST`. ``commit``: ``url`` must be a complete checkpoint. ``memory``: bytes
    of read-ahead held by the server; ``cache_budget``: bytes of the node's disk for prefetched files.

    Returns when the mount works. Raises `NotFoundError` for a folder that does not exist, `DataError` for a checkpoint
    without COMMIT, `UnavailableError`, `NotWritableError` when the mount point is in use, errors of `kernel.mount`.
    """
    config = config or settings.load()
    mountpoint = Path(os.path.abspath(mountpoint))
    state_dir = Path(config.state_dir)
    fs = open_fs(url)
    if commit:
        fs.checkpoint("")
    elif not fs.stat("").is_dir:
        raise NotFoundError(f"{url} is a file, a mount needs a folder")
    if (old := find(mountpoint, config=config)) is not None:
        if old.status().alive:
            raise NotWritableError(
                f"{mountpoint} is already a mount of {old.url}", hint="`bootseer fs unmount` it first"
            )
        _log.warning("the server of %s has died; removing its mount", mountpoint)
        old.unmount()
    try:
        mountpoint.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotWritableError(f"cannot mount: {mountpoint} is a file, a folder is needed") from None
    except OSError as exc:
        raise from_os_error(exc, f"make mount point {mountpoint}") from exc
    paths = Paths(state_dir, mountpoint)
    wanted = ("",) if prefetch is True else tuple(prefetch or ())
    spec = ServerSpec(
        url=fs.url,
        mountpoint=str(mountpoint),
        state=str(state_dir),
        cache_dir=os.path.join(config.cache_dir, "fs"),
        cache_budget=cache_budget,
        memory=memory,
        prefetch=wanted,
    )
    try:
        pid = _daemon.spawn(spec, paths)
    except BaseException:
        if _daemon.find(state_dir, mountpoint) is None:
            paths.status.unlink(missing_ok=True)
            if paths.log.exists() and not paths.log.stat().st_size:
                paths.log.unlink()
        raise
    record = Record(fs.url, str(mountpoint), pid, _daemon.born(pid))
    return FsMount(record, state_dir)


def find(mountpoint: Path, *, config: Config | None = None) -> FsMount | None:
    """The mount that `start` made at ``mountpoint``, even when its server has died."""
    state_dir = Path((config or settings.load()).state_dir)
    record = _daemon.find(state_dir, Path(os.path.abspath(mountpoint)))
    return FsMount(record, state_dir) if record else None


def serve(
    url: str,
    mountpoint: Path,
    *,
    prefetch: Sequence[str] = (),
    cache_dir: Path | None = None,
    cache_budget: int = CACHE_BUDGET,
    memory: int = MEMORY,
    ready: threading.Event | None = None,
    stop: threading.Event | None = None,
    status_file: Path | None = None,
) -> None:
    """Mount and serve in this process until it is unmounted or ``stop`` is set. ``ready`` is set once it works."""
    server = Server(
        open_fs(url),
        mountpoint,
        prefetch=prefetch,
        cache_dir=cache_dir,
        cache_budget=cache_budget,
        memory=memory,
        status_file=status_file,
    )
    server.start()
    if ready:
        ready.set()
    server.run(stop or threading.Event())
