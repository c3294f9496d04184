"""The sync thread of a fetcher: has what the cache file got persisted, every two seconds while there is news.

But not while the prefetch of a start comes: a write to a file that is being synced may wait for the disk, hundreds of
milliseconds on ext4, and the readers of what comes behind it wait, too (``scripts/bench engine``: write, write+sync).
"""

from __future__ import annotations

import logging
import threading
import time

from bootseer.blocks.cache.cachefile import CacheFile
from bootseer.blocks.serving.shared_memory import Count

log = logging.getLogger(__name__)

_SYNC_SECONDS = 2.0
_REST_SECONDS = 15.0
"""From the start on: a prefetch has come by then; one that is longer is synced beside, as a crash would lose much."""


def keep_synced(cache: CacheFile, counts: memoryview, stop: threading.Event) -> None:
    """Sync data and bitmap of ``cache`` until ``stop``; trouble is a log line and `Count.BROKEN`."""
    failed = False
    stop.wait(max(0.0, counts[Count.BEGAN_NS] / 1e9 + _REST_SECONDS - time.monotonic()))
    while not stop.wait(_SYNC_SECONDS):
        if cache.broken:
            counts[Count.BROKEN] = 1
            continue
        try:
            if not cache.durable:
                cache.sync()
            failed = False
        except OSError as exc:
            counts[Count.BROKEN] = int(cache.broken)
            if not failed:
                log.warning("cannot persist the bitmap of block cache %s: %s", cache.folder, exc)
            failed = True
