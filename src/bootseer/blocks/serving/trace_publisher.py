"""When the recording of a start ends, and how its trace and the hot pack get to where the next starts find them. All is
advice for later starts: what goes wrong costs a line in the log, never the fetcher process. Who unmounts waits for the
trace, not for the hot pack, which is finished when the mount and its server are gone, for a minute at most."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

import msgspec

from bootseer.blocks.fetch.prefetch import Plan
from bootseer.blocks.metadata import LocalTree
from bootseer.blocks.profiles import hotpack_builder, library
from bootseer.blocks.profiles.merge import HotUse, blocks_of, hot_use
from bootseer.blocks.profiles.recording import Recording
from bootseer.blocks.serving.shared_memory import Count
from bootseer.chunks import inventory
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.cachefile import CacheFile
from bootseer.objects import Store

log = logging.getLogger(__name__)

_TRACE_SECONDS = 10.0
"""Who unmounts waits for the trace this long at most."""
_DETACHED_SECONDS = 60.0
"""The hot pack is finished behind the unmount within this, or left to the next start."""
_STOP_SECONDS = 5.0
_MUCH = 0.1
"""Share of what is hot: a start that misses more went another way than those that were recorded."""


class TracePublisher:
    """Publishes ``recording`` once, for the starts with profile ``key`` (None: this start is not recorded).

    ``plan``: what this start fetched ahead, as far as that is known when asked. One thread calls; publishing has its
    own. `state`, `use` and `hot_pack` may be read from any thread. `state` is ``off``, ``recording``, ``publishing``,
    ``ended`` (by a fetcher before this one), or how the trace ended: what `library.publish` says, ``left to others``
    (nodes of the job), ``read ahead`` (there is nothing to learn from it), ``failed``."""

    def __init__(
        self,
        recording: Recording,
        counts: memoryview,
        store: Store,
        key: library.ProfileKey | None,
        target: library.Target,
        tree: LocalTree,
        cache: CacheFile[BlockMap],
        *,
        plan: Callable[[], Plan],
    ) -> None:
        self._recording, self._counts, self._store, self._key = recording, counts, store, key
        self._target, self._tree, self._cache = target, tree, cache
        self._plan = plan
        self._publishing: threading.Thread | None = None
        self._hurry = threading.Event()
        self._stop = threading.Event()
        self._traced = threading.Event()
        self.use = HotUse()
        """How well what was fetched ahead met what was read."""
        self.hot_pack = ""
        """What became of the new hot pack; empty: none was begun."""
        self.state = "off"
        if key is not None:
            self.state = "ended" if counts[Count.RECORDED] else "recording"

    def end(self) -> None:
        """End the recording, if one is on, and publish it in a thread of its own."""
        if self.state != "recording" or self._key is None:
            return
        self._counts[Count.RECORDING] = 0
        # Before anything can go wrong: a fetcher that dies of its recording must not do so again and again.
        self._counts[Count.RECORDED] = 1
        self.state = "publishing"
        thread = threading.Thread(target=self._publish, args=(self._key,), name="hotpack", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            log.warning("the recording of tree %s is not published: %s", self._tree.digest[:12], exc)
            self.state = "failed"
            return
        self._publishing = thread

    def finish(self) -> bool:
        """The mount is gone, so nobody is disturbed: go on at full speed. Returns when the trace is published (or will
        not be, or takes too long); True: the rest is not done yet, see `finish_detached`."""
        if self._publishing is None:
            return False
        self._hurry.set()
        self._traced.wait(_TRACE_SECONDS)
        return self._publishing.is_alive()

    def finish_detached(self) -> None:
        """After `finish`, in a process that nobody waits for, with the cache file closed: see the rest out."""
        if self._publishing is None:
            return
        self._publishing.join(_DETACHED_SECONDS)
        if self._publishing.is_alive():
            log.warning("the hot pack of tree %s takes too long; it is left to the next start", self._tree.digest[:12])
            self._stop.set()
            self._publishing.join(_STOP_SECONDS)

    def _publish(self, key: library.ProfileKey) -> None:
        """Publish the trace, then a hot pack and a page list. What goes wrong is a line in the log."""
        try:
            with contextlib.closing(self._cache.blocks_now()) as blocks:
                more = self._publish_trace(key)
                self._traced.set()
                if more:
                    self.hot_pack = "being made"
                    self.hot_pack, pages = hotpack_builder.renew(
                        self._store, key, self._target, blocks, meta=self._tree.meta, work=self._tree.cache,
                        stop=self._stop, hurry=self._hurry,
                    )  # fmt: skip
                    log.info("hot pack: %s; page list: %s", self.hot_pack, pages)
        except Exception:
            log.exception("the recording of tree %s is not published", self._tree.digest[:12])
            self.state = "failed"
        finally:
            self._traced.set()

    def _publish_trace(self, key: library.ProfileKey) -> bool:
        """Whether a new hot pack may say something new."""
        store, target, counts = self._store, self._target, self._counts
        trace = self._recording.trace(complete=not (counts[Count.INCOMPLETE] or counts[Count.TOUCHES_LOST]))
        order = self._plan().order
        self.use = hot_use(order, trace, target.map)
        if trace.touches:
            hot = {*order, *blocks_of(trace, target.map)}
            inventory.keep_hot(self._tree.cache, self._tree.map_digest, target.map.count, hot)
        if counts[Count.READ_AHEAD]:  # what the job used of it was not to be seen: nothing to learn from
            self.use = msgspec.structs.replace(self.use, unused_bytes=0)
            self.state = "read ahead"
            much = _MUCH * sum(target.map.lengths[block] for block in order)
            if self.use.missed_bytes > much and library.publishes(os.environ):
                log.info("the start missed %d bytes: the next one is recorded in full", self.use.missed_bytes)
                library.record_next(store, key, target.tree)
            return False
        if library.await_turn(os.environ, self._hurry):
            self.state = library.publish(store, key, trace, target.map)
        else:
            self.state = "left to others"
        log.info("trace of %d touches: %s; %s", len(trace.touches), self.state, self.use)
        return bool(trace.touches) and self.state not in ("failed", "left to others", "reads everything", "over budget")
