"""The sync thread of a fetcher: has what the cache file got persisted, every two seconds while there is news."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bootseer.blocks.cache.cache import CacheFile
from bootseer.blocks.serving.shared import Count

log = logging.getLogger(__name__)

_SYNC_SECONDS = 2.0


def keep_synced(cache: CacheFile, counts: memoryview, stop: threading.Event, also: Callable[[], None]) -> None:
    """Sync data and bitmap of ``cache`` until ``stop``; trouble is a log line and `Count.BROKEN`. ``also`` is called
    each time, and must not raise."""
    failed = False
    while not stop.wait(_SYNC_SECONDS):
        also()
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
