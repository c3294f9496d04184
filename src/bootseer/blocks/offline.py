"""Trees without a lazy mount: the hot set into a node cache beforehand, a look inside, or a plain folder."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

import msgspec

from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.cache.metadata import LocalTree, localize
from bootseer.blocks.extract.tree import extract
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.pull import BlockReader
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.profiles import profiles
from bootseer.blocks.profiles.profiles import ProfileKey
from bootseer.blocks.publish.packs import Progress
from bootseer.erofs import Reader
from bootseer.errors import DataError, FullError, NotWritableError, UnavailableError
from bootseer.store import Store, open_store

__all__ = ["OpenTree", "extract", "look", "prefetch"]

log = logging.getLogger(__name__)

_STALLED_SECONDS = 60.0


def prefetch(
    store_url: str,
    digest: str,
    *,
    cache_dir: Path,
    profile: ProfileKey | None = None,
    streams: int = 6,
    progress: Progress | None = None,
) -> int:
    """Pull the hot blocks of a tree into the node cache (all blocks when there is no profile); returns how many are
    ready. ``progress(done, total)`` counts blocks. Raises `UnavailableError` also when a block server owns the cache.
    """
    store = open_store(store_url)
    tree = localize(store, digest, Path(os.path.abspath(cache_dir)))
    traces = profiles.load(store, digest, profile, tree.map.size) if profile is not None else []
    wanted = profiles.merge(traces, tree.map) if traces else list(range(tree.map.count))
    with CacheFile.open(tree.cache, tree.map, tree.map_digest) as cache:
        _fill(store, tree, cache, wanted, streams, progress)
        return sum(cache.ready[block] for block in wanted)


def _fill(
    store: Store, tree: LocalTree, cache: CacheFile, wanted: list[int], streams: int, progress: Progress | None
) -> None:
    """Fetch ``wanted``; gives up when nothing arrives for a minute."""
    fetcher = Fetcher(cache, [StoreSource(store, tree.map)], streams=streams)
    try:
        fetcher.hot(wanted)
        seen, since = -1, time.monotonic()
        while not fetcher.wait(0.2):
            if cache.ready_count != seen:
                seen, since = cache.ready_count, time.monotonic()
            elif time.monotonic() - since > _STALLED_SECONDS:
                raise UnavailableError(f"no block of tree {tree.digest[:12]} came from {store.url} for a minute")
            if progress is not None:
                progress(sum(cache.ready[block] for block in wanted), len(wanted))
        missing = [block for block in wanted if not cache.ready[block]]
        if fetcher.full:
            raise FullError(f"no space for tree {tree.digest[:12]} in {cache.folder}", hint="free some space there")
        if missing:
            raise DataError(f"{len(missing)} blocks of tree {tree.digest[:12]} are damaged in store {store.url}")
        if progress is not None:
            progress(len(wanted), len(wanted))
    finally:
        fetcher.close()


class OpenTree(msgspec.Struct, frozen=True):
    """A tree to look at without a mount; `close` it."""

    digest: str
    map: BlockMap
    reader: Reader
    source: StoreSource

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> OpenTree:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def look(store: Store, digest: str, cache_dir: Path) -> OpenTree:
    """Open a tree for reading names and single files, which come straight from the store.

    Its small parts are kept in ``cache_dir``, or in memory only where that cannot be written. Raises `NotFoundError`,
    `DataError`, `UnavailableError`.
    """
    try:
        tree = localize(store, digest, Path(os.path.abspath(cache_dir)))
        meta = tree.meta.read_bytes()
    except (NotWritableError, FullError) as exc:
        log.info("%s; keeping nothing", exc)
        with tempfile.TemporaryDirectory(prefix="bootseer-look-") as folder:
            tree = localize(store, digest, Path(folder))
            meta = tree.meta.read_bytes()
    source = StoreSource(store, tree.map)
    data = BlockReader(source, tree.map)
    return OpenTree(digest, tree.map, Reader(meta, data.read, data_size=tree.map.size), source)
