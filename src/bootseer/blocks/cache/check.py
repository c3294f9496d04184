"""Checking what a node cache holds against the hashes of its block maps, on all cores.

A folder that nothing uses is owned for a second at a time (`locks.maintain`), so that a mount waits no longer than
that; what a mount uses is read through its data file beside the mount, and only reported. Ready blocks are those of the
bitmap on disk. Folders in use are read from the page cache where they are in it, others from the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from bootseer.blocks import _hash
from bootseer.blocks.cache import eviction
from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.cache.inventory import Part, manifest_of, map_of, mount_points
from bootseer.blocks.cache.locks import DATA, OwnedFolder, maintain
from bootseer.blocks.formats import bitmap
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.frames import verified
from bootseer.errors import BootseerError, DataError
from bootseer.store import Store

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_PIECE = 1 << 20
_SLICE_SECONDS = 1.0
_PAUSE = 0.02
"""Longer than who waits for a folder sleeps between two tries."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one part of a cache, and what became of it."""

    map: str
    trees: list[str]
    checked: int
    """Blocks read and compared."""
    bad: list[int]
    """Blocks that are not what the map says, or cannot be read."""
    dropped: int
    """Bad blocks that are counted as missing now, and are fetched again when they are wanted."""
    fetched: int
    """Of these, blocks that were fetched again."""
    bad_files: list[str]
    """Small files of its trees that are not what they must be. No mount believes them; it fetches them again."""
    dropped_files: int
    """Bad small files that are gone now."""
    in_use: bool
    """A mount uses it: nothing was changed."""
    trouble: str
    """What kept it from being checked."""

    @property
    def damaged(self) -> bool:
        """Whether damage is left."""
        return len(self.bad) > self.dropped or len(self.bad_files) > self.dropped_files


def check(
    cache_dir: Path, part: Part, *, repair: bool = False, store: Store | None = None, progress: Progress | None = None
) -> Check:
    """Check one part. ``repair``: bad blocks of what is not in use are dropped, and fetched again from ``store``.

    ``progress(done, total)`` counts bytes. Raises nothing for what is found, `OSError` when the folder cannot be
    opened, `BootseerError` when fetching again fails (the blocks are dropped then).
    """
    bad_files = [cache_dir / "trees" / digest / name for digest in part.trees for name in _bad_files(cache_dir, digest)]
    blocks = map_of(cache_dir, part.trees) if part.map else None
    metas = [cache_dir / "trees" / digest / "meta" for digest in part.trees]
    look = _Look(cache_dir / "blocks" / part.map, blocks, metas, progress) if part.map and blocks is not None else None
    if look is not None:
        look.run()
        if repair and look.bad:
            look.repair(store)
    return Check(
        map=part.map,
        trees=part.trees,
        checked=look.checked if look is not None else 0,
        bad=sorted(look.bad) if look is not None else [],
        dropped=look.dropped if look is not None else 0,
        fetched=look.fetched if look is not None else 0,
        bad_files=[str(path) for path in bad_files],
        dropped_files=sum(eviction.remove_small(path) for path in bad_files) if repair else 0,
        in_use=look.in_use if look is not None else part.in_use,
        trouble=look.trouble if look is not None else "no intact block map of it is here" if part.map else "",
    )


class _Look:
    """The check of one cache folder."""

    def __init__(self, folder: Path, blocks: BlockMap, metas: Sequence[Path], progress: Progress | None) -> None:
        self.trouble = ""
        self.bad: set[int] = set()
        self.checked = self.dropped = self.fetched = 0
        self.in_use = False
        self._folder = folder
        self._map = blocks
        self._metas = metas
        self._progress = progress
        self._digest = bytes.fromhex(folder.name)
        self._step = max(1, _PIECE >> blocks.shift)

    def run(self) -> None:
        at = 0
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="check") as pool:
            while at < self._map.count:
                with maintain(self._folder) as owned:
                    at = self._slice(pool, at, owned)
                if self._progress is not None:
                    self._progress(min(at << self._map.shift, self._map.size), self._map.size)
                time.sleep(_PAUSE)

    def _slice(self, pool: ThreadPoolExecutor, at: int, owned: OwnedFolder | None) -> int:
        """Check from block ``at`` for a moment; returns where to go on."""
        self.in_use |= owned is None
        flags = bitmap.read(self._folder / "bitmap", bitmap.READY, self._digest, self._map.count)
        with contextlib.ExitStack() as undo:
            if owned is not None:
                fd = owned.data_fd
            elif any(mount_points(meta) for meta in self._metas):
                fd = os.open(self._folder / DATA, os.O_RDONLY | os.O_CLOEXEC)
                undo.callback(os.close, fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            else:
                # Perhaps being mounted in this moment: a server that guards the file must be alone with it.
                self.trouble = "it is in use, but not mounted here"
                return self._map.count
            if flags is None or fd < 0 or os.fstat(fd).st_size != self._map.size:
                return self._map.count  # nothing that a mount would believe
            until = time.monotonic() + _SLICE_SECONDS
            while at < self._map.count and time.monotonic() < until:
                starts = range(at, min(self._map.count, at + 8 * self._step * len(os.sched_getaffinity(0))), self._step)
                # Bound to the file of this slice, not to the next one's.
                for checked, bad in pool.map(lambda start: self._piece(fd, start, flags, owned is not None), starts):
                    self.checked += checked
                    self.bad.update(bad)
                at = starts[-1] + self._step
        return at

    def _piece(self, fd: int, first: int, flags: bytearray, cold: bool) -> tuple[int, list[int]]:
        """Blocks compared, and which of them are bad."""
        blocks = self._map
        last = min(first + self._step, blocks.count)
        wanted = [block for block in range(first, last) if flags[block] or blocks.is_zero(block)]
        if not wanted:
            return 0, []
        offset, end = first << blocks.shift, min(last << blocks.shift, blocks.size)
        if all(blocks.is_zero(block) for block in wanted) and _is_hole(fd, offset, end):
            return len(wanted), []
        if cold:
            os.posix_fadvise(fd, offset, end - offset, os.POSIX_FADV_DONTNEED)
        try:
            if not cold and len(wanted) < last - first:
                # Whole pieces would have the server of the mount fetch what is missing in them.
                return len(wanted), [block for block in wanted if not self._good(fd, block)]
            view = memoryview(os.pread(fd, end - offset, offset))
            pieces: Iterable[tuple[int, _hash.Buffer]] = (
                (block, view[(block - first) << blocks.shift : (block - first + 1) << blocks.shift]) for block in wanted
            )
            return len(wanted), [block for block, data in pieces if not blocks.matches(block, data)]
        except OSError:
            return len(wanted), [block for block in wanted if not self._good(fd, block)]

    def _good(self, fd: int, block: int) -> bool:
        """A block alone, where a read of several failed."""
        try:
            data = os.pread(fd, self._map.length_of(block), block << self._map.shift)
        except OSError as exc:
            log.warning("block %d of block cache %s cannot be read: %s", block, self._folder, exc.strerror)
            return False
        return self._map.matches(block, data)

    def repair(self, store: Store | None) -> None:
        which = sorted(self.bad)
        with maintain(self._folder) as owned:
            if owned is None:
                self.in_use = True
                return
            eviction.drop_blocks(owned, self._map, which)
            self.dropped = len(which)
        self.in_use = False
        if store is not None:
            self._fetch(store, [block for block in which if not self._map.is_zero(block)])
            self.fetched = len(which)

    def _fetch(self, store: Store, which: Sequence[int]) -> None:
        with CacheFile.open(self._folder, self._map, self._digest) as cache:
            for block in which:
                try:
                    cache.write(block, _stored(store, self._map, block))
                except OSError as exc:
                    raise BootseerError(f"cannot write block {block} to {self._folder}: {exc.strerror}") from exc
            cache.sync()


def _stored(store: Store, blocks: BlockMap, block: int) -> bytes:
    """The verified bytes of ``block``; where a mirror has them wrong, those of the store itself."""
    offset, length = blocks.offsets[block], blocks.lengths[block]
    with store.open(blocks.packs[blocks.pack_of[block]].key) as reader:
        try:
            return verified(blocks, block, reader.read(offset, length))
        except DataError:
            if (original := reader.original(offset, length)) is None:
                raise
            return verified(blocks, block, original)


def _is_hole(fd: int, offset: int, end: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= end
    except OSError:  # ENXIO: no data up to the end
        return True


def _bad_files(cache_dir: Path, digest: str) -> Iterator[str]:
    folder = cache_dir / "trees" / digest
    manifest = manifest_of(cache_dir, digest)
    if manifest is None:
        if (folder / "manifest.json").exists():
            yield "manifest.json"
        return
    for name, ref in (("map", manifest.map), ("meta", manifest.meta)):
        try:
            if _hash.file_hexdigest(folder / name) != ref.digest:
                yield name
        except FileNotFoundError:
            continue
        except OSError:
            yield name
