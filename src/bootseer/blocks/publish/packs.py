"""Packs: a stream of data cut in blocks, hashed and compressed on all cores, and written to stored objects in order.
The caller's thread alone fills batches, takes results in order and writes packs; a pool hashes and compresses; threads
of `PackSpool` hand finished packs to the store. Bytes depend on the input only, never on which thread was first."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from bootseer.blocks.publish.dedup import KnownBlocks, Place
from bootseer.blocks.publish.spool import PACK_LIMIT, PackSpool
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import DEFAULT_BLOCK, MAX_ENCODED, BlockMap, ObjectRef, encoded_size, zero_hash
from bootseer.chunks.zstd import compress
from bootseer.closing import Closing
from bootseer.errors import DataError

Progress = Callable[[int, int], None]
"""Called now and then with (done, in all): bytes or blocks, as the caller of it says."""

LEVEL = 2
"""Of zstd, for what a tree consists of. Level 3 takes 1.4 times as long for 2 % fewer bytes. What starts touch comes
from hot packs, which are compressed by more."""
_AHEAD = 4
"""Batches in work per thread: bounds memory to about ``2 * 4 * threads`` MiB."""
_BATCH = 1 << 20
"""Blocks go to the pool by the MiB: a hand-over costs about 40 us, compressing 64 KiB about 200 us."""


class Packed(msgspec.Struct, frozen=True):
    """What a `PackWriter` wrote: the map; bytes of the packs it put; frame bytes it found in packs of other trees, and
    those packs."""

    map: BlockMap
    stored: int
    shared: int
    foreign: tuple[ObjectRef, ...]


_Block = tuple[bytes, bytes | Place | None]
"""Hash, and its frame (empty for zeros) or where another tree has that; None for a block that this tree has."""


class PackWriter(Closing):
    """A sequential sink of data; `finish` returns its block map. A context manager: leaving it stops every thread.

    Finished packs lie in ``folder`` until ``put(path, ref)``, called from other threads, has stored them: at most four
    times ``pack_limit`` bytes. Equal blocks are stored once, blocks of ``known`` not at all, all-zero blocks have no
    frame. Memory: ten MiB per thread and 200 bytes per block. Raises `FullError` and kin for ``folder``, `DataError`
    for more data than a block map has room for; what ``put`` raises comes out of a later call, `finish` at the latest.
    After an error each call raises it: some data is lost."""

    def __init__(
        self,
        folder: Path,
        put: Callable[[Path, ObjectRef], None],
        *,
        block_size: int = DEFAULT_BLOCK,
        threads: int | None = None,
        known: KnownBlocks | None = None,
        pack_limit: int = PACK_LIMIT,
    ) -> None:
        self._block = block_size
        self._known = known
        self._zeros = bytes(block_size)
        self._batch_size = max(block_size, _BATCH)
        self._free: list[bytearray] = []
        self._buffer = bytearray(self._batch_size)
        self._view = memoryview(self._buffer)
        self._fill = 0
        self._submitted = 0
        workers = threads or len(os.sched_getaffinity(0))
        self._bound = _AHEAD * workers
        self._pool = ThreadPoolExecutor(workers, "pack")
        self._spool = PackSpool(folder, put, pack_limit)
        self._queue: deque[tuple[Future[list[_Block]], bytearray] | None] = deque()
        # The map in the making.
        self._hashes: list[bytes] = []
        self._pack_of, self._offsets, self._lengths = array("H"), array("Q"), array("I")
        self._seen: dict[bytes, int] = {}
        self._shared = 0
        self._failure: BaseException | None = None
        self.waited = 0.0
        """Seconds that the caller has waited for hashing, compression and reads of what is shared."""

    @property
    def position(self) -> int:
        """Bytes taken so far: the data offset of the next one."""
        return self._submitted + self._fill

    def write(self, data: hashing.Buffer) -> None:
        view = memoryview(data)
        while view:
            piece = view[: self._batch_size - self._fill]
            end = self._fill + len(piece)
            self._view[self._fill : end] = piece
            self._fill = end
            if end == self._batch_size:
                with self._whole():
                    self._submit()
            view = view[len(piece) :]

    def align(self) -> None:
        """Zeros up to the next block."""
        self.write(self._zeros[: -self.position % self._block])

    def next_pack(self) -> None:
        """Align; what comes now goes to another stored object, so that equal layers give equal objects."""
        self.align()
        with self._whole():
            self._submit()
            self._queue.append(None)

    def hand_over(self) -> None:
        """Have what was written so far put, as far as it is ready, when nothing else is on its way; waits for nothing.
        Raises what puts have raised."""
        with self._whole():
            while self._queue and (self._queue[0] is None or self._queue[0][0].done()):
                self._take()
            self._spool.hand_over()

    def finish(
        self, dead: Iterable[tuple[int, int]] = (), beside: Callable[[BlockMap], None] = lambda made: None
    ) -> Packed:
        """The map, when every pack is put; ``beside`` gets it while the last ones are on their way. Blocks wholly
        inside a ``dead`` (offset, length) become zero blocks."""
        with self._whole():
            self._submit()
            while self._queue:
                self._take()
            self._spool.end_pack()
            made = self._map(dead)
            beside(made)
            self._spool.drain()
        foreign = tuple(pack for pack in made.packs if pack in self._spool.foreign)
        return Packed(made, self._spool.stored, self._shared, foreign)

    def close(self) -> None:
        """Stop the threads, after what they have begun. Without a `finish` nothing refers to what was put."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._failure = None  # its frames hold this
        self._spool.close()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        if self._failure:
            raise self._failure
        try:
            yield
        except BaseException as exc:
            self._failure = exc
            raise

    def _submit(self) -> None:
        """Hand the batch that was filled to the pool."""
        if not self._fill:
            return
        if encoded_size(-(-self.position // self._block), 0) > MAX_ENCODED:
            raise DataError(f"the tree is too large to be mounted: a block map of {self.position} bytes has no room")
        while len(self._queue) >= self._bound:
            self._take()
        self._queue.append((self._pool.submit(self._work, self._buffer, self._fill), self._buffer))
        self._submitted += self._fill
        self._buffer = self._free.pop() if self._free else bytearray(self._batch_size)
        self._view = memoryview(self._buffer)
        self._fill = 0

    def _work(self, buffer: bytearray, length: int) -> list[_Block]:
        """Hash one batch and compress what is new, in a thread of the pool."""
        view, seen, known = memoryview(buffer), self._seen, self._known
        pieces: list[tuple[bytes, memoryview]] = []  # the hash is empty for zeros
        for start in range(0, length, self._block):
            end = min(start + self._block, length)
            # memcmp in place; memoryviews would be compared byte by byte
            zeros = buffer.startswith(self._zeros[: end - start], start, end)
            pieces.append((b"" if zeros else hashing.digest(view[start:end]), view[start:end]))
        shared: dict[bytes, Place] = {}
        if known is not None:
            shared = known.proven({digest for digest, _ in pieces if digest in known and digest not in seen})
        blocks: list[_Block] = []
        for digest, piece in pieces:
            if not digest:
                blocks.append((zero_hash(len(piece)), b""))
            elif digest in seen:
                blocks.append((digest, None))
            else:
                blocks.append((digest, shared.get(digest) or compress(piece, LEVEL)))
        return blocks

    def _take(self) -> None:
        """Enter the oldest batch into map and pack."""
        item = self._queue.popleft()
        if item is None:
            self._spool.end_pack()
            return
        future, buffer = item
        began = time.monotonic()
        blocks = future.result()
        self.waited += time.monotonic() - began
        pack_of, offsets, lengths = self._pack_of, self._offsets, self._lengths
        for digest, found in blocks:
            place = 0, 0, 0
            if (first := self._seen.get(digest)) is not None:
                place = pack_of[first], offsets[first], lengths[first]
            elif found:
                if isinstance(found, Place):
                    self._shared += found.length
                    place = self._spool.index_of(found.pack), found.offset, found.length
                else:
                    place = self._spool.add(found)
                self._seen[digest] = len(self._hashes)
            self._hashes.append(digest)
            pack_of.append(place[0])
            offsets.append(place[1])
            lengths.append(place[2])
        self._free.append(buffer)
        self._spool.flush()

    def _map(self, dead: Iterable[tuple[int, int]]) -> BlockMap:
        """The map without dead blocks, and without packs that no block refers to."""
        size = self._submitted
        hashes, pack_of, offsets, lengths = self._hashes, self._pack_of, self._offsets, self._lengths
        for offset, length in dead:
            end = offset + length
            last = len(hashes) if end >= size else end // self._block
            for block in range(-(-offset // self._block), last):
                hashes[block] = zero_hash(min(self._block, size - block * self._block))
                pack_of[block] = offsets[block] = lengths[block] = 0
        order: dict[int, int] = {}
        for block, index in enumerate(pack_of):
            if lengths[block]:
                pack_of[block] = order.setdefault(index, len(order))
        packs = [self._spool.packs[index] for index in order]
        return BlockMap(self._block, size, [p for p in packs if p is not None], hashes, offsets, lengths, pack_of)
