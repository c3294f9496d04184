"""The limits of the node cache, and how it shrinks: longest unused first, cold blocks before whole trees.

A folder was used last when its lock was taken last: the time of that file (`locks`). No age makes a block go, only want
of room: ``--age`` is of the verbs that collect in stores (`upkeep.collection`, `stripefs.maintenance.collect`).

One collection at a time per cache (flock of its folder ``blocks``); others leave it to that one. Trouble with one
folder is a log line and the next one is tried. What is used is never touched (`locks.maintain`).

A crash at any moment leaves right bytes: a block leaves the bitmap, durably, before its bytes leave the disk (a hole in
the data file); a folder loses its bitmap, durably, before anything else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer import faults
from bootseer.chunks import bitmap
from bootseer.chunks.blockmap import BlockMap, Blocks
from bootseer.chunks.cachefile import in_use
from bootseer.chunks.inventory import Part, disk_bytes, map_of, parts, used
from bootseer.chunks.locks import READING, OwnedFolder, maintain, unheld
from bootseer.closing import descriptor
from bootseer.errors import BootseerError
from bootseer.kernel import libc
from bootseer.kernel.flock import locked
from bootseer.ranges import runs

log = logging.getLogger(__name__)

_LOW = 0.9
"""A collection goes on until the cache is this share of its limit, so that the next one is not due at once."""
_ENOUGH = 1.5
"""And until this multiple of what must stay free is free."""


class Limits(NamedTuple):
    """``most``: what the cache may take; ``free``: what must stay free on its disk. Values up to 1 are a share of the
    disk, others bytes; 0: no limit."""

    most: float = 0.8
    free: float = 0.02

    def most_bytes(self, cache_dir: Path) -> int:
        """``most`` in bytes; 0: no limit, or the disk is not known."""
        try:
            disk = os.statvfs(cache_dir)
        except OSError:
            return _bytes(self.most, 0)
        return _bytes(self.most, (disk.f_blocks - disk.f_bfree + disk.f_bavail) * disk.f_frsize)

    def excess(self, cache_dir: Path, coming: int = 0) -> int:
        """Bytes to give back before ``coming`` more are written; 0 when the limits hold."""
        try:
            disk = os.statvfs(cache_dir)
        except OSError:
            return 0
        free = disk.f_bavail * disk.f_frsize
        size = free + (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        most, spare = _bytes(self.most, size), _bytes(self.free, size)
        over = 0
        if most and (now := used(cache_dir) + coming) > most:
            over = now - int(_LOW * most)
        if spare and free - coming < spare:
            over = max(over, int(_ENOUGH * spare) - (free - coming))
        if coming > free:
            over = max(over, coming - free)
        return over


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of a collection gave back. ``whole``: the tree, else only ``blocks`` cold blocks of it."""

    map: str
    trees: list[str]
    file: str = ""
    whole: bool
    blocks: int
    bytes: int


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection gave back, or would."""

    gone: list[Gone] = []
    busy: bool = False
    """Another process was at it."""

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.gone)


def make_room(cache_dir: Path, limits: Limits, *, coming: int = 0, keep: str = "") -> None:
    """Keep the cache within its limits when ``coming`` bytes more are written; never raises. ``keep``: the digest of a
    block map whose folder stays."""
    if (over := limits.excess(cache_dir, coming)) > 0:
        free(cache_dir, over, keep=keep)


def free(cache_dir: Path, wanted: int, *, keep: str, patience: float = 0.0) -> bool:
    """Remove about ``wanted`` bytes of what is not used, whatever the limits say. False for none; never raises."""
    try:
        done = collect(cache_dir, wanted, keep=keep, patience=patience)
    except (OSError, BootseerError) as exc:
        log.warning("cannot make room in %s: %s", cache_dir, exc)
        return False
    _report(done, wanted)
    return done.bytes > 0


def missing_bytes(blocks: BlockMap, cache: Path) -> int:
    """What ``blocks`` may still take on disk in the folder ``cache``, at most."""
    all_bytes = (blocks.count - len(blocks.zeros)) * blocks.block_size
    return max(0, all_bytes - disk_bytes([cache]))


def collect(
    cache_dir: Path, need: int, *, keep: str = "", dry_run: bool = False, patience: float = 0.0, whole: bool = False
) -> Collection:
    """Give ``need`` bytes back, or as many as there are in what is not used: cold blocks of the longest unused trees
    (all of a striped file is cold), then whole trees, longest unused first (``whole``: these only). ``patience``:
    seconds to wait for another collection. Raises `OSError` when the cache cannot be opened."""
    if not any((cache_dir / name).is_dir() for name in ("blocks", "trees")):
        return Collection()
    (cache_dir / "blocks").mkdir(exist_ok=True)
    with locked(cache_dir / "blocks", os.O_RDONLY | os.O_DIRECTORY, patience) as alone:
        if not alone:
            return Collection(busy=True)
        left = [part for part in parts(cache_dir) if not part.in_use and (part.map != keep or not keep)]
        with READING:
            return Collection(gone=list(_steps(cache_dir, left, need, dry_run, whole)))


def _steps(cache_dir: Path, left: list[Part], need: int, dry_run: bool, whole: bool) -> Iterator[Gone]:
    shrunk: dict[str, Gone] = {}
    for step in (_remove,) if whole else (_shrink, _remove):
        for part in left:
            if need <= 0:
                return
            try:
                if any(_wanted(cache_dir / "trees" / digest) for digest in part.trees):
                    continue
                gone = step(cache_dir, part, need, dry_run, shrunk.get(part.map))
            except (OSError, BootseerError) as exc:
                name = part.map[:12] or part.trees[0][:12]
                log.warning("cannot give back %s of the node cache: %s", name, exc)
                continue
            if gone is not None:
                need -= gone.bytes
                shrunk[part.map] = gone
                yield gone


def _shrink(cache_dir: Path, part: Part, need: int, dry_run: bool, before: Gone | None) -> Gone | None:
    if part.file:
        return _remove(cache_dir, part, need, dry_run, before)
    blocks = map_of(cache_dir, part)
    if not part.map or part.hot_total is None or blocks is None:
        return None
    with maintain(cache_dir / "blocks" / part.map) as owned:
        if owned is None:
            return None
        if not dry_run:
            _sweep(owned)
        which = _cold_blocks(owned, blocks, need)
        if not which:
            return None
        got = sum(map(blocks.length_of, which)) if dry_run else drop_blocks(owned, blocks, which)
    return Gone(map=part.map, trees=part.trees, whole=False, blocks=len(which), bytes=got)


def _remove(cache_dir: Path, part: Part, _need: int, dry_run: bool, before: Gone | None) -> Gone | None:
    if before is not None and before.whole:
        return None  # a striped file that went before
    if part.map:
        with maintain(cache_dir / "blocks" / part.map) as owned:
            if owned is None:
                return None
            if not dry_run:
                remove_blocks(owned)
    if not dry_run:
        for digest in part.trees:
            if not remove_tree(cache_dir / "trees" / digest) and not part.map:
                return None
    size = max(0, part.disk_bytes - (before.bytes if before else 0))
    count = part.blocks_ready - (before.blocks if before else 0)
    return Gone(map=part.map, trees=part.trees, file=part.file, whole=True, blocks=count, bytes=size)


def _wanted(folder: Path) -> bool:
    """Whether somebody is about to use the tree."""
    with unheld(folder) as alone:
        return not alone


def _report(done: Collection, need: int) -> None:
    if done.busy:
        log.info("another process makes room in the cache")
        return
    for one in done.gone:
        what = "all" if one.whole else f"{one.blocks} cold blocks"
        name = one.file or (one.map or one.trees[0])[:12]
        log.info("node cache: %s of %s given back, %d bytes", what, name, one.bytes)
    if done.bytes < need:
        log.warning("the node cache could give back %d of %d bytes: the rest is in use", done.bytes, need)


def _bytes(value: float, size: int) -> int:
    return int(value * size) if value <= 1 else int(value)


def _cold_blocks(owned: OwnedFolder, blocks: Blocks, need: int) -> list[int]:
    """Ready blocks that starts do not touch, from the end of the file, until they hold ``need`` bytes; none when that
    is not known."""
    ready = bitmap.read(owned.folder / "bitmap", bitmap.READY, owned.digest, blocks.count)
    hot = bitmap.read(owned.folder / "hot", bitmap.HOT, owned.digest, blocks.count)
    found: list[int] = []
    if ready is None or hot is None or owned.data_fd < 0:
        return found
    for block in range(blocks.count - 1, -1, -1):
        if need <= 0:
            break
        if ready[block] and not hot[block] and not blocks.is_zero(block):
            found.append(block)
            need -= blocks.length_of(block)
    return found


def drop_blocks(owned: OwnedFolder, blocks: Blocks, which: Sequence[int]) -> int:
    """Give the space of these blocks back; returns how much the data file shrank on disk. Raises `OSError`: then they
    may be missing, but are not wrong."""
    path = owned.folder / "bitmap"
    flags = bitmap.read(path, bitmap.READY, owned.digest, blocks.count)
    if flags is not None:
        for block in which:
            flags[block] = blocks.is_zero(block)
        faults.point("blocks.evict.before-bitmap")
        bitmap.replace(path, bitmap.encode(bitmap.READY, owned.digest, flags), "blocks.evict.bitmap", final=True)
    faults.point("blocks.evict.before-punch")
    before = os.fstat(owned.data_fd).st_blocks
    for first, count in runs(which):
        libc.punch_hole(owned.data_fd, first * blocks.block_size, count * blocks.block_size)
        faults.point("blocks.evict.punched")
    return max(0, before - os.fstat(owned.data_fd).st_blocks) * 512


def remove_blocks(owned: OwnedFolder) -> None:
    """Delete the cache folder. Raises `OSError`: what is left is begun anew by who uses it."""
    (owned.folder / "bitmap").unlink(missing_ok=True)
    bitmap.sync_folder(owned.folder)
    faults.point("blocks.evict.bitmap-gone")
    for path in owned.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)  # no part of a cache: something that was killed made it
        elif path.name != "lock":
            path.unlink()
            faults.point("blocks.evict.file-gone")
    # The lock last: who opened it before, and waits, sees that it is not in its place any more.
    (owned.folder / "lock").unlink()
    faults.point("blocks.evict.lock-gone")
    owned.folder.rmdir()


def remove_tree(folder: Path) -> bool:
    """Delete the metadata of a tree, unless it is used. Raises `OSError`."""
    with unheld(folder) as alone:
        if not alone or _open_elsewhere(folder / "meta"):
            return False
        for path in folder.iterdir():
            path.unlink()
            faults.point("blocks.evict.file-gone")
        folder.rmdir()
    return True


def remove_small(path: Path) -> bool:
    """Delete one small file of a tree, unless it is used. Raises `OSError`."""
    with unheld(path.parent) as alone:
        if not alone or _open_elsewhere(path):
            return False
        path.unlink()
    return True


def _sweep(owned: OwnedFolder) -> None:
    """Remove what killed processes left in a cache folder."""
    for path in owned.folder.iterdir():
        if path.name.endswith(".tmp") or path.name.startswith(".hotpack-"):
            path.unlink()


def _open_elsewhere(path: Path) -> bool:
    """Whether a mount (or a process) has the file open."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    with descriptor(fd):
        return in_use(fd)
