"""Trees without a lazy mount: the hot set into a node cache beforehand, a look inside, or a plain folder."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path

import msgspec

from bootseer.blocks.extract.tree import extract
from bootseer.blocks.fetch.prefetch import fetch_all
from bootseer.blocks.fetch.source import StoreSource, read_run
from bootseer.blocks.metadata import localize
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.profiles.merge import merge
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.nodeblocks import NodeBlocks
from bootseer.closing import Closing
from bootseer.erofs import Reader
from bootseer.errors import FullError, NotWritableError
from bootseer.folders import private_folder
from bootseer.objects import Store, open_store

__all__ = ["OpenTree", "extract", "look", "prefetch"]

log = logging.getLogger(__name__)

_READ = 1 << 20
"""Bytes of data that `BlockReader` reads at once."""
_KEPT = 8


def prefetch(
    store_url: str,
    digest: str,
    *,
    cache_dir: Path,
    profile: ProfileKey | None = None,
) -> int:
    """Pull the hot blocks of a tree into the node cache (all blocks when there is no profile); returns how many are
    ready. Raises `UnavailableError` also when a block server owns the cache."""
    store = open_store(store_url)
    tree = localize(store, digest, private_folder(cache_dir))
    traces = library.load(store, digest, profile, tree.map.size) if profile is not None else []
    wanted = merge(traces, tree.map) if traces else list(range(tree.map.count))
    with CacheFile.open(tree.cache, tree.map, tree.map_digest) as cache:
        here = NodeBlocks.find(tree.cache, tree.map, cache.ready)
        if not fetch_all(store, cache, wanted, here=here):
            raise FullError(f"no space for tree {digest[:12]} in {cache.folder}", hint="free some space there")
        return sum(cache.ready[block] for block in wanted)


class OpenTree(Closing, msgspec.Struct, frozen=True):
    """A tree to look at without a mount; `close` it."""

    digest: str
    map: BlockMap
    reader: Reader
    source: StoreSource

    def close(self) -> None:
        self.source.close()


def look(store: Store, digest: str, cache_dir: Path) -> OpenTree:
    """Open a tree for reading names and single files straight from the store. Its metadata are kept in ``cache_dir``,
    or in memory only where that cannot be written. Raises `NotFoundError`, `DataError`, `UnavailableError`."""
    try:
        tree = localize(store, digest, private_folder(cache_dir))
        meta = tree.meta.read_bytes()
    except (NotWritableError, FullError) as exc:
        log.info("%s; keeping nothing", exc)
        with tempfile.TemporaryDirectory(prefix="bootseer-look-") as folder:
            tree = localize(store, digest, Path(folder))
            meta = tree.meta.read_bytes()
    source = StoreSource(store, tree.map)
    data = BlockReader(source, tree.map)
    return OpenTree(digest, tree.map, Reader(meta, data.read, data_size=tree.map.size), source)


class BlockReader:
    """Reads of any range of a tree's data straight from a store, for looking at a few files: the last `_KEPT` pieces
    of a MiB stay in memory. For one thread."""

    def __init__(self, source: StoreSource, blocks: BlockMap) -> None:
        self._source = source
        self._blocks = blocks
        self._per = max(1, _READ >> blocks.shift)
        self._piece = functools.lru_cache(_KEPT)(self._fetch)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly the bytes, or fewer at the end of the data. Raises `DataError`, `UnavailableError`."""
        end = min(offset + length, self._blocks.size)
        out = bytearray()
        while offset < end:
            number = (offset >> self._blocks.shift) // self._per
            start = number * self._per << self._blocks.shift
            piece = self._piece(number)
            out += piece[offset - start : end - start]
            offset = start + len(piece)
        return bytes(out)

    def _fetch(self, number: int) -> bytes:
        first = number * self._per
        return read_run(self._source, self._blocks, range(first, min(first + self._per, self._blocks.count)))
