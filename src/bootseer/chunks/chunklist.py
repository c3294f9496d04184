"""The chunk list: place, size and checksums of one striped file, by which its cached chunks are known and checked. On
disk: ``docs/internals/blockmap.md``, "Cache folder". For a cache folder it is what a block map is for one of a tree."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable

from bootseer.chunks import hashing
from bootseer.chunks.blockmap import MAX_SIZE, little
from bootseer.errors import DataError

_MAGIC = b"BSCHUNKS"
_VERSION = 2
_HEADER = struct.Struct("<8sII32sQQ")
_NAME = 32
_MAX_CHUNK = 64 << 20


class ChunkList:
    """``count`` chunks of ``block_size`` bytes (the last may be shorter) of the striped file of ``size`` bytes that
    ``name`` names (32 bytes, a digest of where it is), with the CRC-32C of each. Immutable."""

    __slots__ = ("block_size", "count", "crcs", "name", "size", "zeros")

    def __init__(self, name: bytes, size: int, block_size: int, crcs: Iterable[int]) -> None:
        """Raises `DataError` for what contradicts itself."""
        if len(name) != _NAME or not 0 <= size <= MAX_SIZE or not 4096 <= block_size <= _MAX_CHUNK or block_size % 4096:
            raise DataError(f"bad chunk list: {size} bytes in chunks of {block_size}")
        self.name, self.size, self.block_size = name, size, block_size
        self.crcs = array("I", crcs)
        self.count = -(-size // block_size)
        self.zeros: tuple[int, ...] = ()
        """No chunk is a hole: all are stored."""
        if len(self.crcs) != self.count:
            raise DataError(f"bad chunk list: {len(self.crcs)} checksums for {self.count} chunks")

    def length_of(self, block: int) -> int:
        return min(self.block_size, self.size - block * self.block_size)

    def is_zero(self, block: int) -> bool:
        return False

    def matches(self, block: int, data: hashing.Buffer) -> bool:
        """Whether ``data`` has the length and the checksum of chunk ``block``."""
        from crc32c import crc32c  # takes 20 ms to load; blocks of images need none

        return len(data) == self.length_of(block) and crc32c(data) == self.crcs[block]

    def encode(self) -> bytes:
        head = _HEADER.pack(_MAGIC, _VERSION, 0, self.name, self.size, self.block_size)
        body = head + little(self.crcs).tobytes()
        return body + hashing.digest(body)

    @classmethod
    def decode(cls, raw: bytes) -> ChunkList:
        """Raises `DataError` for anything that `encode` would not write."""
        body = raw[: -hashing.SIZE]
        if len(body) < _HEADER.size or raw[:8] != _MAGIC:
            raise DataError("bad chunk list: not a chunk list")
        _, version, zero, name, size, block_size = _HEADER.unpack_from(raw)
        if version != _VERSION:
            raise DataError(f"bad chunk list: version {version} is not known, the newest is {_VERSION}")
        if zero or (len(body) - _HEADER.size) % 4 or hashing.digest(body) != raw[-hashing.SIZE :]:
            raise DataError("bad chunk list: checksum, length or reserved bytes")
        crcs: array[int] = array("I")
        crcs.frombytes(body[_HEADER.size :])
        return cls(name, size, block_size, little(crcs))
