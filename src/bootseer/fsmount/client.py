"""Mounting a striped store: `start` (background processes), `find` and `FsMount.unmount`.

The supervisor has a session of its own and outlives its starter. When it dies, every access fails with ENOTCONN: the
mount never shows wrong bytes. One process at a time starts or unmounts at a mount point.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bootseer import config as settings
from bootseer import errors
from bootseer.chunks.eviction import Limits
from bootseer.config import Config
from bootseer.errors import (
    BootseerError,
    ConfigError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
    doing,
    from_os_error,
)
from bootseer.folders import enterable, private_folder, trusted
from bootseer.fsmount.record import SILENCE, SPOOLS, FsStatus, Record, ServerSpec
from bootseer.kernel import background
from bootseer.kernel import mount as mounts
from bootseer.kernel.child import born
from bootseer.kernel.flock import is_at, lock
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit as commits
from bootseer.stripefs.checkpoint.access import AccessRecord
from bootseer.stripefs.files.readahead import MEMORY
from bootseer.stripefs.store import StripeFS, open_fs

_log = logging.getLogger(__name__)

SERVER = background.program("bootseer.fsmount.__main__")
_BUSY_SECONDS = 5.0
_END_SECONDS = 15.0
_START_SECONDS = 60.0
_NOTED_SECONDS = 10.0
"""For which a server is given time to write down what it noted."""


class FsMount:
    """A mount served by a background process."""

    def __init__(self, record: Record, path: Path) -> None:
        self.url, self.mountpoint, self.pid = record.status.url, Path(record.status.mountpoint), record.status.pid
        self._record, self._path = record, path

    def status(self) -> FsStatus:
        """The server's figures, at most half a second old."""
        record, alive = self._read(), born(self.pid) == self._record.born
        found = record.status if record else FsStatus(url=self.url, mountpoint=str(self.mountpoint), pid=self.pid)
        return msgspec.structs.replace(found, alive=alive)

    def _read(self) -> Record | None:
        """Its record, None when it is gone, or another server has its place."""
        record = Record.read(self._path)
        return record if record is not None and record.is_of(self._record) else None

    def wait_prefetched(self, seconds: float) -> FsStatus:
        """Wait until nothing is left to prefetch; `UnavailableError` when that takes longer or the server ended."""
        until = time.monotonic() + seconds
        while (status := self.status()).prefetch == "running":
            if not status.alive:
                raise UnavailableError(f"the server of {self.mountpoint} has ended", hint=f"see {_log_of(self._path)}")
            if time.monotonic() >= until:
                done = f"{status.prefetch_done} of {status.prefetch_total} bytes"
                raise UnavailableError(f"prefetch into {self.mountpoint} has {done} after {seconds:.0f} s")
            time.sleep(0.05)
        return status

    def release(self) -> None:
        """Let a prefetch begin that was started with ``hold``."""
        Record.hold(self._path).unlink(missing_ok=True)

    def accessed(self) -> AccessRecord:
        """What the readers of this mount had read when this was called, as far as its server says so in time."""
        asked, until = Record.asked(self._path), time.monotonic() + _NOTED_SECONDS
        with contextlib.suppress(OSError):  # no room: what was written down before counts
            asked.touch()
            while asked.exists() and time.monotonic() < until:
                time.sleep(0.02)
        return Record.read_accessed(self._path)

    def unmount(self) -> None:
        """Unmount, and wait for the server to end. A busy mount is detached with a log line. Safe to call twice."""
        with _alone(self._path):
            self.end()

    def end(self) -> None:
        """`unmount`, by who is alone at this mount point."""
        until = time.monotonic() + _BUSY_SECONDS
        while _is_ours(self.mountpoint) and (self._read() is not None or self.status().alive):  # not a later one
            late = time.monotonic() >= until
            if late:
                _log.warning("%s is in use; detaching it, its users get errors", self.mountpoint)
            try:
                mounts.unmount(self.mountpoint, lazy=late)
            except BootseerError:
                if late:
                    raise
                time.sleep(0.05)
        self._await_end()
        if self._read() is not None:
            for path in (self._path, _log_of(self._path), *Record.beside(self._path)):
                path.unlink(missing_ok=True)

    def _await_end(self) -> None:
        """Wait for the server to end. Tell it to, and kill it, with a log line, when that takes longer than it may.

        Its mount being gone from here is not enough: a mount namespace that some container made may still hold a copy.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if born(self.pid) != self._record.born:
                return
            for number, seconds in ((0, 0.5), (signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 5.0)):
                if number == signal.SIGKILL:
                    _log.warning(
                        "the server of %s has not ended within %g s; killing it", self.mountpoint, _END_SECONDS
                    )
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
                if select.select([fd], [], [], seconds)[0]:
                    return
        finally:
            os.close(fd)


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
    (of the COMMIT, if there is one); `LATEST`; an `AccessRecord`: the ranges that it names, of the files that these
    are here (`access.counterparts`). With ``hold`` it begins when `FsMount.release` is called.
    ``commit``: ``url`` must be a complete checkpoint. ``memory``: bytes of read-ahead held by the server.
    ``writable``: for writing, too (docs/reference/mount.md): new files get ``width`` stripes with units of ``unit``
    bytes, and at most ``spool`` bytes of files that are being written lie on this node.

    Returns when the mount works. Raises `NotFoundError` for a folder that does not exist, `DataError` for a checkpoint
    without COMMIT, `UnavailableError`, `NotWritableError` when the mount point is in use, `ConfigError` for cache and
    state folders that others can write to, and for a bad shape, `UnsupportedError` for writing to a store that cannot
    rename, errors of `kernel.mount`.
    """
    config = config or settings.load()
    mountpoint = Path(os.path.abspath(mountpoint))
    fs = open_fs(url)
    if writable:
        layout.check_shape(width, unit)
        if commit:
            raise ConfigError("a checkpoint with a COMMIT is finished: mount it read-only, or the folder above it")
        if fs.backend.access[0] == "fsspec":
            raise UnsupportedError(f"{fs.url} cannot be mounted for writing: its store has no folders to rename in")
    if commit:
        fs.checkpoint("")
    elif not fs.stat("").is_dir:
        raise NotFoundError(f"{url} is a file, a mount needs a folder")
    state_dir = private_folder(Path(config.state_dir), sub="fs").parent
    path = Record.path(state_dir, mountpoint)
    with _alone(path):
        if (record := Record.read(path)) is not None:
            old = FsMount(record, path)
            if old.status().alive:
                raise NotWritableError(
                    f"{mountpoint} is already a mount of {old.url}", hint="`bootseer unmount` it first"
                )
            _log.warning("the server of %s has died; removing its mount", mountpoint)
            old.end()
        _make_mountpoint(mountpoint)
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
            state_dir=str(state_dir),
            writable=writable,
            width=width,
            unit=unit,
            spool=spool,
            silence=SILENCE,
            shared=shared,
            allow_other=shared or (root and closed),  # closed: others are those whom root lets see it, as containers
        )
        Record.accessed(path).unlink(missing_ok=True)  # of a mount whose server was killed
        if hold:
            Record.hold(path).touch()
        return FsMount(_spawn(spec, path), path)


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


def _make_mountpoint(mountpoint: Path) -> None:
    try:
        mountpoint.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotWritableError(f"cannot mount: {mountpoint} is a file, a folder is needed") from None
    except OSError as exc:
        raise from_os_error(exc, f"make mount point {mountpoint}") from exc


@contextlib.contextmanager
def _alone(record: Path) -> Iterator[None]:
    """Nobody else starts or unmounts at the mount point with this record. `UnavailableError` when another does so for
    too long."""
    path, until = record.with_suffix(".lock"), time.monotonic() + _START_SECONDS + _END_SECONDS
    with contextlib.ExitStack() as undo:
        while True:
            with doing(f"open {path}"):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, fd)
            if lock(fd, until - time.monotonic()):
                if is_at(fd, path):
                    break
            else:
                raise UnavailableError(f"another process mounts or unmounts at this place for too long ({path})")
        try:
            yield
        finally:
            if not record.exists():
                path.unlink(missing_ok=True)


def find(mountpoint: Path, *, config: Config | None = None) -> FsMount | None:
    """The mount that `start` made at ``mountpoint``, even when its server has died."""
    path = Record.path(trusted(Path((config or settings.load()).state_dir)), os.path.abspath(mountpoint))
    record = Record.read(path)
    return FsMount(record, path) if record else None


def _log_of(record: Path) -> Path:
    return record.with_suffix(".log")


def _spawn(spec: ServerSpec, path: Path) -> Record:
    """Start a server and wait until its mount works. Raises what kept it from starting."""
    with doing(f"write {path.parent}"):
        log = open(_log_of(path), "wb")  # noqa: SIM115  closed below
    with log:
        answer = background.start(SERVER, msgspec.json.encode(spec), seconds=_START_SECONDS, stderr=log.fileno())
    try:
        found = msgspec.json.decode(answer, type=Record | tuple[str, str, str])
    except ValueError:
        raise UnavailableError(f"the server of {spec.mountpoint} did not start", hint=f"see {_log_of(path)}") from None
    if isinstance(found, Record):
        return found
    name, message, hint = found
    raise getattr(errors, name, BootseerError)(message, hint=hint)
