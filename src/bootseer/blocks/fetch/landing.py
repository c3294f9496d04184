"""The bytes of a batch become ready blocks: verified, written to the cache, and those who wait for them answered.

Lock: that of the `Board` (see there); it is not held while a block is verified, written, fetched again, or answered.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence

from bootseer.blocks._hash import Buffer
from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.cache.room import Room
from bootseer.blocks.fetch.board import Board
from bootseer.blocks.fetch.deadlines import Request
from bootseer.blocks.fetch.queue import STREAM, Batch
from bootseer.blocks.fetch.source import Sources
from bootseer.blocks.formats.frames import opened
from bootseer.errors import BootseerError, DataError, UnavailableError

log = logging.getLogger(__name__)

Came = tuple[int, bytes | None, BootseerError | None]
"""A block with what became of it: kept in the cache, or only its bytes, or an error."""

_CHUNK = 1 << 20
"""Uncompressed bytes verified and written before the readers of these blocks are told."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Landing:
    """Puts into ``cache`` what came; a block whose bytes are bad is fetched again, alone, from ``sources``.

    ``make_room`` is called when the disk is full, by a thread of its own; it says whether there is space now.
    """

    def __init__(
        self, board: Board, cache: CacheFile, sources: Sources, make_room: Callable[[], bool] | None = None
    ) -> None:
        self._board = board
        self._cache = cache
        self._sources = sources
        self._room = Room(make_room, self._unpark)
        self._chunk = max(1, _CHUNK >> cache.map.shift)

    def land(self, batch: Batch, raw: bytes) -> list[int]:
        """Verify and keep the blocks of ``batch``, waited-for ones first; returns those whose source went away."""
        with self._board.lock:
            missing = {block for block in batch.blocks if not self._cache.ready[block]}
            first = {block for block in missing if block in self._board.waiting}
            done = [block for block in batch.blocks if block not in missing]
        self.finish([(block, None, None) for block in done])
        bad: dict[int, DataError] = {}
        view = memoryview(raw)
        frames = sorted(batch.frames, key=lambda frame: first.isdisjoint(frame.blocks)) if first else batch.frames
        came: list[Came] = []
        for start, length, blocks in frames:
            # A reader in a hurry may have had some of them fetched meanwhile.
            left = {block for block in blocks if block in missing and not self._cache.ready[block]}
            came += [(block, None, None) for block in blocks if block in missing and block not in left]
            if left:
                good, damaged = opened(self._cache.map, blocks, left, view[start : start + length])
                bad.update(damaged)
                for block, count, data in good:
                    came += self._keep_run(block, count, data)
            if len(came) >= self._chunk or (first and not first.isdisjoint(blocks)):
                self.finish(came)
                came = []
        self.finish(came)
        return self._again(bad, batch) if bad else []

    def finish(self, came: Sequence[Came]) -> None:
        """Blocks are ready, or could not be kept, or failed: tell who waits."""
        board = self._board
        settled: list[Request] = []
        with board.lock:
            for block, data, error in came:
                board.queue.done([block])
                settled += board.waiting.came(block, data, error)
            if settled:
                board.schedule.last_demand = time.monotonic()
        for request in settled:
            request.answer()

    def _fail(self, block: int, exc: BootseerError) -> None:
        with self._board.lock:
            self._board.queue.give_up(block)
        self.finish([(block, None, exc)])

    def _again(self, bad: dict[int, DataError], batch: Batch) -> list[int]:
        """Fetch the blocks that came damaged in ``batch``, alone from each source in turn, waited-for ones first;
        returns those whose source went away."""
        board = self._board
        name = "the hot pack" if batch.pack == STREAM else self._sources.name
        for block, why in bad.items():
            log.warning("block %d from %s: %s; fetching it again", block, name, why)
        with board.lock:
            board.stats.bad_blocks += len(bad)
            board.stats.stream_bad += len(bad) if batch.pack == STREAM else 0
        lost: list[int] = []
        rest = dict.fromkeys(bad)
        while rest:
            with board.lock:  # each time: readers come while others are served
                block = next((one for one in rest if one in board.waiting), next(iter(rest)))
            del rest[block]
            try:
                self.finish(self._fetched(block, batch))
            except UnavailableError:
                lost.append(block)
            except BootseerError as exc:
                self._fail(block, exc)
        return lost

    def _fetched(self, block: int, batch: Batch) -> list[Came]:
        """``block`` kept, after a request of its own unless it is there by now."""
        if self._cache.ready[block]:
            return [(block, None, None)]
        data = self._sources.block(self._cache.map, block, lambda length: self._board.count(batch.priority, length))
        kept = self._keep(block, data)
        return [kept] if kept is not None else []

    def _keep_run(self, block: int, count: int, data: Buffer) -> list[Came]:
        """`_keep` of ``count`` blocks from ``block`` on."""
        try:
            self._cache.write(block, data)
        except OSError:
            # Perhaps some of them have room.
            kept = []
            for at in range(count):
                where = at << self._cache.map.shift
                kept.append(self._keep(block + at, bytes(data[where : where + self._cache.map.block_size])))
            return [one for one in kept if one is not None]
        return [(one, None, None) for one in range(block, block + count)]

    def _keep(self, block: int, data: bytes) -> Came | None:
        """Put ``data`` in the cache, or have it in memory for those who wait; None: it will come when there is room."""
        board = self._board
        try:
            self._cache.write(block, data)
        except OSError as exc:
            if exc.errno in _NO_SPACE:
                with board.lock:
                    board.parked += 1
                if self._room.park(block, data):
                    return None
                with board.lock:
                    board.parked -= 1
            self._note_full(exc)
            return block, data, None
        return block, None, None

    def _unpark(self, block: int, data: bytes) -> None:
        """Room was made, or will not be."""
        board = self._board
        memory: bytes | None = None
        try:
            self._cache.write(block, data)
        except OSError as exc:
            self._note_full(exc)
            memory = data
        finally:
            with board.lock:
                board.parked -= 1
            self.finish([(block, memory, None)])
            with board.lock:
                board.work_done.notify_all()

    def _note_full(self, exc: OSError) -> None:
        board = self._board
        with board.lock:
            board.stats.uncached_blocks += 1
            first = not board.schedule.full
            board.schedule.stop_prefetch()
        if first:
            why = "is full" if exc.errno in _NO_SPACE else f"cannot be written ({exc.strerror})"
            log.warning("block cache %s %s: serving reads from memory, prefetch stops", self._cache.folder, why)
