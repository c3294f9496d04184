"""What a fetcher counts: bytes by their urgency, what went wrong, and how fast the link is."""

from __future__ import annotations

import enum

from bootseer.blocks.fetch.queue import Priority


class Fetched(enum.IntEnum):
    """Cells of `Fetcher.stats`, named as in the status; bytes are as stored, as they came over the network."""

    BYTES_DEMAND = 0
    BYTES_HOT = 1
    BYTES_BACKGROUND = 2
    RETRIES = 3
    BAD_BLOCKS = 4
    DIRECT_MISSES = 5
    """Blocks that readers waited for and that were not under way."""
    HEDGES = 6
    """Blocks asked for a second time because the prefetch that they were to come with was late."""
    CACHE_FULL = 7
    """1 while the cache is out of space."""
    LINK_RATE = 8
    """Bytes/s, the best that `LinkRate` has seen."""
    BYTES_COPIED = 9
    """Stored bytes of the blocks that other folders of the node cache had: these did not come over the network."""


BYTES_OF = {
    Priority.DEMAND: Fetched.BYTES_DEMAND,
    Priority.HOT: Fetched.BYTES_HOT,
    Priority.BACKGROUND: Fetched.BYTES_BACKGROUND,
}


class LinkRate:
    """How fast bytes come, measured from requests that begin while no other is under way, with all that join them:
    every byte that counts was asked for after that, so the link is at least as fast. Called under the lock."""

    def __init__(self) -> None:
        self._began, self._bytes = 0.0, 0

    def begin(self, now: float) -> None:
        """The first request begins."""
        self._began, self._bytes = now, 0

    def came(self, length: int, now: float) -> int:
        """``length`` bytes of one of the requests came. Returns bytes/s since the first one began."""
        self._bytes += length
        return int(self._bytes / max(now - self._began, 1e-6))
