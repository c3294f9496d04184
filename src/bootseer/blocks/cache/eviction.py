"""The limits of the node cache, and how it shrinks: longest unused first, cold blocks before whole trees.

One collection at a time per cache (flock of its folder ``blocks``); others leave it to that one. Trouble with one
folder is a log line and the next one is tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer.blocks.cache import evict
from bootseer.blocks.cache.inventory import Part, disk_bytes, map_of, parts, used
from bootseer.blocks.cache.locks import maintain, unheld
from bootseer.blocks.cache.metadata import LocalTree
from bootseer.errors import BootseerError

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
    try:
        if (over := limits.excess(cache_dir, coming)) > 0:
            _report(collect(cache_dir, over, keep=keep), over)
    except (OSError, BootseerError) as exc:
        log.warning("cannot make room in %s: %s", cache_dir, exc)


def make_some(cache_dir: Path, wanted: int, *, keep: str) -> bool:
    """The disk is full: give back about ``wanted`` bytes. Whether there are any; never raises."""
    try:
        done = collect(cache_dir, wanted, keep=keep)
        _report(done, wanted)
        return done.bytes > 0
    except (OSError, BootseerError) as exc:
        log.warning("cannot make room in %s: %s", cache_dir, exc)
        return False


def missing_bytes(tree: LocalTree) -> int:
    """What the blocks of ``tree`` may still take on disk, at most."""
    blocks = tree.map
    all_bytes = (blocks.count - len(blocks.zeros)) * blocks.block_size
    return max(0, all_bytes - disk_bytes([tree.cache]))


def collect(
    cache_dir: Path, need: int, *, keep: str = "", dry_run: bool = False, patience: float = 0.0, whole: bool = False
) -> Collection:
    """Give ``need`` bytes back, or as many as there are in what is not used.

    First cold blocks of the longest unused trees, then whole trees, longest unused first (``whole``: these only).
    ``patience``: seconds to wait for another collection. Raises `OSError` when the cache cannot be opened.
    """
    try:
        lock = os.open(cache_dir / "blocks", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        if not (cache_dir / "trees").is_dir():
            return Collection()
        (cache_dir / "blocks").mkdir(exist_ok=True)
        lock = os.open(cache_dir / "blocks", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _locked(lock, patience):
            return Collection(busy=True)
        left = [part for part in parts(cache_dir) if not part.in_use and (part.map != keep or not keep)]
        return Collection(gone=list(_steps(cache_dir, left, need, dry_run, whole)))
    finally:
        os.close(lock)


def _steps(cache_dir: Path, left: list[Part], need: int, dry_run: bool, whole: bool) -> Iterator[Gone]:
    shrunk: dict[str, Gone] = {}
    for part in left if not whole else []:
        if need <= 0:
            return
        if part.map and part.hot_total is not None and (gone := _shrink(cache_dir, part, need, dry_run)):
            need -= gone.bytes
            shrunk[part.map] = gone
            yield gone
    for part in left:
        if need <= 0:
            return
        if gone := _remove(cache_dir, part, dry_run, shrunk.get(part.map)):
            need -= gone.bytes
            yield gone


def _shrink(cache_dir: Path, part: Part, need: int, dry_run: bool) -> Gone | None:
    blocks = map_of(cache_dir, part.trees)
    if blocks is None:
        return None

    def step() -> Gone | None:
        with maintain(cache_dir / "blocks" / part.map) as quiet:
            if quiet is None:
                return None
            which = evict.cold_blocks(quiet, blocks, need)
            if dry_run:
                got = sum(blocks.length_of(block) for block in which)
            else:
                evict.sweep(quiet)
                got = evict.drop_blocks(quiet, blocks, which) if which else 0
            return Gone(map=part.map, trees=part.trees, whole=False, blocks=len(which), bytes=got) if which else None

    return _tried(step, cache_dir, part)


def _remove(cache_dir: Path, part: Part, dry_run: bool, before: Gone | None) -> Gone | None:
    def step() -> Gone | None:
        size = max(0, part.disk_bytes - (before.bytes if before else 0))
        count = part.blocks_ready - (before.blocks if before else 0)
        if part.map:
            with maintain(cache_dir / "blocks" / part.map) as quiet:
                if quiet is None:
                    return None
                if not dry_run:
                    evict.remove_blocks(quiet)
        if not dry_run:
            for digest in part.trees:
                if not evict.remove_tree(cache_dir / "trees" / digest) and not part.map:
                    return None
        return Gone(map=part.map, trees=part.trees, whole=True, blocks=count, bytes=size)

    return _tried(step, cache_dir, part)


def _tried(step: Callable[[], Gone | None], cache_dir: Path, part: Part) -> Gone | None:
    try:
        return step() if not any(_wanted(cache_dir / "trees" / digest) for digest in part.trees) else None
    except (OSError, BootseerError) as exc:
        log.warning("cannot give back %s of the node cache: %s", part.map[:12] or part.trees[0][:12], exc)
        return None


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
        log.info("node cache: %s of %s given back, %d bytes", what, (one.map or one.trees[0])[:12], one.bytes)
    if done.bytes < need:
        log.warning("the node cache could give back %d of %d bytes: the rest is in use", done.bytes, need)


def _bytes(value: float, size: int) -> int:
    return int(value * size) if value <= 1 else int(value)


def _locked(fd: int, patience: float) -> bool:
    until = time.monotonic() + patience
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
