"""The fetcher process of a served tree: network, verification, cache file, control socket, recordings.

It may be killed at any time: the holder forks another, which goes on with the shared memory and the descriptors of the
dead one. Threads: the fetcher's own, ``wanted`` (requests of the front), ``control``, ``sync`` (bitmap, counters),
``prefetch``, ``readahead``, ``hotpack`` (after the recording); the main thread waits for notes of the holder and for
the end of the recording. What it does beside fetching: `ahead` (prefetch), `readahead`, `syncer`, `recorder`, `targets`
(the control socket's requests), `servestatus`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bootseer.blocks.cache import nodecache
from bootseer.blocks.cache.borrowed import Borrowed
from bootseer.blocks.cache.cache import CacheFile
from bootseer.blocks.cache.localtree import localize
from bootseer.blocks.fetcher.fetch import Fetcher
from bootseer.blocks.fetcher.source import StoreSource
from bootseer.blocks.profiles import profiles
from bootseer.blocks.profiles.recording import Recording
from bootseer.blocks.serving import takeover
from bootseer.blocks.serving.ahead import Ahead
from bootseer.blocks.serving.channel import Channel
from bootseer.blocks.serving.control import ControlServer, TreeStatus
from bootseer.blocks.serving.driver import DISK_SLACK
from bootseer.blocks.serving.foresight import Foresight
from bootseer.blocks.serving.link import Link, Note
from bootseer.blocks.serving.members import secede
from bootseer.blocks.serving.pulse import keep_beating
from bootseer.blocks.serving.readahead import Readahead
from bootseer.blocks.serving.recorder import Purpose, Recorder
from bootseer.blocks.serving.servestatus import Serving, Tally
from bootseer.blocks.serving.shared import UNIT, Count, Shared
from bootseer.blocks.serving.spec import ServerSpec
from bootseer.blocks.serving.syncer import keep_synced
from bootseer.blocks.serving.targets import Questions, Requests, Targets
from bootseer.blocks.serving.wants import Wants
from bootseer.blocks.serving.widen import widen
from bootseer.errors import UnavailableError
from bootseer.kernel import fanotify
from bootseer.store import Store

log = logging.getLogger(__name__)

_TICK = 0.2
_ROOM = 256 << 20
"""Given back by other trees when the disk is full."""


class Inherited(NamedTuple):
    """What a fetcher takes over from the one before."""

    shared: Shared
    data_fd: int
    lock_fd: int
    driver: str
    group: fanotify.Group | None


class FetcherProcess:
    """One fetcher. `run` returns when the holder says that the front is gone, or nobody else is left."""

    def __init__(
        self,
        spec: ServerSpec,
        folder: Path,
        store: Store,
        link: Link,
        channel: Channel,
        before: Inherited | None,
        foresight: Foresight | None = None,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._store = store
        self._link = link
        self._channel = channel
        self._stop = threading.Event()
        self._holder = Questions(link, spec.id)
        self._lingering = False
        self._told_complete = False
        self._tree = localize(store, spec.digest, Path(spec.cache_dir), meta=False)
        self._key = profiles.ProfileKey(spec.profile) if spec.profile is not None else None
        self._foresight = foresight
        self._chosen = threading.Event()
        self._driver = ""
        self._readahead: Readahead | None = None
        if before is None:
            self._begin()
        else:
            self._go_on(before)
        counts = self._shared.counts
        self._lent = Borrowed(self._cache)
        recording = Recording(
            self._shared.touch_log,
            spec.digest,
            self._tree.map.size,
            driver=self._trace_driver(),
            began=counts[Count.BEGAN_UNIX],
            clock=counts[Count.BEGAN_NS] / 1e9,
        )
        if self._key is not None and self._tree.map.size and self._driver == "local":
            log.info("tree %s is complete on this node: this start is not recorded, see trace.md", spec.id)
        self._recorder = Recorder(spec.id, recording, counts, self._purpose())
        self._serving = Serving(spec, counts, self._cache, self._fetcher, self._tally, self._recorder)

    def _recordable(self) -> bool:
        """Whether somebody wants the recording, and sees what is read."""
        return self._key is not None and self._tree.map.size > 0 and self._driver != "local"

    def _purpose(self) -> Purpose | None:
        """What this start is recorded for; None: it is not."""
        if self._key is None or not self._recordable():
            return None
        ahead = self._ahead
        return Purpose(
            self._store, self._key, ahead.target, self._lent, self._tree.cache, self._tree.meta,
            lambda: ahead.plan, ahead.keep_hot,
        )  # fmt: skip

    def _begin(self) -> None:
        """Make what the processes share, hand it to the holder, hear which driver it takes."""
        blocks, spec = self._tree.map, self._spec
        coming = nodecache.missing_bytes(self._tree)
        slack = DISK_SLACK if coming and spec.driver != "fuse" else 0
        limits = nodecache.Limits(spec.cache_limit, spec.cache_keep_free)
        nodecache.make_room(Path(spec.cache_dir), limits, coming=coming + slack, keep=self._tree.cache.name)
        units = -(-blocks.size // UNIT)
        self._shared = Shared.create(blocks.count, units, size=blocks.size, block_size=blocks.block_size)
        self._cache = CacheFile.open(self._tree.cache, blocks, self._tree.map_digest, ready=self._shared.ready)
        counts = self._shared.counts
        counts[Count.LOADED] = 1
        counts[Count.FETCHER_PID] = mine = os.getpid()
        keep_beating(counts, Count.FETCHER_BEAT, lambda: counts[Count.FETCHER_PID] != mine)
        counts[Count.BEGAN_NS] = time.monotonic_ns()
        counts[Count.BEGAN_UNIX] = int(time.time())
        counts[Count.DEADLINE_MS] = int(self._spec.demand_deadline * 1000)
        self._targets = Targets.begin(self._folder, spec)
        missing = min(blocks.size, (blocks.count - self._cache.ready_count) * blocks.block_size)
        note = Note("serve", complete=self._cache.complete, missing=missing, path=str(self._tree.cache))
        self._start_fetcher()
        # Hot blocks start to arrive while the holder prepares: their writes need no mark, and no mount.
        self._ahead.thread.start()
        self._link.send(note, [self._shared.fd, self._cache.fileno(), self._cache.lock_fd])
        answer = self._link.receive(timeout=60.0)
        if answer is None or answer[0].do != "serving":
            self._fetcher.close(1.0)
            self._cache.close()
            raise UnavailableError(answer[0].text if answer else "the holder does not answer")
        self._choose(answer[0].driver)
        self._group = fanotify.Group(answer[1][0]) if answer[1] else None
        if self._recordable():
            counts[Count.RECORDING] = 1
            if spec.readahead and self._key is not None:
                self._readahead = Readahead(
                    self._store, spec.digest, self._key, self._shared, spec.target, self._driver,
                    lambda: self._ahead.plan.pack,
                )  # fmt: skip
                self._readahead.start()

    def _go_on(self, before: Inherited) -> None:
        self._shared, self._group = before.shared, before.group
        self._cache = CacheFile.resume(
            self._tree.cache,
            self._tree.map,
            self._tree.map_digest,
            ready=self._shared.ready,
            lock_fd=before.lock_fd,
            data_fd=before.data_fd,
            broken=bool(self._shared.counts[Count.BROKEN]),
        )
        self._targets = Targets.load(self._folder, self._spec)
        self._start_fetcher()
        if self._shared.counts[Count.JOB_READY]:
            self._fetcher.eager()
        self._choose(before.driver)
        self._ahead.thread.start()

    def _start_fetcher(self) -> None:
        spec = self._spec
        self._tally = Tally(self._shared.counts)
        self._fetcher = Fetcher(
            self._cache,
            [StoreSource(self._store, self._tree.map)],
            streams=spec.fetch_streams,
            window=spec.demand_window,
            deadline=spec.demand_deadline,
            quiet=spec.fill_quiet,
            make_room=partial(nodecache.make_some, Path(spec.cache_dir), _ROOM, keep=self._tree.cache.name),
        )
        key = self._key if not self._cache.complete else None
        self._ahead = Ahead(
            self._tree, self._store, key, self._fetcher, self._trace_driver, self._foresight, fill=spec.background_fill
        )

    def _choose(self, driver: str) -> None:
        self._driver = driver
        self._chosen.set()

    def _trace_driver(self) -> str:
        """The driver whose reads the traces are of."""
        self._chosen.wait(60.0)
        return self._driver if self._driver != "local" else "fanotify"

    # -- the life of the process -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the end, leave nothing behind."""
        ours = (self._cache, self._shared.counts, self._stop, self._at_sync)
        keep = partial(keep_synced, prefetching=lambda: self._fetcher.prefetching)
        syncer = threading.Thread(target=keep, args=ours, name="sync", daemon=True)
        threads = [self._ahead.thread, syncer]
        wants = Wants(self._channel, self._fetcher, self._cache, self._stop, from_memory=self._driver == "fuse")
        wanted = threading.Thread(target=wants.run, name="wanted", daemon=True)
        control: ControlServer | None = None
        try:
            syncer.start()
            if self._driver != "local":
                wanted.start()  # not joined: it waits for messages, and the end of the process ends it
            requests = Requests(self._targets, self._holder, self._shared.counts, self._stop, self._status, self._still)
            control = ControlServer(self._folder, requests.handle)
            self._link.send(Note("started"))
            self._serve()
        finally:
            self._stop.set()
            self._still()
            self._recorder.end()
            more = self._recorder.finish()
            self._fetcher.close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(10.0)
            self._serving.keep_count()
            self._lent.leave()
            self._cache.close()
            if control is not None:
                control.close()
            limits = nodecache.Limits(self._spec.cache_limit, self._spec.cache_keep_free)
            nodecache.make_room(Path(self._spec.cache_dir), limits)
        if more:
            self._stay_behind()

    def _stay_behind(self) -> None:
        """Finish the hot pack when all else is done, as nobody's member: the unmount is over, the tree may be mounted
        anew."""
        log.info("tree %s is left; process %d finishes its hot pack", self._spec.id, os.getpid())
        secede()
        self._tree.hold.release()
        self._drop_group()
        self._link.send(Note("behind"))
        self._recorder.behind()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                got = self._link.receive(timeout=_TICK)
            except UnavailableError:
                self._alone()
                return
            if got is not None:
                self._heed(got[0], got[1])
            counts = self._shared.counts
            self._recorder.poll()
            if self._driver == "fuse" and self._cache.complete:
                widen(self._folder)
            age = (time.monotonic_ns() - counts[Count.BEGAN_NS]) / 1e9
            if counts[Count.JOB_READY] or age >= self._spec.record_seconds:
                self._recorder.end()
                self._fetcher.eager()
                self._tell_complete()

    def _heed(self, note: Note, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)
        if note.do == "left":
            self._stop.set()
        elif note.do == "busy":
            self._lingering = True
        elif note.do == "staying":
            self._lingering = False
        elif note.do == "local":
            self._driver = "local"
            self._drop_group()
            log.info("tree %s is complete: it needs no server any more", self._spec.id)
        self._holder.heed(note)

    def _still(self, target: str = "") -> None:
        if self._readahead is not None:
            self._readahead.still(target)

    def _tell_complete(self) -> None:
        cache = self._cache
        if self._driver == "fanotify" and not self._told_complete and cache.complete and not cache.broken:
            try:
                cache.sync()
            except OSError:
                return  # the sync thread says so
            if cache.durable:
                self._told_complete = self._link.send(Note("complete"))

    def _alone(self) -> None:
        """Holder and front died at once. Deny what is left to be denied until nobody uses the mount any more."""
        self._holder.left_alone()
        log.critical("holder and front of tree %s are gone", self._spec.id)
        if self._group is not None and self._driver == "fanotify":
            takeover.deny_while_used(self._shared, self._group, self._cache.fileno())

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    # -- bitmap, status ------------------------------------------------------------------------------------------

    def _at_sync(self) -> None:
        self._serving.keep_count()
        self._targets.retry()

    def _status(self) -> TreeStatus:
        blocks = self._tree.map.count
        return self._serving.status(
            self._driver, self._targets.now, self._ahead.plan, blocks=blocks, lingering=self._lingering
        )
