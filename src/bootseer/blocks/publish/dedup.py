"""Blocks that other trees of a store have stored already, so that a new tree need not store them again. Made from the
maps of some of those trees, in memory only. What cannot be read costs sharing, never a publication."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bootseer.blocks.metadata import fetch
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.frames import verified
from bootseer.chunks.manifest import MAX_MANIFEST, TreeManifest, tree_key
from bootseer.errors import BootseerError, DataError, NotFoundError, logged
from bootseer.objects import Store

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
    """An index of blocks by hash. Once it is made, any thread may ask it. A map is not believed: every frame that
    `proven` names has been read from the store and compared with its hash. Of a pack that was missing, damaged or not
    to be had, nothing is read any more."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._maps: list[BlockMap] = []
        self._index: dict[bytes, int] = {}
        self._bad: set[ObjectRef] = set()

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
            with logged(log.warning, "blocks of tree %s are not shared", digest[:12]):
                manifest = TreeManifest.decode(store.get(tree_key(digest), most=MAX_MANIFEST), digest)
                if manifest.map.size > left:
                    continue
                left -= manifest.map.size
                self.add(BlockMap.decode(fetch(store, manifest.map)), block_size)
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

    def proven(self, digests: Iterable[bytes]) -> dict[bytes, Place]:
        """Where those of these known blocks lie that the store has: one read for neighbours in a pack."""
        wanted: dict[ObjectRef, list[tuple[BlockMap, int]]] = {}
        for digest in digests:
            found = self._index[digest]
            blocks, block = self._maps[found >> 32], found & 0xFFFFFFFF
            wanted.setdefault(blocks.packs[blocks.pack_of[block]], []).append((blocks, block))
        good: dict[bytes, Place] = {}
        for pack, some in wanted.items():
            if pack not in self._bad:
                good.update(self._read(pack, sorted(some, key=lambda one: one[0].offsets[one[1]])))
        return good

    def _read(self, pack: ObjectRef, some: Sequence[tuple[BlockMap, int]]) -> Iterator[tuple[bytes, Place]]:
        """Those blocks of ``pack``, in the order of their frames, that are right, up to the first that is not."""
        try:
            with self._store.open(pack.key) as reader:
                if reader.size != pack.size:
                    raise DataError("its size differs")
                for run in _neighbours(some):
                    first, block = run[0]
                    frames = reader.pieces(first.offsets[block], [blocks.lengths[block] for blocks, block in run])
                    for (blocks, block), frame in zip(run, frames, strict=True):
                        verified(blocks, block, frame)
                        yield blocks.hash_of(block), Place(pack, blocks.offsets[block], blocks.lengths[block])
        except (BootseerError, OSError) as exc:
            self._bad.add(pack)
            if isinstance(exc, NotFoundError | DataError):
                what = "missing" if isinstance(exc, NotFoundError) else "damaged"
                shown = self._store.shown
                log.warning("object %s in store %s is %s; its blocks are stored again", pack.key, shown, what)
            else:
                log.warning("blocks of object %s are not shared: %s", pack.key, exc)


def _neighbours(some: Sequence[tuple[BlockMap, int]]) -> Iterator[list[tuple[BlockMap, int]]]:
    """``some``, divided where a frame does not begin at the end of the one before."""
    run: list[tuple[BlockMap, int]] = []
    end = 0
    for blocks, block in some:
        if run and blocks.offsets[block] != end:
            yield run
            run = []
        run.append((blocks, block))
        end = blocks.offsets[block] + blocks.lengths[block]
    if run:
        yield run
