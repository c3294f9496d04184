"""The block map: where each block of a data file lies in the stored blob, and what its bytes must hash to.

On disk: ``docs/internals/blockmap.md``. A map in memory is immutable and may be used from any thread.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Sequence

from bootseer.blocks import _hash
from bootseer.errors import DataError

MAGIC = b"BSBLKMAP"
VERSION = 1
HASH_BLAKE3 = 1
CODEC_ZSTD = 1
MIN_BLOCK = 4 << 10
MAX_BLOCK = 16 << 20
DEFAULT_BLOCK = 256 << 10
"""Measured on a torch start: 256 KiB moves 1.45x the touched bytes with 2.5x fewer requests than 64 KiB."""
MAX_SIZE = 1 << 50

_HEADER = struct.Struct("<8sHHHHIIQQQ16x")
_ENTRY = struct.Struct("<32sQI")


@functools.lru_cache(maxsize=8)
def _zero_hash(length: int) -> bytes:
    return _hash.digest(bytes(length))


def frame_bound(length: int) -> int:
    """The largest zstd frame accepted for ``length`` bytes (zstd's own bound, rounded up)."""
    return length + (length >> 8) + 1024


class BlockMap:
    """``count`` blocks of ``block_size`` bytes (the last may be shorter) of a data file of ``size`` bytes.

    ``offsets[i]``/``lengths[i]`` place block ``i``'s zstd frame in a stored blob of ``stored_size`` bytes; length 0
    says that the block is all zero and has no frame. ``hashes[i]`` is the BLAKE3-256 of the uncompressed block.
    """

    __slots__ = ("block_size", "count", "hashes", "lengths", "offsets", "shift", "size", "stored_size")

    def __init__(
        self,
        block_size: int,
        size: int,
        stored_size: int,
        hashes: Sequence[bytes],
        offsets: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        if not MIN_BLOCK <= block_size <= MAX_BLOCK or block_size & (block_size - 1):
            raise DataError(f"bad block map: block size {block_size}")
        if not 0 <= size <= MAX_SIZE or not 0 <= stored_size <= MAX_SIZE:
            raise DataError(f"bad block map: sizes {size} and {stored_size}")
        self.block_size = block_size
        self.shift = block_size.bit_length() - 1
        self.size = size
        self.stored_size = stored_size
        self.count = -(-size // block_size)
        self.hashes = tuple(hashes)
        self.offsets = array("Q", offsets)
        self.lengths = array("I", lengths)
        if not len(self.hashes) == len(self.offsets) == len(self.lengths) == self.count:
            raise DataError(f"bad block map: {len(self.hashes)} entries for {self.count} blocks")
        self._check()

    def _check(self) -> None:
        for block, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            if length == 0:
                if offset or self.hashes[block] != _zero_hash(self.length_of(block)):
                    raise DataError(f"bad block map: block {block} has no frame but is not all zero")
            elif length > frame_bound(self.block_size) or offset + length > self.stored_size:
                raise DataError(f"bad block map: block {block} lies outside of its blob")

    def length_of(self, block: int) -> int:
        """Uncompressed bytes of ``block``."""
        return min(self.block_size, self.size - (block << self.shift))

    def is_zero(self, block: int) -> bool:
        return self.lengths[block] == 0

    def matches(self, block: int, data: _hash.Buffer) -> bool:
        """Whether ``data`` is exactly block ``block``."""
        return len(data) == self.length_of(block) and _hash.digest(data) == self.hashes[block]

    def encode(self) -> bytes:
        header = _HEADER.pack(
            MAGIC, VERSION, HASH_BLAKE3, CODEC_ZSTD, 0, self.block_size, 0, self.size, self.stored_size, self.count
        )
        pack = _ENTRY.pack
        body = b"".join(
            [header, *(pack(h, o, n) for h, o, n in zip(self.hashes, self.offsets, self.lengths, strict=True))]
        )
        return body + _hash.digest(body)

    @classmethod
    def decode(cls, raw: bytes) -> BlockMap:
        """Parse ``raw``. Raises `DataError` for anything that `encode` would not write."""
        if len(raw) < _HEADER.size + _hash.SIZE:
            raise DataError(f"bad block map: only {len(raw)} bytes")
        magic, version, algorithm, codec, zero1, block_size, zero2, size, stored, count = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise DataError("bad block map: not a block map")
        if version != VERSION:
            raise DataError(f"bad block map: version {version} is not known", hint="use a newer bootseer")
        if algorithm != HASH_BLAKE3 or codec != CODEC_ZSTD:
            raise DataError(f"bad block map: hash {algorithm} or codec {codec} is not known")
        # The length first: it bounds `count` by bytes that are really there, before anything is allocated from it.
        end = len(raw) - _hash.SIZE
        if _HEADER.size + count * _ENTRY.size != end:
            raise DataError(f"bad block map: {len(raw)} bytes for {count} blocks")
        if zero1 or zero2 or any(raw[48 : _HEADER.size]):
            raise DataError("bad block map: reserved bytes are not zero")
        if _hash.digest(memoryview(raw)[:end]) != raw[end:]:
            raise DataError("bad block map: checksum differs")
        hashes: list[bytes] = []
        offsets = array("Q")
        lengths = array("I")
        for digest, offset, length in _ENTRY.iter_unpack(memoryview(raw)[_HEADER.size : end]):
            hashes.append(digest)
            offsets.append(offset)
            lengths.append(length)
        return cls(block_size, size, stored, hashes, offsets, lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMap) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash((self.size, self.stored_size, self.hashes))
