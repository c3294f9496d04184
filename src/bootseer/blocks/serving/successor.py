"""A fetcher that replaces one that ended: it goes on with the shared memory and the descriptors of the holder's."""

from __future__ import annotations

import os

from bootseer.blocks.serving import oom
from bootseer.blocks.serving.fetcherd import FetcherProcess, Inherited
from bootseer.blocks.serving.fronts import Front, group_of
from bootseer.blocks.serving.kept import Kept
from bootseer.blocks.serving.pulse import keep_beating
from bootseer.blocks.serving.shared import Count


def fetch(kept: Kept, driver: str, front: Front | None, oom_score: int | None) -> int:
    """In the new process: serve until the end, return the exit code."""
    counts, mine = kept.shared.counts, os.getpid()
    # Before anything else: the holder may die before it can write the number, and the next one starts a second.
    counts[Count.FETCHER_PID] = mine
    keep_beating(counts, Count.FETCHER_BEAT, lambda: counts[Count.FETCHER_PID] != mine)
    if oom_score is not None:
        oom.set_score(oom_score)
    kept.ends.keep_fetchers()
    group = group_of(front)
    if front is not None and group is None:
        front.close()
    before = Inherited(kept.shared, kept.data_fd, kept.lock_fd, driver, group)
    store = kept.store_for(kept.spec.store_url)
    FetcherProcess(kept.spec, kept.folder, store, kept.ends.far_link, kept.ends.far_channel, before).run()
    return 0
