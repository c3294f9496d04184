"""A whole file from start to end, for who copies it or computes its digest: the next piece comes while one is used.

Concurrency: one thread reads, the caller uses what it read before; it ends with the iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from bootseer.stripefs.read import ChunkFile

PIECE = 16 << 20
"""Bytes read at once; two such buffers are in use."""


def in_order(file: ChunkFile, *, piece: int = PIECE) -> Iterator[memoryview]:
    """All bytes of ``file``, at most ``piece`` at a time. Each view is good until the next one is asked for.

    Errors as of `ChunkFile.readinto`. To be used up or closed: until then its thread reads at most one piece more.
    """
    if file.size <= piece:
        if file.size:
            whole = memoryview(bytearray(file.size))
            file.readinto(0, whole)
            yield whole
        return
    buffers = [memoryview(bytearray(piece)) for _ in range(2)]
    with ThreadPoolExecutor(1, thread_name_prefix="bootseer-inorder") as pool:

        def fetch(number: int) -> Future[None]:
            return pool.submit(file.readinto, number * piece, view(number))

        def view(number: int) -> memoryview:
            return buffers[number % 2][: min(piece, file.size - number * piece)]

        last = -(-file.size // piece) - 1
        coming = fetch(0)
        for number in range(last + 1):
            coming.result()  # the read has its own deadlines
            if number < last:
                coming = fetch(number + 1)
            yield view(number)
