"""What a thread of the fetcher does with the bytes of a request: verify the blocks and write them to the cache. Nothing
here takes the lock of the fetcher or is called under it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence, Set
from pathlib import Path
from typing import Protocol

from bootseer import faults
from bootseer.blocks.fetch.queue import STREAM, Batch
from bootseer.blocks.fetch.source import StoreSource
from bootseer.chunks.bitmap import Ready
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.frames import opened
from bootseer.chunks.hashing import Buffer
from bootseer.chunks.keeping import NO_SPACE, Room
from bootseer.chunks.nodeblocks import NodeBlocks
from bootseer.errors import BootseerError, DataError

Came = tuple[int, bytes | None, BootseerError | None]
"""A block with what became of it: written to the cache, or only its bytes, or an error."""

_CHUNK = 1 << 20
"""Uncompressed bytes verified and written before the readers of these blocks are told."""


_PART = 256 << 10
"""Bytes that are written at once, at least, where no reader waits: he has his as soon as they came."""


def read_parts(source: StoreSource, batch: Batch, first: Set[int]) -> Generator[tuple[Batch, bytes], None, None]:
    """Read the range ``batch``: its parts with their bytes, as they come; a part ends with blocks of ``first``. Raises
    as `StoreSource.read`."""
    parts: list[Batch | None] = []
    lengths: list[int] = []
    at = batch.offset
    for part in batch.parts(_PART, first):
        if part.offset > at:
            parts.append(None)
            lengths.append(part.offset - at)
        parts.append(part)
        lengths.append(part.length)
        at = part.offset + part.length
    with contextlib.closing(source.pieces(max(batch.pack, 0), batch.offset, lengths)) as pieces:
        for this, raw in zip(parts, pieces, strict=True):
            if this is not None:
                if batch.pack == STREAM:
                    faults.point("blocks.hot.part")
                yield this, raw


class BlockCache(Protocol):
    """Where blocks go: a `bootseer.chunks.cachefile.CacheFile`, or the files of a tree that is extracted."""

    folder: Path
    map: BlockMap
    ready: Ready

    def write(self, block: int, data: Buffer) -> None:
        """Store the verified bytes of ``block``, or of several from there on, and mark them ready. Raises `OSError`."""
        ...


class CacheWriter:
    """Writes blocks to ``cache``, for many threads. ``tell`` hears what became of each block, ``full`` that blocks
    cannot be written any more. ``make_room`` and ``allow``: as of `bootseer.chunks.keeping.Room`."""

    def __init__(
        self,
        cache: BlockCache,
        tell: Callable[[Sequence[Came]], None],
        full: Callable[[str], None],
        make_room: Callable[[], bool] | None,
        allow: Callable[[int], bool] | None,
    ) -> None:
        self._cache = cache
        self._tell = tell
        self._full = full
        self._room = Room(make_room, allow)
        self._chunk = max(1, _CHUNK >> cache.map.shift)

    def write_batch(self, batch: Batch, raw: bytes, first: set[int]) -> dict[int, DataError]:
        """Verify and write the blocks of ``batch`` out of ``raw``, the frames with blocks of ``first`` first. Returns
        those whose bytes are not what the map says."""
        ready, wanted, view = self._cache.ready, set(batch.blocks), memoryview(raw)
        frames = sorted(batch.frames, key=lambda frame: first.isdisjoint(frame.blocks)) if first else batch.frames
        bad: dict[int, DataError] = {}
        came: list[Came] = []
        for start, length, blocks in frames:
            # A reader in a hurry may have had some of them fetched meanwhile.
            left = {block for block in blocks if block in wanted and not ready[block]}
            came += [(block, None, None) for block in blocks if block in wanted and block not in left]
            if left:
                good, damaged = opened(self._cache.map, blocks, left, view[start : start + length])
                bad.update(damaged)
                for block, _, data in good:
                    came += self.write(block, data)
            if len(came) >= self._chunk or not first.isdisjoint(blocks):
                self._tell(came)
                came = []
        self._tell(came)
        return bad

    def copy(self, blocks: Sequence[int], here: NodeBlocks) -> list[int]:
        """Write those of ``blocks`` that are right where ``here`` knows them. Returns those that are not."""
        lost = set(blocks)
        for block, count, data in here.read([block for block in blocks if not self._cache.ready[block]]):
            lost.difference_update(range(block, block + count))
            self._tell(self.write(block, data))
        there = [block for block in lost if self._cache.ready[block]]
        self._tell([(block, None, None) for block in there])
        return sorted(lost.difference(there))

    def write(self, block: int, data: Buffer) -> list[Came]:
        """Write the verified bytes of ``block``, or of several from there on, or keep them in memory."""
        size = self._cache.map.block_size
        try:
            self._room.write(self._cache.write, block, data)
        except OSError as exc:
            self._full("is full" if exc.errno in NO_SPACE else f"cannot be written ({exc.strerror})")
            pieces = [bytes(data[at : at + size]) for at in range(0, len(data), size)]
            return [(block + at, piece, None) for at, piece in enumerate(pieces)]
        return [(one, None, None) for one in range(block, block + -(-len(data) // size))]
