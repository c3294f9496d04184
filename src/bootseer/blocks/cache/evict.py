"""Giving disk space of one cache folder back: single blocks by holes in the data file, or all of it.

What is used is never touched (`locks.maintain`). A crash at any moment leaves right bytes: a block leaves the
bitmap, durably, before its bytes leave the disk; a folder loses its bitmap, durably, before anything else.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bootseer import faults
from bootseer.blocks.cache.locks import Quiet, unheld
from bootseer.blocks.formats import bitmap
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.kernel import _libc

log = logging.getLogger(__name__)


def cold_blocks(quiet: Quiet, blocks: BlockMap, need: int) -> list[int]:
    """Ready blocks that starts do not touch, from the end of the file, until they hold ``need`` bytes; none when it is
    not known what starts touch."""
    digest = _digest(quiet)
    ready = bitmap.read(quiet.folder / "bitmap", bitmap.READY, digest, blocks.count)
    hot = bitmap.read(quiet.folder / "hot", bitmap.HOT, digest, blocks.count)
    found: list[int] = []
    if ready is None or hot is None or quiet.data_fd < 0:
        return found
    for block in range(blocks.count - 1, -1, -1):
        if need <= 0:
            break
        if ready[block] and not hot[block] and not blocks.is_zero(block):
            found.append(block)
            need -= blocks.length_of(block)
    return found


def drop_blocks(quiet: Quiet, blocks: BlockMap, which: Sequence[int]) -> int:
    """Give the space of these blocks back; returns how much the data file shrank on disk. Raises `OSError`: then they
    may be missing, but are not wrong."""
    digest = _digest(quiet)
    path = quiet.folder / "bitmap"
    flags = bitmap.read(path, bitmap.READY, digest, blocks.count)
    if flags is not None:
        for block in which:
            flags[block] = blocks.is_zero(block)
        faults.point("blocks.evict.before-bitmap")
        bitmap.replace(path, bitmap.encode(bitmap.READY, digest, flags), "blocks.evict.bitmap", final=True)
    faults.point("blocks.evict.before-punch")
    before = os.fstat(quiet.data_fd).st_blocks
    for first, last in _runs(which):
        _libc.punch_hole(quiet.data_fd, first << blocks.shift, (last - first + 1) << blocks.shift)
        faults.point("blocks.evict.punched")
    return max(0, before - os.fstat(quiet.data_fd).st_blocks) * 512


def remove_blocks(quiet: Quiet) -> None:
    """Delete the cache folder. Raises `OSError`: what is left is begun anew by who uses it."""
    (quiet.folder / "bitmap").unlink(missing_ok=True)
    bitmap.sync_folder(quiet.folder)
    faults.point("blocks.evict.bitmap-gone")
    for path in quiet.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)  # no part of a cache: something that was killed made it
        elif path.name != "lock":
            path.unlink()
            faults.point("blocks.evict.file-gone")
    # The lock last: who opened it before, and waits, sees that it is not in its place any more.
    (quiet.folder / "lock").unlink()
    faults.point("blocks.evict.lock-gone")
    quiet.folder.rmdir()


def remove_tree(folder: Path) -> bool:
    """Delete the small parts of a tree, unless they are used. Raises `OSError`."""
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


def sweep(quiet: Quiet) -> None:
    """Remove what killed processes left in a cache folder."""
    for path in quiet.folder.iterdir():
        if path.name in ("bitmap.tmp", "hot.tmp") or path.name.startswith(".hotpack-"):
            path.unlink()


def _digest(quiet: Quiet) -> bytes:
    return bytes.fromhex(quiet.folder.name)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Adjacent blocks as (first, last)."""
    run: tuple[int, int] | None = None
    for block in sorted(blocks):
        if run is not None and block == run[1] + 1:
            run = (run[0], block)
            continue
        if run is not None:
            yield run
        run = (block, block)
    if run is not None:
        yield run


def _open_elsewhere(path: Path) -> bool:
    """Whether a mount (or a process) has the file open."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return True
    return False
