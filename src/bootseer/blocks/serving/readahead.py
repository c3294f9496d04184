"""The readahead of a served tree: has the mount read what starts of the job read, before the job does.

Only blocks that are ready are read: this thread waits for the hot stream, it never asks for a block. What was read
ahead is not seen when the job touches it, so such a start adds nothing to the profile; see
``docs/internals/pagelist.md``.

One thread, in the fetcher process. It looks at each range whether it is to end (`Count.STILL`), and then has no file
open any more: an unmount must not find the mount in use."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from bootseer import faults
from bootseer.blocks.formats import hotpack
from bootseer.blocks.formats.pagelist import PageList, PageRange
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.errors import BootseerError, NotFoundError
from bootseer.kernel import beneath, procfs
from bootseer.kernel import mount as mounts
from bootseer.objects import Store

log = logging.getLogger(__name__)

_MEMORY_SHARE = 0.25
"""Of the memory that is available, what the ranges may take."""
_RECORDED_SHARE = 0.5
"""Of the starts whose list is not fresh, those that are recorded in full: a job that starts rarely is to gain, too."""
_MOUNT_SECONDS = 10.0
_PACK_SECONDS = 10.0
_BLOCK_SECONDS = 20.0
"""The hot stream may keep this thread waiting for so long, together; what has not come then is left to the job."""
_LOOK = 0.02
"""Seconds until the next look for the pack, or for the mount: that reads all mounts of the node, perhaps a thousand."""
_STILL = 0.05
"""Seconds after which one that waits for blocks looks whether it is to keep still."""


class Readahead:
    """Reads ahead in the mount of tree ``digest`` on ``target`` by the profile ``key``. ``pack`` gives the key of the
    hot pack in use, once it is known; ``until`` is the fetcher's, for blocks; `run` it when the tree is served."""

    def __init__(
        self,
        store: Store,
        key: ProfileKey,
        shared: SharedMemory,
        target: str,
        digest: str,
        pack: Callable[[], str],
        until: Callable[[Callable[[], bool], float], bool],
    ) -> None:
        self._store, self._digest, self._key, self._shared = store, digest, key, shared
        self._target, self._pack, self._until = Path(target), pack, until
        self._waited = 0.0

    @property
    def _ends(self) -> bool:
        return bool(self._shared.counts[Count.STILL])

    def run(self) -> None:
        """For a thread that then lasts as long as its process: the kernel answers in its own time what was asked for,
        and no other thread may have the number (`Count.READAHEAD_TID`) until then."""
        try:
            pages = self._list()
            if pages is not None and self._mounted():
                self._read(pages)
        except BootseerError as exc:
            log.warning("no readahead in tree %s: %s", self._digest[:12], exc)
        except Exception:
            log.exception("the readahead in tree %s failed; the job reads for itself", self._digest[:12])

    def _list(self) -> PageList | None:
        """What to read; None: nothing."""
        until = time.monotonic() + _PACK_SECONDS
        while True:
            known = self._shared.counts[Count.HOT_KNOWN]  # before the look: a pack is named before that
            if pack := self._pack():
                break
            if known or time.monotonic() >= until or self._ends:
                return None
            time.sleep(_LOOK)
        if not pack.startswith(f"{self._key.prefix(self._digest)}/"):
            return None  # another job's: this one is to be recorded
        try:
            pages = library.load_pages(self._store, hotpack.pages_key(pack), self._digest, self._shared.size)
        except NotFoundError:
            return None  # no start has been recorded
        if not pages.fresh and random.random() < _RECORDED_SHARE and library.publishes(os.environ):
            log.info("tree %s: no readahead, this start is recorded in full", self._digest[:12])
            return None
        if pages.size > _MEMORY_SHARE * (available := _available()):
            log.info("no readahead: its %d bytes are too much for the %d that are free", pages.size, available)
            return None
        return pages

    def _mounted(self) -> bool:
        until = time.monotonic() + _MOUNT_SECONDS
        while (entry := mounts.find(self._target)) is None or entry.fstype != "erofs":
            if time.monotonic() >= until:
                log.info("no readahead: %s is not seen to be mounted", self._target)
                return False
            if self._ends:
                return False
            time.sleep(_LOOK)
        return True

    def _read(self, pages: PageList) -> None:
        counts = self._shared.counts
        counts[Count.INCOMPLETE] = 1  # before the first page that a touch will not be seen of
        counts[Count.READAHEAD_OPEN], counts[Count.READAHEAD_TID] = 1, threading.get_native_id()
        began = time.monotonic()
        try:
            for path, ranges in itertools.groupby(pages.ranges, key=operator.attrgetter("path")):
                if self._ends:
                    break
                self._file(path, ranges)
        except OSError as exc:
            log.info("the readahead in tree %s ends: %s", self._digest[:12], exc)
        finally:
            counts[Count.READAHEAD_OPEN] = 0
        log.info(
            "%d of %d bytes read ahead in %.1f s, %.1f of them for the hot stream",
            counts[Count.READ_AHEAD], pages.size, time.monotonic() - began, self._waited,
        )  # fmt: skip

    def _file(self, path: bytes, ranges: Iterable[PageRange]) -> None:
        """Read ``ranges``, all of one file, ahead. The file is not open while one of them is waited for."""
        fd = -1
        try:
            for one in ranges:
                if fd >= 0 and not self._shared.is_ready(one.data, one.length):
                    os.close(fd)
                    fd = -1
                if self._await_ready(one):
                    if fd < 0:
                        if (fd := self._open(path)) < 0:
                            return
                        faults.point("blocks.readahead.open")
                    os.posix_fadvise(fd, one.offset, one.length, os.POSIX_FADV_WILLNEED)
                    self._shared.counts[Count.READ_AHEAD] += one.length
                if self._ends:
                    return
        finally:
            if fd >= 0:
                os.close(fd)

    def _await_ready(self, one: PageRange) -> bool:
        """Whether the blocks of a range are there, after a while."""
        ready = partial(self._shared.is_ready, one.data, one.length)
        while not ready():
            if self._waited >= _BLOCK_SECONDS or self._ends:
                return False
            began = time.monotonic()
            self._until(ready, _STILL)
            self._waited += time.monotonic() - began
        return True

    def _open(self, path: bytes) -> int:
        """The regular file ``path`` of the mounted tree; -1: it is none: a device, a pipe or a link that the list (or
        who replaced folders above the mount) leads to."""
        try:
            with beneath.folder(self._target) as root:
                return beneath.open_regular(os.fsdecode(path), root=root)
        except OSError:
            return -1


def _available() -> int:
    """Bytes of memory that the kernel would give without swapping, and that the cgroups of this process allow: page
    cache is charged to who reads first."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    for limit, used in _cgroup_files():
        with contextlib.suppress(OSError, ValueError):  # "max"; the root has neither
            found = min(found, int(limit.read_text()) - int(used.read_text()))
    return found


def _cgroup_files() -> Iterator[tuple[Path, Path]]:
    """Limit and use of memory of each cgroup above this process, of either version (cgroups(7))."""
    for controllers, path in procfs.cgroups():
        if "memory" in controllers.split(","):
            base, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        else:
            continue
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):
            yield folder / names[0], folder / names[1]
            folder = folder.parent
