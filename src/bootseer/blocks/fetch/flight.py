"""What the fetcher keeps per request and per source, and its counters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from bootseer.blocks.fetch.queue import Batch

if TYPE_CHECKING:
    from bootseer.blocks.fetch.stream import HotStream


class FetchStats(msgspec.Struct):
    """Counters since the start; bytes are stored (compressed) bytes, that is, what came over the network."""

    demand_bytes: int = 0
    hot_bytes: int = 0
    background_bytes: int = 0
    requests: int = 0
    retries: int = 0
    bad_blocks: int = 0
    uncached_blocks: int = 0
    direct_misses: int = 0
    """Blocks that readers waited for and that were fetched for them alone or were queued nowhere before."""
    stream_waits: int = 0
    """Blocks that a reader left to the hot stream, as they were due soon."""
    hedges: int = 0
    """Of those, blocks fetched directly after all because the stream was late."""
    stream_bad: int = 0
    """Frames of the hot pack that were not what the block map says."""


class Flight:
    """A batch that a thread works on, the present attempt since ``started``.

    ``stream``: whose range it is, if any. ``abandoned``: nobody counts on its return any more; ``replaced``: its
    thread neither, it ends when it returns.
    """

    __slots__ = ("abandoned", "batch", "demand_only", "replaced", "started", "stream")

    def __init__(self, batch: Batch, started: float, demand_only: bool, stream: HotStream | None = None) -> None:
        self.batch = batch
        self.stream = stream
        self.started = started
        self.demand_only = demand_only
        self.abandoned = False
        self.replaced = False


class Pace:
    """How long a direct fetch takes, seconds: an exponential average that leans to recent ones."""

    __slots__ = ("_mean", "_weight")

    def __init__(self, first: float = 0.02, weight: float = 0.2) -> None:
        self._mean = first
        self._weight = weight

    def add(self, seconds: float) -> None:
        self._mean += self._weight * (seconds - self._mean)

    @property
    def seconds(self) -> float:
        return self._mean


class Concurrency:
    """How many requests a source gets at once: one more per round without trouble, half after trouble (AIMD).

    Between ``least`` and ``most``, from ``most``: a healthy store is never slowed down.
    """

    __slots__ = ("_cut", "_good", "least", "limit", "most")

    def __init__(self, most: int, least: int = 1) -> None:
        self.most = most
        self.least = least
        self.limit = most
        self._good = 0
        self._cut = 0.0

    def good(self) -> None:
        self._good += 1
        if self._good >= self.limit:
            self._good = 0
            self.limit = min(self.most, self.limit + 1)

    def bad(self, now: float | None = None) -> None:
        # Requests that were out together fail together: that is one trouble, not six.
        now = time.monotonic() if now is None else now
        if now - self._cut >= 0.1:
            self._cut = now
            self._good = 0
            self.limit = max(self.least, self.limit // 2)
