"""What a block server is told, and what it says of itself.

Its state folder is ``<state_dir>/trees/<id>/``. Each of its requests is answered with a `TreeStatus`:

| request | |
|---|---|
| ``status`` | |
| ``ready`` | the job is ready |
| ``add``, ``remove`` | of the mount ``target``; one that is added is read from ``store``, too |
| ``still`` | use no file of the mount ``target`` any more: it is about to be unmounted |
"""

from __future__ import annotations

import msgspec

from bootseer.blocks.profiles.library import ProfileKey
from bootseer.config import Config
from bootseer.mountrecords import Record

FUSE_FOLDER = "fuse"


class ServerSpec(msgspec.Struct, kw_only=True):
    """What a block server must know. ``profile`` None: no prefetch, no recording. ``kin``: see `blocks.tree.mount`."""

    id: str
    store_url: str
    digest: str
    cache_dir: str
    target: str
    profile: ProfileKey | None = None
    config: Config = msgspec.field(default_factory=Config)
    kin: list[str] = []


class TreeRecord(Record, kw_only=True):
    """What stays known of a tree whose block server has died. ``target``: of its first mount."""

    digest: str
    target: str


class Users(msgspec.Struct):
    """The mounts of a tree, and the stores that they have named, the newest first; the server's own is not among them
    before another was."""

    targets: list[str]
    stores: list[str]


class FetcherStatus(msgspec.Struct):
    """The part of `TreeStatus` that only the fetcher knows, a moment old."""

    hot_unused_bytes: int = 0
    """Stored bytes that were prefetched and that the recorded start never touched; 0 where anything was read ahead, as
    it is unknown then."""
    hot_missed_bytes: int = 0
    """Stored bytes that the recorded start touched and that were not prefetched."""
    hot_pack: str = ""
    """The hot pack in use; after the recording what became of the new one, see
    `bootseer.blocks.profiles.hotpack_builder.renew`."""
    recording: str = "off"
    """``off``, ``recording``, or how the trace ended, see `bootseer.blocks.serving.trace_publisher`."""


class TreeStatus(FetcherStatus, kw_only=True):
    """A running lazy tree. Bytes are stored bytes, that is, what came over the network; times in seconds."""

    id: str
    digest: str
    pid: int
    """The supervisor, which restarts the other two."""
    server_pid: int = 0
    """The FUSE server; 0 when the tree is complete and the kernel reads it by itself."""
    fetcher_pid: int = 0
    driver: str = "fuse"
    """``fuse``, or ``local``: everything was on this node when the tree was mounted, the kernel reads it by itself."""
    cache_dir: str = ""
    file: tuple[int, int] = (0, 0)
    """Of the driver ``local``: device and number of the data file, which may have another name elsewhere."""
    server_restarts: int = 0
    fetcher_restarts: int = 0
    supervisor_restarts: int = 0
    lingering: bool = False
    """All targets are gone, but somebody still uses what was mounted there: the server stays until that ends."""
    targets: list[str] = []
    blocks_total: int = 0
    blocks_ready: int = 0
    hot_known: bool = False
    """What is hot has been looked up: from now on ``hot_total`` counts, also when it is 0."""
    hot_total: int = 0
    hot_ready: int = 0
    complete: bool = False
    """Every block is on this node: the store is needed no more."""
    cache_full: bool = False
    bytes_demand: int = 0
    bytes_hot: int = 0
    bytes_background: int = 0
    bytes_copied: int = 0
    """Of blocks that other trees on this node had: these did not come over the network."""
    link_rate: int = 0
    """Bytes/s, the best that the fetcher saw: the link gives at least this much."""
    reads: int = 0
    """Requests of the kernel; of a part of a file each."""
    slow_faults: int = 0
    stall_seconds: float = 0.0
    """Summed over readers, which may wait at the same time."""
    waited_seconds: float = 0.0
    """In which at least one reader, of whatever process, waited for a block: the union of their waits."""
    failed_reads: int = 0
    denied: int = 0
    """Reads that failed without an answer of a fetcher."""
    taken_over: int = 0
    """Reads that a restarted FUSE server answered for the one before."""
    bad_blocks: int = 0
    retries: int = 0
    direct_misses: int = 0
    """Missing blocks fetched because a reader wanted them."""
    hedges: int = 0
    """Blocks requested a second time, because their first request did not bring them in time."""
    read_ahead_bytes: int = 0
    """Of the mount, read before the job. Neither that nor what the job then finds there is among `reads`."""
    uptime: float = 0.0
