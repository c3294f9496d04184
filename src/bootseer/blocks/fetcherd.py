"""The fetcher process of a served tree: network, verification, cache file, control socket, recordings.

It may be killed at any time: the holder forks another, which goes on with the shared memory and the descriptors of the
dead one. Threads: the fetcher's own, ``wanted`` (requests of the front), ``control``, ``sync`` (bitmap, counters),
``prefetch``, ``hotpack``
(after the recording); the main thread waits for notes of the holder and for the end of the recording.
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

import msgspec

from bootseer.blocks import cacheparts, keeper, nodecache, prefetch, profiles
from bootseer.blocks.cache import CacheFile, in_use
from bootseer.blocks.channel import Channel
from bootseer.blocks.control import ControlServer, Request, StoppingError, TreeStatus
from bootseer.blocks.driver import DISK_SLACK
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.flight import FetchStats
from bootseer.blocks.link import Link, Note
from bootseer.blocks.manifest import LocalTree, localize
from bootseer.blocks.pulse import keep_beating
from bootseer.blocks.recording import Recording
from bootseer.blocks.shared import UNIT, Count, Shared
from bootseer.blocks.source import StoreSource
from bootseer.blocks.spec import TARGETS, ServerSpec
from bootseer.blocks.wants import Wants
from bootseer.errors import BootseerError, UnavailableError
from bootseer.kernel import fanotify
from bootseer.store import Store

log = logging.getLogger(__name__)

_SYNC_SECONDS = 2.0
_TICK = 0.2
_HOLDER_SECONDS = 5.0
"""For its answer; less than a client waits for one, more than the holder needs to end a FUSE mount that is busy."""
_ROOM = 256 << 20
"""Given back by other trees when the disk is full."""
_FAREWELL_SECONDS = 10.0
"""A hot pack of 700 MB takes 5 s at full speed; who unmounts waits for that."""


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
        self, spec: ServerSpec, folder: Path, store: Store, link: Link, channel: Channel, before: Inherited | None
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._store = store
        self._link = link
        self._channel = channel
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._left_alone = threading.Event()
        self._answer = Note("")
        self._asked = os.getpid() << 20
        self._unkept = False
        """Whether the file of targets is behind."""
        self._lingering = False
        self._told_complete = False
        self._plan = prefetch.Plan()
        self._use = profiles.HotUse()
        self._renewal: threading.Thread | None = None
        self._hurry = threading.Event()
        self._renewal_stop = threading.Event()
        self._hot_pack = ""
        self._recording = "off"
        self._tree = localize(store, spec.digest, Path(spec.cache_dir), meta=False)
        self._key = profiles.ProfileKey(spec.profile) if spec.profile is not None else None
        self._target = prefetch.Target(spec.digest, self._tree.map_digest.hex(), self._tree.map)
        self._chosen = threading.Event()
        self._driver = ""
        self._prefetcher = threading.Thread(target=self._prefetch, name="prefetch", daemon=True)
        if before is None:
            self._begin()
        else:
            self._go_on(before)
        counts = self._shared.counts
        self._recorder = Recording(
            self._shared.touch_log,
            spec.digest,
            self._tree.map.size,
            driver=self._trace_driver(),
            began=counts[Count.BEGAN_UNIX],
            clock=counts[Count.BEGAN_NS] / 1e9,
        )
        if self._key is not None and self._tree.map.size and self._driver != "local":
            self._recording = "ended" if counts[Count.RECORDED] else "recording"

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
        self._targets = [self._spec.target]
        self._keep_targets()
        missing = min(blocks.size, (blocks.count - self._cache.ready_count) * blocks.block_size)
        note = Note("serve", complete=self._cache.complete, missing=missing, path=str(self._tree.cache))
        self._start_fetcher()
        # Hot blocks start to arrive while the holder prepares: their writes need no mark, and no mount.
        self._prefetcher.start()
        self._link.send(note, [self._shared.fd, self._cache.fileno(), self._cache.lock_fd])
        answer = self._link.receive(timeout=60.0)
        if answer is None or answer[0].do != "serving":
            self._fetcher.close(1.0)
            self._cache.close()
            raise UnavailableError(answer[0].text if answer else "the holder does not answer")
        self._choose(answer[0].driver)
        self._group = fanotify.Group(answer[1][0]) if answer[1] else None
        if self._key is not None and blocks.size and self._driver != "local":
            counts[Count.RECORDING] = 1

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
        try:
            self._targets = msgspec.json.decode((self._folder / TARGETS).read_bytes(), type=list[str])
        except (OSError, msgspec.MsgspecError) as exc:
            log.warning("the mounts of tree %s are not known any more: %s", self._spec.id, exc)
            self._targets = [self._spec.target]
        self._start_fetcher()
        if self._shared.counts[Count.JOB_READY]:
            self._fetcher.eager()
        self._choose(before.driver)
        self._prefetcher.start()

    def _start_fetcher(self) -> None:
        spec, counts = self._spec, self._shared.counts
        self._before = [counts[Count.FETCH + index] for index in range(len(FetchStats.__struct_fields__))]
        self._fetcher = Fetcher(
            self._cache,
            sources(self._store, self._tree),
            streams=spec.fetch_streams,
            window=spec.demand_window,
            deadline=spec.demand_deadline,
            quiet=spec.fill_quiet,
            make_room=partial(nodecache.make_some, Path(spec.cache_dir), _ROOM, keep=self._tree.cache.name),
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
        syncer = threading.Thread(target=self._sync, name="sync", daemon=True)
        threads = [self._prefetcher, syncer]
        wants = Wants(self._channel, self._fetcher, self._cache, self._stop, from_memory=self._driver == "fuse")
        wanted = threading.Thread(target=wants.run, name="wanted", daemon=True)
        control: ControlServer | None = None
        try:
            syncer.start()
            if self._driver != "local":
                wanted.start()  # not joined: it waits for messages, and the end of the process ends it
            control = ControlServer(self._folder, self._handle)
            self._link.send(Note("started"))
            self._serve()
        finally:
            self._stop.set()
            self._end_recording()
            self._end_renewal()
            self._fetcher.close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(10.0)
            self._count()
            self._cache.close()
            if control is not None:
                control.close()
            limits = nodecache.Limits(self._spec.cache_limit, self._spec.cache_keep_free)
            nodecache.make_room(Path(self._spec.cache_dir), limits)

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
            if self._recording == "recording":
                self._poll()
            age = (time.monotonic_ns() - counts[Count.BEGAN_NS]) / 1e9
            if counts[Count.JOB_READY] or age >= self._spec.record_seconds:
                self._end_recording()
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
        if note.number == self._asked:
            self._answer = note
            self._answered.set()

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
        self._left_alone.set()
        log.critical("holder and front of tree %s are gone", self._spec.id)
        group = self._group
        while group is not None and self._driver == "fanotify":
            try:
                keeper.deny_all(self._shared, group, 1.0)
                if not in_use(self._cache.fileno()):
                    return
            except Exception:  # whoever would end here leaves readers with zeros
                log.exception("denying goes on after this")
                time.sleep(0.1)

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    # -- recording, prefetch, bitmap -------------------------------------------------------------------------------

    def _end_recording(self) -> None:
        counts = self._shared.counts
        if self._recording != "recording" or self._key is None:
            return
        counts[Count.RECORDING] = 0
        # Before anything can go wrong: a fetcher that dies of its recording must not do so again and again.
        counts[Count.RECORDED] = 1
        self._recording = "publishing"
        self._renewal = threading.Thread(target=self._publish, args=(self._key,), name="hotpack", daemon=True)
        try:
            self._renewal.start()
        except RuntimeError as exc:
            log.warning("the recording of tree %s is not published: %s", self._spec.id, exc)
            self._renewal, self._recording = None, "failed"

    def _poll(self) -> None:
        try:
            self._recorder.poll()
        except Exception:
            log.exception("the recording of tree %s failed", self._spec.id)
            self._shared.counts[Count.RECORDING] = 0
            self._shared.counts[Count.RECORDED] = 1
            self._recording = "failed"

    def _publish(self, key: profiles.ProfileKey) -> None:
        """Publish the trace, then a hot pack. Advice: what goes wrong is a line in the log."""
        try:
            if self._publish_trace(key):
                self._renew(key)
        except Exception:
            log.exception("the recording of tree %s is not published", self._spec.id)
            self._recording = "failed"

    def _publish_trace(self, key: profiles.ProfileKey) -> bool:
        counts = self._shared.counts
        trace = self._recorder.trace(complete=not (counts[Count.INCOMPLETE] or counts[Count.TOUCHES_LOST]))
        self._use = profiles.hot_use(self._plan.order, trace, self._tree.map)
        if trace.touches:
            self._keep_hot({*self._plan.order, *profiles.blocks_of(trace, self._tree.map)})
        nodes = profiles.Nodes.of(os.environ)
        if profiles.left_to_me(self._store, key, self._spec.digest, nodes, self._hurry):
            self._recording = profiles.publish(self._store, key, trace, self._tree.map)
        else:
            self._recording = "left to others"
        log.info("trace of %d touches: %s; %s", len(trace.touches), self._recording, self._use)
        return bool(trace.touches) and self._recording not in ("failed", "left to others")

    def _keep_hot(self, blocks: set[int]) -> None:
        cacheparts.keep_hot(self._tree.cache, self._tree.map_digest, self._tree.map.count, blocks)

    def _renew(self, key: profiles.ProfileKey) -> None:
        self._hot_pack = "being made"
        self._hot_pack = prefetch.renew(
            self._store,
            key,
            self._target,
            self._cache,
            driver=self._recorder.driver,
            work=self._tree.cache,
            stop=self._renewal_stop,
            hurry=self._hurry,
        )
        log.info("hot pack: %s", self._hot_pack)

    def _end_renewal(self) -> None:
        """The mount is gone, so nobody is disturbed: finish the hot pack at full speed, or leave it after a while."""
        if self._renewal is not None and self._renewal.is_alive():
            self._hurry.set()
            self._renewal.join(_FAREWELL_SECONDS)
            self._renewal_stop.set()
            self._renewal.join(_FAREWELL_SECONDS)

    def _prefetch(self) -> None:
        try:
            if self._key is not None and not self._cache.complete:
                self._plan = prefetch.begin(
                    self._fetcher, self._store, self._key, self._target, driver=self._trace_driver
                )
                if self._plan.order:
                    self._keep_hot(set(self._plan.order))
                log.info(
                    "%d hot blocks, from %d traces and hot pack %r",
                    len(self._plan.order),
                    self._plan.traces,
                    self._plan.pack,
                )
            if self._spec.background_fill:
                self._fetcher.background()
        except Exception:
            log.exception("prefetch failed; blocks come on demand")

    def _sync(self) -> None:
        failed = False
        while not self._stop.wait(_SYNC_SECONDS):
            self._count()
            if self._unkept:
                self._keep_targets()
            if self._cache.broken:
                self._shared.counts[Count.BROKEN] = 1
                continue
            try:
                if not self._cache.durable:
                    self._cache.sync()
                failed = False
            except OSError as exc:
                self._shared.counts[Count.BROKEN] = int(self._cache.broken)
                if not failed:
                    log.warning("cannot persist the bitmap of block cache %s: %s", self._cache.folder, exc)
                failed = True

    def _count(self) -> None:
        """Counters outlive this process."""
        stats, counts = self._fetcher.stats, self._shared.counts
        for index, name in enumerate(FetchStats.__struct_fields__):
            counts[Count.FETCH + index] = self._before[index] + getattr(stats, name)

    # -- control ---------------------------------------------------------------------------------------------------

    def _keep_targets(self) -> None:
        """For the next fetcher. Best effort: a full disk must not keep a tree from being mounted or unmounted."""
        tmp = self._folder / f"{TARGETS}.tmp"
        try:
            tmp.write_bytes(msgspec.json.encode(self._targets))
            os.replace(tmp, self._folder / TARGETS)
            self._unkept = False
        except OSError as exc:
            if not self._unkept:
                log.warning("cannot keep the mounts of tree %s, trying again later: %s", self._spec.id, exc)
            self._unkept = True

    def _ask_holder(self, do: str) -> str:
        """Its very answer to this question. Raises `UnavailableError` when it gives none."""
        self._asked += 1
        self._answered.clear()
        sent = self._link.send(Note(do, number=self._asked))
        if not self._answered.wait(_HOLDER_SECONDS if sent else _TICK):
            if do == "leave" and self._left_alone.is_set():
                return "left"  # it ends by itself when nobody uses the tree any more
            raise UnavailableError(f"the holder of tree {self._spec.id} does not answer to {do!r}", hint="try again")
        return self._answer.do

    def _handle(self, request: Request) -> TreeStatus:
        counts = self._shared.counts
        if request.do == "ready":
            counts[Count.JOB_READY] = 1
        elif request.do == "add":
            # Always: a question to leave may be on its way that nobody waits for any more.
            if self._stop.is_set() or self._ask_holder("stay") != "staying":
                raise StoppingError("the block server is stopping")
            if request.target not in self._targets:
                self._targets.append(request.target)
                self._keep_targets()
            counts[Count.INCOMPLETE] = 1
        elif request.do == "remove":
            left = [target for target in self._targets if target != request.target]
            if not left and not self._stop.is_set():
                self._ask_holder("leave")  # no answer is an error, and changes nothing
            if left != self._targets:
                self._targets = left
                self._keep_targets()
        elif request.do == "stop":
            self._ask_holder("leave")
        elif request.do != "status":
            raise BootseerError(f"unknown request {request.do!r}")
        return self._status()

    def _status(self) -> TreeStatus:
        self._count()
        counts, hot = self._shared.counts, self._plan.order
        fetched = FetchStats(*[counts[Count.FETCH + index] for index in range(len(FetchStats.__struct_fields__))])
        return TreeStatus(
            id=self._spec.id,
            digest=self._spec.digest,
            pid=counts[Count.HOLDER_PID],
            front_pid=counts[Count.FRONT_PID],
            fetcher_pid=os.getpid(),
            driver=self._driver,
            front_restarts=max(0, counts[Count.FRONT_STARTS] - 1),
            fetcher_restarts=max(0, counts[Count.FETCHER_STARTS] - 1),
            holder_restarts=max(0, counts[Count.HOLDER_STARTS] - 1),
            lingering=self._lingering,
            targets=list(self._targets),
            blocks_total=self._tree.map.count,
            blocks_ready=self._cache.ready_count,
            complete=self._cache.complete,
            cache_full=self._fetcher.full,
            hot_total=len(hot),
            hot_ready=sum(self._cache.ready[block] for block in hot),
            bytes_demand=fetched.demand_bytes,
            bytes_hot=fetched.hot_bytes,
            bytes_background=fetched.background_bytes,
            reads=counts[Count.READS],
            slow_faults=counts[Count.SLOW_FAULTS],
            stall_seconds=counts[Count.STALL_NS] / 1e9,
            failed_reads=counts[Count.FAILED_READS],
            denied=counts[Count.DENIED],
            taken_over=counts[Count.TAKEN_OVER],
            bad_blocks=fetched.bad_blocks,
            retries=fetched.retries,
            direct_misses=fetched.direct_misses,
            stream_waits=fetched.stream_waits,
            hedges=fetched.hedges,
            hot_unused_bytes=self._use.unused_bytes,
            hot_missed_bytes=self._use.missed_bytes,
            hot_pack=self._hot_pack or self._plan.pack,
            recording=self._recording,
            uptime=(time.monotonic_ns() - counts[Count.BEGAN_NS]) / 1e9,
        )


def sources(store: Store, tree: LocalTree) -> list[StoreSource]:
    """Where the blocks of ``tree`` come from."""
    return [StoreSource(store, tree.map)]
