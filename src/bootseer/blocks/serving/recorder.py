"""The recording of a served tree, from its last tick to the trace and the hot pack that the next starts find.

Everything here is advice for later starts: what goes wrong costs a line in the log, never the fetcher process. Who
unmounts waits for the trace, not for the hot pack: `Recorder.behind` finishes that when the mount and its server are
gone, for a minute at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from bootseer.blocks.cache.blockfile import ReadyBlocks
from bootseer.blocks.fetch import prefetch
from bootseer.blocks.formats.trace import Trace
from bootseer.blocks.profiles import hotpack_builder, library
from bootseer.blocks.profiles.merge import HotUse, blocks_of, hot_use
from bootseer.blocks.serving.shared import Count
from bootseer.store import Store

log = logging.getLogger(__name__)

_TRACE_SECONDS = 10.0
"""Who unmounts waits for the trace this long at most."""
_BEHIND_SECONDS = 60.0
"""The hot pack is finished behind the unmount within this, or left to the next start."""
_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.01


class Source(Protocol):
    """Where the trace comes from: a `bootseer.blocks.profiles.recording.Recording`."""

    def poll(self) -> int: ...

    def trace(self, *, complete: bool = True) -> Trace: ...


class Purpose(NamedTuple):
    """What a start is recorded for. ``folder``: of the block cache, also for work files; ``meta``: the tree's.
    ``plan``: what this start fetched ahead, as far as that is known when asked. ``keep_hot`` remembers hot blocks for
    when space is short."""

    store: Store
    key: library.ProfileKey
    target: prefetch.Target
    cache: Callable[[], ReadyBlocks]
    folder: Path
    meta: Path
    plan: Callable[[], prefetch.Plan]
    keep_hot: Callable[[set[int]], None]


class Recorder:
    """Polls the recording of tree ``id`` and publishes it once. ``purpose`` None: this start is not recorded.

    One thread calls; publishing has its own. `state`, `use` and `hot_pack` may be read from any thread.
    """

    def __init__(self, id: str, source: Source, counts: memoryview, purpose: Purpose | None) -> None:
        self._id = id
        self._source = source
        self._counts = counts
        self._purpose = purpose
        self._renewal: threading.Thread | None = None
        self._hurry = threading.Event()
        self._stop = threading.Event()
        self._traced = threading.Event()
        self.use = HotUse()
        """How well what was fetched ahead met what was read."""
        self.hot_pack = ""
        """What became of the new hot pack; empty: none was begun."""
        self.state = "off"
        if purpose is not None:
            self.state = "ended" if counts[Count.RECORDED] else "recording"

    def poll(self) -> None:
        """While it records, a few times a second."""
        if self.state != "recording":
            return
        try:
            self._source.poll()
        except Exception:
            log.exception("the recording of tree %s failed", self._id)
            self._counts[Count.RECORDING] = 0
            self._counts[Count.RECORDED] = 1
            self.state = "failed"

    def end(self) -> None:
        """End the recording, if one is on, and publish it in a thread of its own."""
        purpose = self._purpose
        if self.state != "recording" or purpose is None:
            return
        self._counts[Count.RECORDING] = 0
        # Before anything can go wrong: a fetcher that dies of its recording must not do so again and again.
        self._counts[Count.RECORDED] = 1
        self.state = "publishing"
        self._renewal = threading.Thread(target=self._publish, args=(purpose,), name="hotpack", daemon=True)
        try:
            self._renewal.start()
        except RuntimeError as exc:
            log.warning("the recording of tree %s is not published: %s", self._id, exc)
            self._renewal, self.state = None, "failed"

    def finish(self) -> bool:
        """The mount is gone, so nobody is disturbed: go on at full speed. Returns when the trace is published (or will
        not be, or takes too long); True: the rest is not done yet, see `behind`."""
        if self._renewal is None:
            return False
        self._hurry.set()
        self._traced.wait(_TRACE_SECONDS)
        return self._renewal.is_alive()

    def behind(self) -> None:
        """After `finish`, in a process that nobody waits for, with the cache file closed: see the rest out."""
        if self._renewal is None or self._purpose is None:
            return
        until = time.monotonic() + _BEHIND_SECONDS
        while self._renewal.is_alive() and time.monotonic() < until:
            self._renewal.join(_LOOK_SECONDS)
        if self._renewal.is_alive():
            log.warning("the hot pack of tree %s takes too long; it is left to the next start", self._id)
            self._stop.set()
            self._renewal.join(_STOP_SECONDS)

    def _publish(self, purpose: Purpose) -> None:
        """Publish the trace, then a hot pack. Advice: what goes wrong is a line in the log."""
        try:
            more = self._publish_trace(purpose)
            self._traced.set()
            if more:
                self._renew(purpose)
        except Exception:
            log.exception("the recording of tree %s is not published", self._id)
            self.state = "failed"
        finally:
            self._traced.set()

    def _publish_trace(self, purpose: Purpose) -> bool:
        store, key, target, counts = purpose.store, purpose.key, purpose.target, self._counts
        trace = self._source.trace(complete=not (counts[Count.INCOMPLETE] or counts[Count.TOUCHES_LOST]))
        order = purpose.plan().order
        self.use = hot_use(order, trace, target.map)
        if trace.touches:
            purpose.keep_hot({*order, *blocks_of(trace, target.map)})
        if counts[Count.READ_AHEAD]:  # what the job used of it was not to be seen: nothing to learn from
            self.use = msgspec.structs.replace(self.use, unused_blocks=0, unused_bytes=0)
            self.state = "read ahead"
            return False
        nodes = library.Nodes.of(os.environ)
        if library.left_to_me(store, key, target.tree, nodes, self._hurry):
            self.state = library.publish(store, key, trace, target.map)
        else:
            self.state = "left to others"
        log.info("trace of %d touches: %s; %s", len(trace.touches), self.state, self.use)
        return bool(trace.touches) and self.state not in ("failed", "left to others")

    def _renew(self, purpose: Purpose) -> None:
        self.hot_pack = "being made"
        with contextlib.closing(purpose.cache()) as ready:
            made = hotpack_builder.renew(
                purpose.store,
                purpose.key,
                purpose.target,
                ready,
                work=purpose.folder,
                stop=self._stop,
                hurry=self._hurry,
            )
        log.info("hot pack: %s", made)
        if not self._stop.is_set():
            pages = hotpack_builder.renew_pages(purpose.store, purpose.key, purpose.target, meta=purpose.meta)
            log.info("page list: %s", pages)
        self.hot_pack = made
