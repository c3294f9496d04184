"""What a thread of the fetcher does with the bytes of a request: verify the blocks and write them to the cache.

Nothing here takes the lock of the fetcher or is called under it. `FreeSpace` has a lock of its own, which is held for
moments only and never while something is called.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bootseer.blocks._hash import Buffer
from bootseer.blocks.fetch.queue import Batch
from bootseer.blocks.formats.bitmap import Ready
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.frames import opened
from bootseer.errors import BootseerError, DataError

log = logging.getLogger(__name__)

Came = tuple[int, bytes | None, BootseerError | None]
"""A block with what became of it: written to the cache, or only its bytes, or an error."""

_CHUNK = 1 << 20
"""Uncompressed bytes verified and written before the readers of these blocks are told."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_MOST_PARKED = 64 << 20
"""Bytes that may wait for space; making it takes seconds, and a fast store fills this in less than one."""


class BlockCache(Protocol):
    """Where blocks go: a `bootseer.blocks.cache.blockfile.CacheFile`, or the files of a tree that is extracted."""

    folder: Path
    map: BlockMap
    ready: Ready

    def write(self, block: int, data: Buffer) -> None:
        """Store the verified bytes of ``block``, or of several from there on, and mark them ready. Raises `OSError`."""
        ...


class BlockWriter:
    """Writes blocks to ``cache``, for many threads. ``tell`` hears what became of each block, ``full`` that blocks
    cannot be written any more.

    ``make_room`` is called when the disk is full, by a thread of its own; it says whether there is space now. ``idle``
    is called when no block waits for space any more.
    """

    def __init__(
        self,
        cache: BlockCache,
        tell: Callable[[Sequence[Came]], None],
        full: Callable[[str], None],
        make_room: Callable[[], bool] | None,
        idle: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._tell = tell
        self._full = full
        self._space = FreeSpace(make_room, self._write_parked, idle)
        self._chunk = max(1, _CHUNK >> cache.map.shift)

    @property
    def parked(self) -> bool:
        """Whether blocks wait for space."""
        return self._space.busy

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
                for block, count, data in good:
                    came += self._write_run(block, count, data)
            if len(came) >= self._chunk or not first.isdisjoint(blocks):
                self._tell(came)
                came = []
        self._tell(came)
        return bad

    def _write_run(self, block: int, count: int, data: Buffer) -> list[Came]:
        """`write` of ``count`` blocks from ``block`` on."""
        try:
            self._cache.write(block, data)
        except OSError:
            # Perhaps some of them have room.
            kept = []
            for at in range(count):
                where = at << self._cache.map.shift
                kept += self.write(block + at, bytes(data[where : where + self._cache.map.block_size]))
            return kept
        return [(one, None, None) for one in range(block, block + count)]

    def write(self, block: int, data: bytes) -> list[Came]:
        """Write the verified bytes of ``block``, or have them in memory for those who wait. Nothing comes back for a
        block that waits for space: ``tell`` hears of it later."""
        try:
            self._cache.write(block, data)
        except OSError as exc:
            if exc.errno in _NO_SPACE and self._space.park(block, data):
                return []
            self._full(_why(exc))
            return [(block, data, None)]
        return [(block, None, None)]

    def _write_parked(self, block: int, data: bytes) -> None:
        """There is space now, or there will be none."""
        memory: bytes | None = None
        try:
            self._cache.write(block, data)
        except OSError as exc:
            self._full(_why(exc))
            memory = data
        finally:
            self._tell([(block, memory, None)])


def _why(exc: OSError) -> str:
    return "is full" if exc.errno in _NO_SPACE else f"cannot be written ({exc.strerror})"


class FreeSpace:
    """Verified blocks wait in memory while a thread of its own calls ``make`` (which may take its time, and says
    whether there is space now). Then that thread calls ``write`` once for each block that was parked, and ``idle``.

    After ``make`` has failed once it is not called again: what is in use stays in use.
    """

    def __init__(
        self, make: Callable[[], bool] | None, write: Callable[[int, bytes], None], idle: Callable[[], None]
    ) -> None:
        self._make = make
        self._write = write
        self._idle = idle
        self._lock = threading.Lock()
        self._parked: list[tuple[int, bytes]] = []
        self._bytes = 0
        self.busy = False
        """Whether a block is parked, or about to be written."""

    def park(self, block: int, data: bytes) -> bool:
        """The disk has no space for ``block``. False: nor will it have, or too much waits already."""
        with self._lock:
            if self._make is None or self._bytes + len(data) > _MOST_PARKED:
                return False
            if not self.busy:
                try:
                    threading.Thread(target=self._run, name="free-space", daemon=True).start()
                except RuntimeError as exc:
                    log.warning("cannot start a thread to free space with: %s", exc)
                    return False
                self.busy = True
            self._parked.append((block, data))
            self._bytes += len(data)
            return True

    def _run(self) -> None:
        try:
            made = self._make is not None and self._make()
        except Exception:
            log.exception("freeing space failed")
            made = False
        if not made:
            with self._lock:
                self._make = None
        while True:
            with self._lock:
                if not self._parked:
                    self.busy = False
                    break
                block, data = self._parked.pop(0)
                self._bytes -= len(data)
            try:
                self._write(block, data)
            except Exception:
                log.exception("block %d, for which space was freed, is lost", block)
        self._idle()
