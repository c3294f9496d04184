"""From a stored frame to the verified bytes of a block.

One frame per call: a batch of frames in one call (zstandard's ``multi_decompress_to_buffer``) takes no less CPU time
(``bench/engine.py``: decode, batch), as what the interpreter does per block is little beside zstd and BLAKE3.
"""

from __future__ import annotations

from bootseer.blocks._hash import Buffer
from bootseer.blocks._zstd import decompress
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.errors import DataError


def verified(blocks: BlockMap, block: int, frame: Buffer) -> bytes:
    """The bytes of ``block`` out of its frame. Raises `DataError` when they are not what the map says."""
    data = decompress(frame, blocks.length_of(block))
    if not blocks.matches(block, data):
        raise DataError("hash differs")
    return data
