"""From stored frames to the verified bytes of blocks."""

from __future__ import annotations

from collections.abc import Container, Sequence

from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.hashing import Buffer
from bootseer.chunks.zstd import decompress
from bootseer.errors import DataError

Run = tuple[int, int, Buffer]
"""First block, number of blocks, and the bytes of these neighbours."""


def verified(blocks: BlockMap, block: int, frame: Buffer) -> bytes:
    """The bytes of ``block`` out of its frame. Raises `DataError` when they are not what the map says."""
    data = decompress(frame, blocks.length_of(block))
    if not blocks.matches(block, data):
        raise DataError("hash differs")
    return data


def opened(
    blocks: BlockMap, inside: Sequence[int], wanted: Container[int], frame: Buffer
) -> tuple[list[Run], list[tuple[int, DataError]]]:
    """The verified bytes of those blocks in ``frame``, which has ``inside``, that are ``wanted``: neighbours in the
    frame that are neighbours in the file as one run. And those that are not what the map says, with the reason."""
    try:
        data = memoryview(decompress(frame, sum(map(blocks.length_of, inside))))
    except DataError as exc:
        return [], [(block, exc) for block in inside if block in wanted]
    runs: list[Run] = []
    bad: list[tuple[int, DataError]] = []
    at = start = first = count = 0  # the run so far: ``count`` blocks from ``first`` on, in the bytes ``start .. at``
    for block in inside:
        end = at + blocks.length_of(block)
        good = block in wanted and blocks.matches(block, data[at:end])
        if count and not (good and block == first + count):
            runs.append((first, count, data[start:at]))
            count = 0
        if good:
            if not count:
                first, start = block, at
            count += 1
        elif block in wanted:
            bad.append((block, DataError("hash differs")))
        at = end
    if count:
        runs.append((first, count, data[start:at]))
    return runs, bad
