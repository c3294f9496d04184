"""Checking what a node cache holds against the hashes of its block maps, on all cores.

A folder that nothing uses is owned for a second at a time (`locks.maintain`), so that a mount waits no longer than
that; what a mount uses is read through its data file beside the mount, and only reported. Ready blocks are those of the
bitmap on disk. Folders in use are read from the page cache where they are in it, others from the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from bootseer.chunks import bitmap, eviction, hashing
from bootseer.chunks.blockmap import BlockMap, Blocks
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.inventory import COMPARED, Part, manifest_of, map_of, mount_points
from bootseer.chunks.locks import DATA, maintain
from bootseer.errors import FullError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Fetch = Callable[[CacheFile[BlockMap], Sequence[int]], bool]
"""Fetches blocks into an open cache file; False when it could not take one."""

_PIECE = 1 << 20
"""Bytes that a thread checks at once."""
_SLICE_SECONDS = 1.0
_PAUSE = 0.02
"""Longer than who waits for a folder sleeps between two tries."""


class Check(msgspec.Struct, kw_only=True):
    """What was found in one part of a cache, and what became of it."""

    map: str
    trees: list[str]
    file: str = ""
    checked: int = 0
    """Blocks read and compared."""
    bad: list[int] = []
    """Blocks that are not what the map says, or cannot be read."""
    dropped: int = 0
    """Bad blocks that are counted as missing now, and are fetched again when they are wanted."""
    fetched: int = 0
    """Of these, blocks that were fetched again."""
    bad_files: list[str] = []
    """Small files of its trees that are not what they must be. No mount believes them; it fetches them again."""
    dropped_files: int = 0
    """Bad small files that are gone now."""
    in_use: bool = False
    """A mount uses it: nothing was changed."""
    trouble: str = ""
    """What kept it from being checked."""

    @property
    def damaged(self) -> bool:
        """Whether damage is left."""
        return len(self.bad) > self.dropped or len(self.bad_files) > self.dropped_files


def check(
    cache_dir: Path, part: Part, *, repair: bool = False, fetch: Fetch | None = None, progress: Progress | None = None
) -> Check:
    """Check one part. ``repair``: bad blocks of what is not in use are dropped, and fetched again by ``fetch``.
    ``progress(done, total)`` counts bytes. Raises `OSError` when the folder cannot be opened, `BootseerError` when
    fetching again fails (the blocks are dropped then)."""
    folders = [cache_dir / "trees" / digest for digest in part.trees]
    found = Check(map=part.map, trees=part.trees, file=part.file, in_use=part.in_use)
    found.bad_files = [str(folder / name) for folder in folders for name in _bad_files(cache_dir, folder)]
    blocks = map_of(cache_dir, part) if part.map else None
    if blocks is not None:
        found.in_use = False
        folder = cache_dir / "blocks" / part.map
        _check_blocks(found, folder, blocks, [tree / "meta" for tree in folders], progress)
        if found.bad:
            with contextlib.suppress(OSError):  # of a cache that can only be read, the note stays
                (folder / COMPARED).unlink()
        if repair and found.bad:
            _repair(found, folder, blocks, fetch)
    elif part.map:
        found.trouble = "no intact block map or chunk list of it is here"
    if repair:
        found.dropped_files = sum(eviction.remove_small(Path(path)) for path in found.bad_files)
    return found


def _check_blocks(found: Check, folder: Path, blocks: Blocks, metas: Sequence[Path], progress: Progress | None) -> None:
    at = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="check") as pool:
        while at < blocks.count:
            with maintain(folder) as owned, contextlib.ExitStack() as undo:
                found.in_use |= owned is None
                if owned is not None:
                    fd = owned.data_fd
                elif found.file or any(mount_points(meta) for meta in metas):
                    fd = os.open(folder / DATA, os.O_RDONLY | os.O_CLOEXEC)
                    undo.callback(os.close, fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                else:
                    # Perhaps being mounted in this moment: a server that guards the file must be alone with it.
                    found.trouble = "it is in use, but not mounted here"
                    return
                flags = bitmap.read(folder / "bitmap", bitmap.READY, bytes.fromhex(folder.name), blocks.count)
                if flags is None or fd < 0 or os.fstat(fd).st_size != blocks.size:
                    return  # nothing that a mount would believe
                at = _slice(found, pool, _Data(fd, folder, blocks, flags, owned is not None), at)
            if progress is not None:
                progress(min(at * blocks.block_size, blocks.size), blocks.size)
            time.sleep(_PAUSE)


class _Data(msgspec.Struct):
    """An open data file. ``cold``: to be read from the disk."""

    fd: int
    folder: Path
    blocks: Blocks
    flags: bytearray
    cold: bool

    def check(self, which: range) -> tuple[int, list[int]]:
        """How many of these blocks are ready, and which of them are bad."""
        blocks = self.blocks
        wanted = [block for block in which if self.flags[block] or blocks.is_zero(block)]
        if self.cold and any(map(self.flags.__getitem__, which)):
            place = which.start * blocks.block_size, len(which) * blocks.block_size
            os.posix_fadvise(self.fd, *place, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self.fd, *place, os.POSIX_FADV_WILLNEED)
        return len(wanted), [block for block in wanted if not self._good(block)]

    def _good(self, block: int) -> bool:
        # One block at a time: whole pieces would have the server of a mount fetch what is missing in them.
        blocks = self.blocks
        offset, length = block * blocks.block_size, blocks.length_of(block)
        if blocks.is_zero(block) and _is_hole(self.fd, offset, offset + length):
            return True
        try:
            return blocks.matches(block, os.pread(self.fd, length, offset))
        except OSError as exc:
            log.warning("block %d of block cache %s cannot be read: %s", block, self.folder, exc.strerror)
            return False


def _slice(found: Check, pool: ThreadPoolExecutor, data: _Data, at: int) -> int:
    """Check from block ``at`` for a moment; returns where to go on."""
    count = data.blocks.count
    step = max(1, _PIECE // data.blocks.block_size)
    batch = 8 * step * len(os.sched_getaffinity(0))
    until = time.monotonic() + _SLICE_SECONDS
    while at < count and time.monotonic() < until:
        end = min(at + batch, count)
        pieces = [range(first, min(first + step, end)) for first in range(at, end, step)]
        for checked, bad in pool.map(data.check, pieces):
            found.checked += checked
            found.bad += bad
        at = end
    return at


def _repair(found: Check, folder: Path, blocks: Blocks, fetch: Fetch | None) -> None:
    with maintain(folder) as owned:
        if owned is None:
            found.in_use = True
            return
        eviction.drop_blocks(owned, blocks, found.bad)
        found.dropped = len(found.bad)
    found.in_use = False
    if fetch is not None and isinstance(blocks, BlockMap):
        with CacheFile.open(folder, blocks, bytes.fromhex(folder.name)) as cache:
            if not fetch(cache, found.bad):
                raise FullError(f"no space for blocks in {folder}", hint="free some space there")
            cache.sync()
        found.fetched = len(found.bad)


def _is_hole(fd: int, offset: int, end: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= end
    except OSError:  # ENXIO: no data up to the end
        return True


def _bad_files(cache_dir: Path, folder: Path) -> Iterator[str]:
    manifest = manifest_of(cache_dir, folder.name)
    if manifest is None:
        if (folder / "manifest.json").exists():
            yield "manifest.json"
        return
    for name, ref in (("map", manifest.map), ("meta", manifest.meta)):
        try:
            if hashing.file_hexdigest(folder / name) != ref.digest:
                yield name
        except FileNotFoundError:
            continue
        except OSError:
            yield name
