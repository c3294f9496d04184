"""What the fetcher keeps per waiting reader and per request, and its counters."""

from __future__ import annotations

import threading

import msgspec

from bootseer.blocks.queue import Batch
from bootseer.errors import BootseerError


class FetchStats(msgspec.Struct):
    """Counters since the start; bytes are stored (compressed) bytes, that is, what came over the network."""

    demand_bytes: int = 0
    hot_bytes: int = 0
    background_bytes: int = 0
    requests: int = 0
    retries: int = 0
    bad_blocks: int = 0
    uncached_blocks: int = 0


class Ticket:
    """A reader waits for one block. Settled with neither data nor error: the block is in the cache."""

    __slots__ = ("data", "done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.data: bytes | None = None
        self.error: BootseerError | None = None


class Flight:
    """A batch that a thread works on, the present attempt since ``started``.

    ``abandoned``: nobody counts on its return any more; ``replaced``: its thread neither, it ends when it returns.
    """

    __slots__ = ("abandoned", "batch", "demand_only", "replaced", "started")

    def __init__(self, batch: Batch, started: float, demand_only: bool) -> None:
        self.batch = batch
        self.started = started
        self.demand_only = demand_only
        self.abandoned = False
        self.replaced = False
