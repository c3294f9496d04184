"""Mounting a striped store: `start` (background processes), `find` and `FsMount.unmount`. The server outlives its
starter. When all its processes die, every access fails with ENOTCONN. One process at a time starts or unmounts at a
mount point."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from bootseer import config as settings
from bootseer.backends.open import locate
from bootseer.chunks.eviction import Limits
from bootseer.config import Config
from bootseer.errors import (
    BootseerError,
    ConfigError,
    NotFoundError,
    NotWritableError,
    UnsupportedError,
    logged,
)
from bootseer.folders import enterable, private_folder, settled, trusted
from bootseer.fsmount.record import SERVER, SILENCE, SPOOLS, FsStatus, MountRecord, ServerSpec, recorded, state_folder
from bootseer.kernel import background
from bootseer.kernel import mount as mounts
from bootseer.served import client
from bootseer.served.client import alive, ask, await_exit, ended, locked, remove, unmount
from bootseer.served.protocol import GoneError, Request
from bootseer.stripefs import layout, localcopy
from bootseer.stripefs.checkpoint import commit as commits
from bootseer.stripefs.checkpoint.access import AccessRecord
from bootseer.stripefs.files.readahead import MEMORY
from bootseer.stripefs.store import StripeFS, open_fs

_log = logging.getLogger(__name__)

_END_SECONDS = 15.0
_GRACE_SECONDS = 5.0
_UNMOUNTED_SECONDS = 0.5
"""For a server to see that its mount is gone."""
_NOTED_SECONDS = 10.0
"""For which a server is given time to say what it noted."""


class FsMount:
    """A mount served by a background process."""

    def __init__(self, record: MountRecord, folder: Path) -> None:
        self.url, self.mountpoint = record.url, Path(record.mountpoint)
        self._record, self._folder = record, folder

    @property
    def pid(self) -> int:
        """The supervisor; 0 when the server has died."""
        return self.status().pid

    def status(self) -> FsStatus:
        """The server's figures; none of one that has died. Raises `UnavailableError` when it lives and does not
        answer."""
        if recorded(self._folder) == self._record:  # else another server has its place
            with contextlib.suppress(GoneError):
                return self._ask("status")
        return FsStatus(url=self.url, mountpoint=str(self.mountpoint), alive=False)

    def _ask(self, do: str) -> FsStatus:
        return ask(self._folder, Request(do), FsStatus)

    def release(self) -> None:
        """Let a prefetch begin that was started with ``hold``."""
        with logged(_log.warning, "the prefetch into %s begins by itself, later", self.mountpoint, kinds=BootseerError):
            self._ask("release")

    def accessed(self) -> AccessRecord:
        """What the readers of this mount have read; nothing, with a log line, when its server does not say so."""
        try:
            return ask(self._folder, Request("accessed"), AccessRecord, timeout=_NOTED_SECONDS)
        except BootseerError as exc:
            _log.warning("what was read of %s is not known: %s", self.mountpoint, exc)
            return AccessRecord()

    def unmount(self) -> None:
        """Unmount, and wait for the server to end. A busy mount is detached with a log line. Safe to call twice."""
        with locked(self._folder):
            if recorded(self._folder) == self._record:  # not a later one
                _end(self._folder, self.mountpoint)


def _end(folder: Path, mountpoint: Path) -> None:
    """Unmount; see the server out: a namespace of a container may still hold a copy."""
    unmount(mountpoint, lambda: _is_ours(mountpoint), users="get errors")
    if not ended(folder, _UNMOUNTED_SECONDS):
        with contextlib.suppress(BootseerError):
            ask(folder, Request("end"), FsStatus, timeout=_UNMOUNTED_SECONDS)
        await_exit(folder, _END_SECONDS)
    remove(folder)
    for log in (_log_of(folder), _log_of(folder).with_suffix(".log.old")):
        log.unlink(missing_ok=True)


def _is_ours(mountpoint: Path) -> bool:
    entry = mounts.find(mountpoint)
    return entry is not None and entry.fstype == "fuse.bootseer-fs"


@background.preloaded(SERVER)
def start(
    url: str,
    mountpoint: Path,
    *,
    prefetch: bool | AccessRecord | Sequence[str] = False,
    hold: bool = False,
    commit: bool = False,
    config: Config | None = None,
    memory: int = MEMORY,
    writable: bool = False,
    width: int = layout.WIDTH,
    unit: int = layout.UNIT,
    spool: int = SPOOLS,
) -> FsMount:
    """Mount the store at ``url`` on ``mountpoint`` (made when missing), read-only, by a process of its own.

    ``prefetch``: paths of files and folders that the server pulls into the node cache from the start; True: all files
    (of the COMMIT, if there is one); `LATEST`; an `AccessRecord`: its ranges, of the files that these are here
    (`access.counterparts`). With ``hold`` it begins when `FsMount.release` is called. ``commit``: ``url`` must be a
    complete checkpoint. ``memory``: bytes of read-ahead held by the server. ``writable``: for writing, too
    (docs/reference/mount.md): new files get ``width`` stripes with units of ``unit`` bytes, and at most ``spool`` bytes
    of files that are being written lie on this node.

    Returns when the mount works. Raises `NotFoundError` for a folder that does not exist, `DataError` for a checkpoint
    without COMMIT, `UnavailableError`, `NotWritableError` when the mount point is in use, `ConfigError` for cache and
    state folders that others can write to, for a mount point of root's that they can replace, and for a bad shape,
    `UnsupportedError` for writing to a store that cannot rename, errors of `kernel.mount`."""
    config = config or settings.load()
    mountpoint = Path(locate(mountpoint).path)
    if os.geteuid() == 0:  # where nobody else leads the name to another folder of the machine
        settled(mountpoint)
    fs = open_fs(url)
    if writable:
        layout.check_shape(width, unit)
        if commit:
            raise ConfigError("a checkpoint with a COMMIT is finished: mount it read-only, or the folder above it")
        if not fs.backend.has_folders:
            raise UnsupportedError(f"{fs.url} cannot be mounted for writing: its store has no folders to rename in")
    if commit:
        fs.checkpoint("")
    elif not fs.stat("").is_dir:
        raise NotFoundError(f"{url} is a file, a mount needs a folder")
    state_dir = private_folder(Path(config.state_dir), sub="fs").parent
    folder = state_folder(state_dir, mountpoint)
    with locked(folder):
        if folder.exists():
            old = recorded(folder)
            if alive(folder):
                what = f"a mount of {old.url}" if old else "mounted"
                raise NotWritableError(f"{mountpoint} is already {what}", hint="`bootseer unmount` it first")
            _log.warning("the server of %s has died; removing its mount", mountpoint)
            _end(folder, mountpoint)
        localcopy.folder(mountpoint)
        root, closed = os.geteuid() == 0, not enterable(mountpoint)
        shared = root and not closed and _may_be_shared(fs)
        spec = ServerSpec(
            url=fs.url if os.path.isabs(fs.url) else url,  # with its login, which ``fs.url`` has not
            mountpoint=str(mountpoint),
            prefetch=("",) if prefetch is True else () if isinstance(prefetch, AccessRecord) else tuple(prefetch or ()),
            ranges=prefetch.files if isinstance(prefetch, AccessRecord) else (),
            hold=hold,
            memory=memory,
            cache_dir=str(private_folder(Path(config.cache_dir), sub="blocks").parent),
            limits=Limits(config.cache_limit, config.cache_keep_free),
            writable=writable,
            width=width,
            unit=unit,
            spool=spool,
            silence=SILENCE,
            shared=shared,
            allow_other=shared or (root and closed),  # closed: others are those whom root lets see it, as containers
        )
        record = MountRecord(id=folder.name, url=fs.url, mountpoint=str(mountpoint), began=time.time_ns())
        try:
            client.start(folder, SERVER, spec, bool, record=record, ending=signal.SIGTERM)
        except BaseException:
            # its supervisor gives the server as long, and then unmounts
            await_exit(folder, _END_SECONDS + _GRACE_SECONDS)
            unmount(mountpoint, lambda: _is_ours(mountpoint), users="get errors")
            remove(folder)
            raise
        return FsMount(record, folder)


def _may_be_shared(fs: StripeFS) -> bool:
    """Whether users besides this one may use a mount of ``fs``: the kernel holds them to its owners and modes, so the
    storage must tell those, and everybody must have the right to go through the folders above."""
    above = [store.stat(folder).permissions for store, folder, _ in commits.above(fs.backend, "")]
    if fs.stat("").permissions is None or None in above:
        _log.info("%s does not tell owners and modes: the mount is for this user alone", fs.url)
        return False
    if any(found is not None and not found.mode & 0o001 for found in above):
        _log.info("a folder above %s is not open to everybody: the mount is for this user alone", fs.url)
        return False
    return True


def find(mountpoint: Path, *, config: Config | None = None) -> FsMount | None:
    """The mount that `start` made at ``mountpoint``, even when its server has died."""
    folder = state_folder(trusted(Path((config or settings.load()).state_dir)), os.path.abspath(mountpoint))
    record = recorded(folder)
    return FsMount(record, folder) if record else None


def _log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")
