"""A whole file from start to end, for who copies it or computes its digest: the next pieces come while one is used.

Two reads are under way at a time, so that the storage has something to do also while one of them comes to its end.

Concurrency: two threads read, the caller uses what they read before; they end with the iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from bootseer.stripefs.read import ChunkFile

PIECE = 16 << 20
"""Bytes read at once; three such buffers are in use."""
_AHEAD = 2


def in_order(file: ChunkFile, *, piece: int = PIECE) -> Iterator[memoryview]:
    """All bytes of ``file``, at most ``piece`` at a time. Each view is good until the next one is asked for.

    Errors as of `ChunkFile.readinto`. To be used up or closed: until then at most two pieces more are read.
    """
    if file.size <= piece:
        if file.size:
            whole = memoryview(bytearray(file.size))
            file.readinto(0, whole)
            yield whole
        return
    buffers = [memoryview(bytearray(piece)) for _ in range(_AHEAD + 1)]
    count = -(-file.size // piece)
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="bootseer-inorder") as pool:

        def view(number: int) -> memoryview:
            return buffers[number % len(buffers)][: min(piece, file.size - number * piece)]

        def fetch(number: int) -> Future[None]:
            return pool.submit(file.readinto, number * piece, view(number))

        coming = deque(fetch(number) for number in range(min(_AHEAD, count)))
        for number in range(count):
            coming.popleft().result()  # the read has its own deadlines
            if number + _AHEAD < count:
                coming.append(fetch(number + _AHEAD))
            yield view(number)
