"""Reading a file of a tree that is complete on this node: through our mount, and plain EROFS over the same data."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.common.report import Run
from bootseer import config as settings
from bootseer.blocks import tree
from bootseer.errors import UnavailableError
from bootseer.kernel import mount as mounts

MIB = 1 << 20
_FILL_SECONDS = 600.0
_AT_LEAST = 512 * MIB
"""A small file is read in too short a time to be measured once."""


def sequential(path: Path) -> float:
    """MB/s of one reader with 1 MiB reads."""
    buffer = mmap.mmap(-1, MIB)
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        began = time.perf_counter()
        while file.readinto(buffer):
            pass
        seconds = time.perf_counter() - began
    buffer.close()
    return size / seconds / 1e6


def small(path: Path, count: int = 3000) -> float:
    """Microseconds per 4 KiB read at random places, each place once, without readahead."""
    rand = random.Random(9)
    units = path.stat().st_size // 4096
    places = rand.sample(range(units), min(count, units))
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        began = time.perf_counter()
        for place in places:
            os.pread(file.fileno(), 4096, place * 4096)
        return (time.perf_counter() - began) / len(places) * 1e6


def forget(path: Path) -> None:
    """Drop the file's pages; those of the data below it stay, so that the path is measured and not the disk."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def largest(root: Path) -> Path:
    """The largest file of at most 2 GiB, as a path relative to ``root``."""
    files = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    sizes = {path: path.lstat().st_size for path in files if not path.is_symlink()}
    return max((path for path in sizes if sizes[path] <= 2 << 30), key=lambda path: sizes[path]).relative_to(root)


@contextlib.contextmanager
def mounted(store: str, digest: str, work: Path, cache: Path) -> Iterator[tree.TreeMount]:
    """Our mount on ``work/target`` with the node cache ``cache``."""
    config = settings.load({"BOOTSEER_CACHE_DIR": str(cache), "BOOTSEER_STATE_DIR": str(work / "state")})
    made = tree.mount(
        store, digest, work / "target", cache_dir=cache, state_dir=work / "state", profile=None, config=config
    )
    try:
        yield made
    finally:
        made.unmount()


def fill(made: tree.TreeMount) -> None:
    """Wait until every block is on this node. Raises `UnavailableError` when it takes too long."""
    made.ready()
    end = time.monotonic() + _FILL_SECONDS
    while not made.status().complete:
        if time.monotonic() > end:
            raise UnavailableError(f"the tree was not complete within {_FILL_SECONDS:.0f} s")
        time.sleep(0.5)


def average(measure: Callable[[Path], float], path: Path) -> float:
    """The mean of ``measure`` over so many readings of ``path`` that they are 512 MiB together."""
    times = -(-_AT_LEAST // path.stat().st_size)
    results = []
    for _ in range(times):
        forget(path)
        results.append(measure(path))
    return sum(results) / times


def compare(variant: str, ours: Path, meta: Path, data: Path, work: Path, rounds: int) -> Iterator[Run]:
    """``rounds`` readings of one file through the mount ``ours`` and plain EROFS over the same bytes, by turns."""
    plain = work / "plain"
    plain.mkdir(parents=True, exist_ok=True)
    mounts.mount_erofs(meta, data, plain)
    try:
        name = largest(plain)
        for number in range(rounds + 1):
            for what, root in ((f"{variant}-plain", plain), (variant, ours)):
                path = root / name
                rate, each = average(sequential, path), average(small, path)
                if number:  # round 0 brings the data into the page cache
                    details = {"sequential_mb_per_s": round(rate, 1), "us_per_4k": round(each, 2), "file": str(name)}
                    yield Run(variant=what, n=number, seconds=round(each / 1e6, 9), details=details)
    finally:
        mounts.unmount(plain)
