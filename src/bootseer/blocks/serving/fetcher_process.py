"""The fetcher process of a served tree: network, verification, cache file, recording.

It may be killed at any time: the supervisor forks another, which goes on with the shared memory and the descriptors of
the dead one. Threads: the fetcher's own, ``requests`` (of the FUSE server), ``sync`` (bitmap, counters), ``prefetch``,
``readahead``, ``predict``, ``hotpack`` (after the recording); the main thread says how it goes and waits for the end of
the recording."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from bootseer.blocks.fetch import prefetch
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.figures import Fetched
from bootseer.blocks.fetch.prefetch import Plan
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.metadata import LocalTree
from bootseer.blocks.profiles.layout import layout_of
from bootseer.blocks.profiles.library import ProfileKey, Target
from bootseer.blocks.profiles.recording import Recording
from bootseer.blocks.serving.ipc import Came, Channel, Finish, Repeat, Wanted
from bootseer.blocks.serving.protocol import FetcherStatus, ServerSpec, Users
from bootseer.blocks.serving.readahead import Readahead
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.blocks.serving.trace_publisher import TracePublisher
from bootseer.chunks import eviction, inventory, keeping
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.nodeblocks import NodeBlocks
from bootseer.errors import BootseerError, UnavailableError
from bootseer.objects import Store, uses
from bootseer.wiretypes import known

log = logging.getLogger(__name__)

_TICK = 0.2
_LOOK_SECONDS = 0.5
"""That readers wait, at most, until it is known what this node has."""
_SEND_SECONDS = 1.0
_PAUSE = 0.1
_DETACHED_NAME = "bootseer-pack"
"""What ``ps`` calls a process that finishes a hot pack behind its server."""


class FetcherProcess:
    """One fetcher. `run` returns when the supervisor says that the last mount is gone, or nobody else is left.
    ``cache``: as the supervisor opened it. ``detach`` is called when this process belongs to the server no more."""

    def __init__(
        self,
        spec: ServerSpec,
        tree: LocalTree,
        store_for: Callable[[str], Store],
        shared: SharedMemory,
        cache: CacheFile[BlockMap],
        reads: Channel,
        detach: Callable[[], None],
    ) -> None:
        counts = shared.counts
        self._spec, self._tree, self._shared, self._store_for = spec, tree, shared, store_for
        self._store = store = store_for(spec.store_url)
        self._others = NamedStores(spec, store, store_for, shared.users.read)
        self._detach = detach
        self._number = counts[Count.FETCHER_STARTS]
        self._stop = threading.Event()
        self._cache = cache
        cache.resume(broken=bool(counts[Count.BROKEN]), broke=lambda: counts.__setitem__(Count.BROKEN, 1))
        limits = eviction.Limits(spec.config.cache_limit, spec.config.cache_keep_free)
        allowance = keeping.Allowance(Path(spec.cache_dir), limits)
        self._fetcher = Fetcher(
            self._cache,
            StoreSource(store, tree.map, self._others),
            deadline=spec.config.demand_deadline,
            quiet=spec.config.fill_quiet,
            make_room=partial(keeping.make_room, tree.cache),
            allow=lambda size: allowance.allow(size, tree.cache),
            stats=counts[Count.FETCHED : Count.FETCHED + len(Fetched)],
        )
        if counts[Count.JOB_READY]:
            self._fetcher.eager()
        self._key = spec.profile if tree.map.size else None
        self._target = Target(tree.digest, tree.map_digest.hex(), tree.map)
        self._plan = Plan()
        self._noted, self._noted_in = math.inf, set[Store]()
        recording = Recording(
            shared.trace.since,
            tree.digest,
            tree.map.size,
            began=counts[Count.BEGAN_UNIX],
            layout=lambda: layout_of(tree.meta),
        )
        self._traces = TracePublisher(
            recording, counts, store, self._key, self._target, tree, self._cache, plan=lambda: self._plan
        )
        self._looked = threading.Event()
        self._requests = ReadRequests(reads, self._fetcher, self._cache, self._stop)

    def run(self) -> None:
        """Serve until the end, leave nothing behind."""
        counts, key = self._shared.counts, self._key
        sync = partial(keeping.keep_synced, self._cache.persist, self._stop)
        threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._prefetch, "prefetch"), (sync, "sync"))
        ]
        helpers = threads
        if self._spec.config.readahead and key and counts[Count.RECORDING] and self._number == 1:
            ahead = Readahead(
                self._store, key, self._shared, self._spec.target, self._tree.digest, lambda: self._plan.pack,
                self._fetcher.until,
            )  # fmt: skip
            helpers = [*threads, threading.Thread(target=_for_good, args=(ahead.run,), name="readahead", daemon=True)]
        more = False
        try:
            # Not joined, as the readahead: they wait for messages, and for the store; the end of the process ends them.
            threading.Thread(target=self._answer, name="requests", daemon=True).start()
            for thread in helpers:
                try:
                    thread.start()
                except RuntimeError as exc:  # readers need none of them
                    log.warning("the thread %s cannot be started: %s", thread.name, exc)
            counts[Count.FETCHER_READY] = self._number
            log.info("the fetcher of tree %s has started", self._spec.id)
            self._serve()
        finally:
            self._stop.set()
            counts[Count.STILL] = 1
            self._traces.end()
            more = self._traces.finish()
            self._fetcher.close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(10.0)
            self._cache.close()
            limits = eviction.Limits(self._spec.config.cache_limit, self._spec.config.cache_keep_free)
            eviction.make_room(Path(self._spec.cache_dir), limits)
        if more:
            # The unmount is over, the tree may be mounted anew: nobody waits for this process, or ends it.
            log.info("tree %s is left; process %d finishes its hot pack", self._spec.id, os.getpid())
            os.setsid()
            Path("/proc/self/comm").write_text(_DETACHED_NAME)
            self._detach()
            self._tree.hold.release()
            counts[Count.DETACHED] = 1
            self._traces.finish_detached()

    def _serve(self) -> None:
        counts = self._shared.counts
        self._say()
        while not self._stop.wait(_TICK):
            age = (time.monotonic_ns() - counts[Count.BEGAN_NS]) / 1e9
            if counts[Count.JOB_READY] or age >= self._spec.config.record_seconds:
                self._traces.end()
                self._fetcher.eager()
            if time.monotonic() - self._noted > uses.RENEWAL or not self._noted_in.issuperset(self._others()):
                self._note_use()
            self._say()

    def _say(self) -> None:
        """Leave the fetcher's part of the status for the supervisor."""
        traces = self._traces
        said = FetcherStatus(
            hot_unused_bytes=traces.use.unused_bytes,
            hot_missed_bytes=traces.use.missed_bytes,
            hot_pack=traces.hot_pack or self._plan.pack,
            recording=traces.state,
        )
        self._shared.said.write(msgspec.msgpack.encode(said))

    # -- other threads ---------------------------------------------------------------------------------------------

    def _prefetch(self) -> None:
        """Prefetch by the profile, then fill in the background. Trouble is logged: blocks come on demand."""
        try:
            if not self._cache.complete:
                self._fetcher.known_here(NodeBlocks.find(self._tree.cache, self._tree.map, self._cache.ready))
        except Exception:
            log.exception("blocks of tree %s that this node has come from the store", self._tree.digest[:12])
        self._looked.set()
        try:
            if self._key is not None and not self._cache.complete:
                plan = prefetch.begin(self._fetcher, self._store, self._key, self._target, tell=self._note_plan)
                self._note_plan(plan)
                if plan.order:
                    inventory.keep_hot(self._tree.cache, self._tree.map_digest, self._tree.map.count, plan.order)
                log.info("%d hot blocks, from %d traces and hot pack %r", len(plan.order), plan.traces, plan.pack)
                if not plan.order and self._spec.kin:
                    # Not joined: it takes seconds, and the end of the process ends it.
                    threading.Thread(target=self._predict, args=(self._key,), name="predict", daemon=True).start()
        except BootseerError as exc:
            log.warning("no prefetch of tree %s: %s", self._tree.digest[:12], exc)
        except Exception:
            log.exception("prefetch of tree %s failed; blocks come on demand", self._tree.digest[:12])
        self._shared.counts[Count.HOT_KNOWN] = 1
        self._note_use()
        if self._spec.config.background_fill:
            self._fetcher.background()

    def _answer(self) -> None:
        """Not before it is known what this node has: a start's first reads would fetch a window each."""
        self._looked.wait(_LOOK_SECONDS)
        self._requests.run()

    def _predict(self, key: ProfileKey) -> None:
        """The first start of a tree whose kin were started since it was converted."""
        from bootseer.blocks.fetch.predict import predict_blocks

        order = predict_blocks(
            self._store, self._tree.digest, self._spec.kin, key, cache_dir=Path(self._spec.cache_dir)
        )
        if order:
            self._note_plan(Plan(order))
            self._fetcher.hot(order)

    def _note_use(self) -> None:
        stores = {self._store, *self._others()}
        for store in stores:
            uses.note_beside(store, self._tree.digest)
        self._noted, self._noted_in = time.monotonic(), stores

    def _note_plan(self, plan: Plan) -> None:
        self._plan = plan
        for block in plan.order:
            self._shared.hot[block] = 1


class NamedStores:
    """The stores that mounts have named since the server began, the newest first: the one that it began with may have
    moved. Each block is verified, wherever it comes from. For many threads; nobody waits until another opens one."""

    def __init__(
        self, spec: ServerSpec, store: Store, store_for: Callable[[str], Store], users: Callable[[], bytes]
    ) -> None:
        self._spec, self._store_for, self._users = spec, store_for, users
        self._lock = threading.Lock()
        self._opened: dict[str, Store | None] = {spec.store_url: store}
        """None: not opened yet, or it cannot be."""

    def __call__(self) -> list[Store]:
        raw = self._users()
        urls = msgspec.msgpack.decode(raw, type=known(Users)).stores if raw else []
        with self._lock:
            new = [url for url in urls if url not in self._opened]
            self._opened.update(dict.fromkeys(new))
        for url in new:
            try:
                self._opened[url] = store = self._store_for(url)
                log.info("tree %s is read from %s, too", self._spec.id, store.shown)
            except BootseerError as exc:
                log.warning("tree %s: a store that a mount named is not read: %s", self._spec.id, exc)
        return [one for url in urls if (one := self._opened[url]) is not None]


def _for_good(run: Callable[[], None]) -> None:
    run()
    threading.Event().wait()


class ReadRequests:
    """Takes what the FUSE server wants over ``channel``, has it fetched, answers; until ``stop`` is set, as it is here
    when the supervisor says `Finish`, or is gone with the FUSE server. One thread receives; answers are sent by the
    fetcher's threads as blocks come."""

    def __init__(self, channel: Channel, fetcher: Fetcher, cache: CacheFile[BlockMap], stop: threading.Event) -> None:
        self._channel = channel
        self._fetcher = fetcher
        self._cache = cache
        self._stop = stop
        self._open: set[int] = set()

    def run(self) -> None:
        """Have the FUSE server repeat what it wants, then serve."""
        self._channel.send(Repeat(), timeout=_SEND_SECONDS)
        while not self._stop.is_set():
            try:
                got = self._channel.receive(timeout=0.5)
                if got is not None and isinstance(got[0], Finish):
                    self._stop.set()
                elif got is not None and isinstance(got[0], Wanted) and got[0].id not in self._open:
                    self._fetch(got[0])
            except UnavailableError:
                log.critical("supervisor and FUSE server are gone")
                self._stop.set()
            except Exception:  # without this thread each missing block would wait for its deadline
                log.exception("a request of the FUSE server failed")
                self._stop.wait(_PAUSE)

    def _fetch(self, message: Wanted) -> None:
        if not message.first <= message.last < self._cache.map.count:
            self._channel.send(Came(message.id, errno.EIO), timeout=_SEND_SECONDS)
            return
        self._open.add(message.id)
        try:
            self._fetcher.submit(message.first, message.last, partial(self._came, message))
        except UnavailableError as exc:
            self._came(message, exc, {})

    def _came(self, message: Wanted, error: BootseerError | None, memory: dict[int, bytes]) -> None:
        number, fd = 0, -1
        if error is not None:
            log.error("blocks %d..%d, wanted by process %d: %s", message.first, message.last, message.pid, error)
            number = errno.EIO
        elif memory:
            fd = self._in_memory(message, memory)
            number = 0 if fd >= 0 else errno.EIO
        self._open.discard(message.id)
        if not self._channel.send(Came(message.id, number), fd=fd, timeout=_SEND_SECONDS):
            log.warning("the FUSE server does not take the answer to request %d", message.id)
        if fd >= 0:
            os.close(fd)

    def _in_memory(self, message: Wanted, memory: dict[int, bytes]) -> int:
        """A memfd with the blocks of a request some of which could not be cached; -1 when that fails too."""
        blocks = self._cache.map
        fd = -1
        try:
            fd = os.memfd_create("bootseer-blocks", os.MFD_CLOEXEC)
            with os.fdopen(fd, "wb", closefd=False) as out:
                for block in range(message.first, message.last + 1):
                    data = memory.get(block)
                    if data is None:
                        data = self._cache.read(block << blocks.shift, blocks.length_of(block))
                    out.write(data)
        except OSError as exc:
            log.error("blocks %d..%d cannot be handed over: %s", message.first, message.last, exc)
            if fd >= 0:
                os.close(fd)
            return -1
        return fd
