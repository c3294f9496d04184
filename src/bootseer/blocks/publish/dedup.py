"""Blocks that other trees of a store have stored already, so that a new tree need not store them again.

Made from the maps of some of those trees, kept in memory only. What cannot be read costs sharing, never a publication.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

from bootseer.blocks.cache.metadata import fetch
from bootseer.blocks.formats.blockmap import BlockMap, ObjectRef
from bootseer.blocks.formats.frames import verified
from bootseer.blocks.formats.manifest import TreeManifest, tree_key
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.store import Store

log = logging.getLogger(__name__)

MAX_TREES = 16
MAX_MAP_BYTES = 32 << 20
"""Maps of 44 GB of images with 64 KiB blocks; the index takes about four times as much memory."""
_SECONDS = 20.0


class Place(NamedTuple):
    """Where a frame lies: the stored object, offset and length in bytes."""

    pack: ObjectRef
    offset: int
    length: int


class KnownBlocks:
    """An index of blocks by hash. Other threads may ask ``in`` while one asks for places.

    `place` asks the store once for each object it names whether that is there with its size, and compares the one frame
    it is asked for first with its hash. The other frames are taken on the word of the map that names them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._maps: list[BlockMap] = []
        self._index: dict[bytes, int] = {}
        self._intact: dict[ObjectRef, bool] = {}

    @classmethod
    def of_trees(cls, store: Store, digests: Iterable[str], block_size: int) -> KnownBlocks:
        """The blocks of the trees ``digests``, the earlier ones first; bounded in trees, bytes and time."""
        self = cls(store)
        end, left, trees = time.monotonic() + _SECONDS, MAX_MAP_BYTES, 0
        for digest in digests:
            if trees == MAX_TREES or time.monotonic() > end:
                log.info("blocks of %d trees are looked for in store %s, not of more", trees, store.shown)
                break
            trees += 1
            try:
                manifest = TreeManifest.decode(store.get(tree_key(digest)), digest)
                if manifest.map.size > left:
                    continue
                left -= manifest.map.size
                self.add(BlockMap.decode(fetch(store, manifest.map), manifest.single_pack), block_size)
            except (BootseerError, OSError) as exc:
                log.warning("blocks of tree %s are not shared: %s", digest[:12], exc)
        return self

    def add(self, blocks: BlockMap, block_size: int) -> None:
        if blocks.block_size != block_size:
            return
        number = len(self._maps) << 32
        self._maps.append(blocks)
        index = self._index
        for block, length in enumerate(blocks.lengths):
            if length:
                index.setdefault(blocks.hash_of(block), number | block)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, digest: object) -> bool:
        return digest in self._index

    def place(self, digest: bytes) -> Place | None:
        """Where the block's frame lies; None when no tree has it or the store has lost that object."""
        found = self._index.get(digest)
        if found is None:
            return None
        blocks, block = self._maps[found >> 32], found & 0xFFFFFFFF
        pack = blocks.packs[blocks.pack_of[block]]
        if pack not in self._intact:
            self._intact[pack] = self._is_there(blocks, block)
        return Place(pack, blocks.offsets[block], blocks.lengths[block]) if self._intact[pack] else None

    def _is_there(self, blocks: BlockMap, block: int) -> bool:
        """Whether the pack of ``block`` is in the store, and has that block."""
        pack = blocks.packs[blocks.pack_of[block]]
        try:
            with self._store.open(pack.key) as reader:
                if reader.size == pack.size:
                    verified(blocks, block, reader.read(blocks.offsets[block], blocks.lengths[block]))
                    return True
            what = "damaged"
        except (NotFoundError, DataError) as exc:
            what = "missing" if isinstance(exc, NotFoundError) else "damaged"
        except (BootseerError, OSError) as exc:
            log.warning("blocks of object %s are not shared: %s", pack.key, exc)
            return False
        log.warning("object %s in store %s is %s; its blocks are stored again", pack.key, self._store.shown, what)
        return False
