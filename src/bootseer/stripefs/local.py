"""What a process without a mount reads of striped stores by URL, through the node cache (`bootseer.torch`, fsspec).

As with a mount, chunks of striped files are looked for in the node cache and kept there (`nodecache`), what is read of
the checkpoint of a job that `bootseer run` started is noted for its next start (`checkpoint.jobaccess`), and what was
moved is written to the span of the load. Without a cache folder that can be used, files are read as they are. The
default one is used if it is on a disk of the node: not in memory or in the root file system of a container, which count
against the job and end with it, nor in a home folder that all nodes share. Concurrency: any thread may read and close
files of one `Load`. A forked child has no cache of its parent's."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import tomllib  # noqa: F401  not by a thread when settings are read: a process that is forked then never gets it
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from bootseer import config as settings
from bootseer.backends.interface import join
from bootseer.chunks.eviction import Limits
from bootseer.errors import BootseerError
from bootseer.folders import private_folder
from bootseer.kernel import mount
from bootseer.profile import emit
from bootseer.stripefs.checkpoint.jobaccess import JobAccess
from bootseer.stripefs.files.reader import NOWHERE, ChunkFile, Local
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.waiting import Waited

_log = logging.getLogger(__name__)

_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
"""File systems that are taken for a disk of the node."""
_SOON = 1.0
"""Seconds after which `Load.tell_soon` tells."""


class Load:
    """Reads of files of the store at ``base``: `use` each file, then close it. ``how``: by what, for the span
    ``checkpoint_load`` from the first file to `tell`; without, there is none."""

    def __init__(self, base: str, how: str = "") -> None:
        self.pid = os.getpid()
        self._base, self._how, self._span, self._waited = base, how, "", Waited()
        self._cache = node_cache()
        self._noted = _job_access()
        self._lock = threading.RLock()
        self._files: set[_LoadedFile] = set()
        self.moved: dict[str, int | float] = {}
        """Bytes that readers ``needed``, and that were ``fetched`` from the store, ``cached`` on the node, ``received``
        from other ranks and fetched because one did not send them (``repeated``); seconds that readers ``waited``. Of
        open files what they have counted comes to it."""
        self._timer: threading.Timer | None = None

    def use(self, file: ChunkFile) -> ChunkFile:
        """``file`` reads by way of the node cache from now on, until it is closed."""
        url = join(self._base, file.path)
        cached = self._cache.open(file, url) if self._cache else None
        here = _LoadedFile(self, file, url, cached or NOWHERE, self._noted)
        with self._lock:
            self._files.add(here)
            if self._how and not self._span:
                self._span = emit.begin("checkpoint_load", how=self._how)
        file.attach(here)
        return file

    def done(self, here: _LoadedFile) -> None:
        """The file of ``here`` is closed."""
        with self._lock:
            if here in self._files:
                self._files.remove(here)
                self.count(here.moved)

    @contextlib.contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """A reader waits meanwhile for ``size`` bytes that it needs."""
        with self._waited:
            yield
        self.count({"needed": size})

    def count(self, moved: Mapping[str, int | float]) -> None:
        """Add ``moved``, counts by the names of `moved`."""
        with self._lock:
            for name, value in moved.items():
                self.moved[name] = self.moved.get(name, 0) + value

    def tell(self) -> None:
        """Say what was moved until now, and what was read of the job's checkpoint."""
        if self.pid != os.getpid():
            return
        with self._lock:
            moved = {**self.moved, "waited": self.moved.get("waited", 0) + self._waited.seconds}
            for name in ("fetched", "cached"):
                moved[name] = moved.get(name, 0) + sum(here.moved[name] for here in list(self._files))
            span, self._span = self._span, ""
        if span:
            emit.end(span, **{name: round(value, 3) for name, value in moved.items()})
        if self._noted is not None:
            with _telling:
                self._noted.write()

    def tell_soon(self) -> None:
        """`tell` within a second, once for all calls until then."""
        if self._noted is None or self._timer is not None:
            return
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(_SOON, self._tell_late)
                self._timer.daemon = True
                _untold.add(self)
                with contextlib.suppress(RuntimeError):  # the interpreter ends
                    self._timer.start()

    def _tell_late(self) -> None:
        with self._lock:
            self._timer = None
        _untold.discard(self)
        self.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.tell()


class _LoadedFile(Local):
    """What the node has of one file of a load. In a forked child it does nothing."""

    def __init__(self, load: Load, file: ChunkFile, url: str, cached: Local, noted: JobAccess | None) -> None:
        self._load, self._file, self._url, self._cached, self._noted = load, file, url, cached, noted

    @property
    def moved(self) -> dict[str, int]:
        return {"fetched": self._file.fetched, "cached": self._file.cached}

    @property
    def _ours(self) -> bool:
        return self._load.pid == os.getpid()

    def note(self, offset: int, length: int) -> None:
        if self._noted is not None and self._ours:
            self._noted.add(self._url, self._file.size, offset, length)

    def has(self, chunk: int) -> bool:
        return self._ours and self._cached.has(chunk)

    def fill(self, wanted: Mapping[int, memoryview]) -> Mapping[int, memoryview]:
        return self._cached.fill(wanted) if self._ours else wanted

    def keep(self, chunk: int, data: Sequence[memoryview], *, steady: bool = False) -> None:
        if self._ours:
            self._cached.keep(chunk, data, steady=steady)

    def close(self) -> None:
        if self._ours:
            self._load.done(self)
            self._cached.close()


_lock, _telling = threading.Lock(), threading.Lock()
caches: dict[str, NodeCache | None] = {}
_jobs: dict[tuple[str, Path], JobAccess] = {}
_untold: set[Load] = set()


def node_cache() -> NodeCache | None:
    """The node cache of the settings; None, with a log line for each folder, where there is none to use."""
    try:
        config, sources = settings.trace()
    except BootseerError as exc:
        _log.warning("loads do not use a node cache: %s", exc)
        return None
    with _lock:
        if config.cache_dir not in caches:
            caches[config.cache_dir] = _opened(config, chosen=sources["cache_dir"] != "default")
        return caches[config.cache_dir]


def _opened(config: settings.Config, *, chosen: bool) -> NodeCache | None:
    try:
        if not chosen and (kind := mount.fstype(config.cache_dir)) not in _DISKS:
            _log.info("loads do not use a node cache: %s is on %s; set cache_dir to use one", config.cache_dir, kind)
            return None
        folder = private_folder(Path(config.cache_dir), sub="blocks").parent
        return NodeCache(folder, Limits(config.cache_limit, config.cache_keep_free))
    except (BootseerError, OSError, RuntimeError) as exc:  # the last: no thread, as the program ends
        _log.log(logging.WARNING if chosen else logging.INFO, "loads do not use a node cache: %s", exc)
        return None


def _job_access() -> JobAccess | None:
    """One for all loads of this process, which keep one record."""
    made = JobAccess.of_environment()
    with _lock:
        return _jobs.setdefault(made.key, made) if made is not None else None


@atexit.register
def end() -> None:
    for load in list(_untold):
        load.tell()
    for cache in list(caches.values()):
        if cache is not None:
            cache.close()


def _leave() -> None:
    global _lock, _telling
    _lock, _telling = threading.Lock(), threading.Lock()
    for cache in caches.values():
        if cache is not None:
            cache.leave()
    caches.clear()
    _jobs.clear()
    _untold.clear()


os.register_at_fork(after_in_child=_leave)
