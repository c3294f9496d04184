"""The status of a served tree, and the fetch counters that outlive a fetcher."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.fetch.fetcher import Fetcher, FetchStats
from bootseer.blocks.fetch.prefetch import Plan
from bootseer.blocks.serving.control import TreeStatus
from bootseer.blocks.serving.recorder import Recorder
from bootseer.blocks.serving.shared import Count
from bootseer.blocks.serving.spec import ServerSpec

_FIELDS = FetchStats.__struct_fields__


class Tally:
    """What all fetchers of a tree have fetched: in ``counts`` (shared memory) from `Count.FETCH` on.

    Made before this process's `Fetcher` counts anything; `count` adds what that has counted since.
    """

    def __init__(self, counts: memoryview) -> None:
        self._counts = counts
        self._before = [counts[Count.FETCH + index] for index in range(len(_FIELDS))]

    def count(self, stats: FetchStats) -> None:
        """Counters outlive this process."""
        for index, name in enumerate(_FIELDS):
            self._counts[Count.FETCH + index] = self._before[index] + getattr(stats, name)

    def total(self) -> FetchStats:
        """As of the last `count`."""
        return FetchStats(*[self._counts[Count.FETCH + index] for index in range(len(_FIELDS))])


class Serving(NamedTuple):
    """The parts of a fetcher process that a status is about."""

    spec: ServerSpec
    counts: memoryview
    cache: CacheFile
    fetcher: Fetcher
    tally: Tally
    recorder: Recorder

    def keep_count(self) -> None:
        self.tally.count(self.fetcher.stats)

    def status(self, driver: str, targets: list[str], plan: Plan, *, blocks: int, lingering: bool) -> TreeStatus:
        """As of now. ``blocks``: of the tree; ``plan``: what was fetched ahead; ``lingering``: in use, but left."""
        self.keep_count()
        counts, cache, hot, recorder = self.counts, self.cache, plan.order, self.recorder
        fetched = self.tally.total()
        return TreeStatus(
            id=self.spec.id,
            digest=self.spec.digest,
            pid=counts[Count.HOLDER_PID],
            front_pid=counts[Count.FRONT_PID],
            fetcher_pid=os.getpid(),
            driver=driver,
            front_restarts=max(0, counts[Count.FRONT_STARTS] - 1),
            fetcher_restarts=max(0, counts[Count.FETCHER_STARTS] - 1),
            holder_restarts=max(0, counts[Count.HOLDER_STARTS] - 1),
            lingering=lingering,
            targets=list(targets),
            blocks_total=blocks,
            blocks_ready=cache.ready_count,
            complete=cache.complete,
            cache_full=self.fetcher.full,
            hot_total=len(hot),
            hot_ready=sum(cache.ready[block] for block in hot),
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
            hedges=fetched.hedges,
            read_ahead_bytes=counts[Count.READ_AHEAD],
            hot_unused_bytes=recorder.use.unused_bytes,
            hot_missed_bytes=recorder.use.missed_bytes,
            hot_pack=recorder.hot_pack or plan.pack,
            recording=recorder.state,
            uptime=(time.monotonic_ns() - counts[Count.BEGAN_NS]) / 1e9,
        )
