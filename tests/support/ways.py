"""Ways to read a file: each goes another road through the kernel, and all must give the same bytes.

A way is called with an open file, the regions to read and a random generator, and yields (offset, bytes) piece by
piece. A piece shorter than asked for, in the middle of a file, is yielded as it came: the caller compares.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from random import Random

PIECE = 64 << 10

Region = tuple[int, int]
"""Offset and length in bytes."""
Pieces = Iterator[tuple[int, bytes]]
Way = Callable[[int, Sequence[Region], Random], Pieces]


def regions(fd: int, *, largest: int = 64 << 20, around: int = 70_000, samples: int = 16) -> list[Region]:
    """What to compare of the file ``fd``: all of it, or of one beyond ``largest`` bytes: its data as SEEK_DATA tells,
    ``around`` bytes more on each side, its end, and ``samples`` places anywhere."""
    size = os.fstat(fd).st_size
    if size <= largest:
        return [(0, size)] if size else []
    found: list[Region] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        at = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((max(0, start - around), min(size, at + around)))
    rand = Random(size)
    for start in [size - PIECE, *(rand.randrange(size) for _ in range(samples))]:
        found.append((max(0, start), min(size, start + PIECE)))
    return [(start, end - start) for start, end in found]


def _cut(some: Sequence[Region], length: Callable[[], int]) -> Iterator[Region]:
    for start, size in some:
        done = 0
        while done < size:
            piece = min(length(), size - done)
            yield start + done, piece
            done += piece


def _shuffled(some: Sequence[Region], rand: Random) -> list[Region]:
    """Pieces of any length, in any order."""
    pieces = list(_cut(some, lambda: rand.choice((1, 511, 4096, 5000, PIECE, 200_000))))
    if len(pieces) > 2000:  # bytes one by one
        pieces = list(_cut(some, lambda: PIECE))
    rand.shuffle(pieces)
    return pieces


def read(fd: int, some: Sequence[Region], rand: Random) -> Pieces:
    for start, length in _cut(some, lambda: PIECE):
        os.lseek(fd, start, os.SEEK_SET)
        yield start, os.read(fd, length)


def pread(fd: int, some: Sequence[Region], rand: Random) -> Pieces:
    for start, length in _shuffled(some, rand):
        yield start, os.pread(fd, length, start)


def mapped(fd: int, some: Sequence[Region], rand: Random) -> Pieces:
    """mmap(2); a read that fails is SIGBUS."""
    if not some:
        return
    with closing(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)) as memory:
        for start, length in _shuffled(some, rand):
            yield start, memory[start : start + length]


def sendfile(fd: int, some: Sequence[Region], rand: Random) -> Pieces:
    out = os.memfd_create("ways")
    try:
        for start, length in _shuffled(some, rand):
            os.ftruncate(out, 0)
            os.lseek(out, 0, os.SEEK_SET)
            done = 0
            while done < length and (more := os.sendfile(out, fd, start + done, length - done)):
                done += more
            yield start, os.pread(out, length, 0)
    finally:
        os.close(out)


def splice(fd: int, some: Sequence[Region], rand: Random) -> Pieces:
    source, sink = os.pipe()
    try:
        for start, length in _cut(some, lambda: PIECE // 2):
            data = b""
            while len(data) < length:
                moved = os.splice(fd, sink, length - len(data), offset_src=start + len(data))
                if not moved:
                    break
                data += os.read(source, moved)
            yield start, data
    finally:
        os.close(source)
        os.close(sink)


WAYS: dict[str, Way] = {"read": read, "pread": pread, "mmap": mapped, "sendfile": sendfile, "splice": splice}
