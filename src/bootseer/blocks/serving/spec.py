"""What a block server is told, and the names of the files through which it is reached."""

from __future__ import annotations

import msgspec

from bootseer.blocks.fetch.fetcher import DEMAND_WINDOW

SPEC = "spec.json"
FUSE_FOLDER = "fuse"
TARGETS = "targets.json"
"""The mounts of the tree, for a restarted fetcher."""


class ServerSpec(msgspec.Struct, kw_only=True):
    """What a block server must know. Sizes in bytes, times in seconds; ``profile`` None: no prefetch, no recording."""

    id: str
    store_url: str
    digest: str
    cache_dir: str
    target: str
    profile: str | None = None
    record_seconds: float = 120.0
    demand_deadline: float = 60.0
    fetch_streams: int = 6
    background_fill: bool = True
    fill_quiet: float = 120.0
    demand_window: int = DEMAND_WINDOW
    driver: str = "auto"
    """As `Config.driver`."""
    readahead: bool = True
    cache_limit: float = 0.0
    cache_keep_free: float = 0.0
    """As in `Config`; 0: no limit."""
    max_readahead: int = 128 << 10
    """Where the kernel reads through the page cache of the data file; 0 would make each 4 KiB a request."""
