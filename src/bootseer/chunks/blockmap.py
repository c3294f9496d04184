"""The block map: where each block of a data file lies in the stored packs, and what its bytes must hash to. On disk:
``docs/internals/blockmap.md``. A map in memory is immutable and may be used from any thread."""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from bootseer.chunks import hashing
from bootseer.errors import DataError

MAGIC = b"BSBLKMAP"
VERSION = 2
HASH_BLAKE3 = 1
CODEC_ZSTD = 1
MIN_BLOCK = 4 << 10
MAX_BLOCK = 16 << 20
DEFAULT_BLOCK = 64 << 10
"""Measured on a torch start: it touches 701 MB of 4 KiB units, 833 MB of 64 KiB and 1,015 MB of 256 KiB blocks."""
MAX_SIZE = 1 << 50
MAX_PACKS = 1 << 16
MAX_ENCODED = 1 << 30
"""Bytes of a map that readers accept: 1.5 TB of data in 64 KiB blocks."""

_HEADER = struct.Struct("<8sHHHHIIQQQ16x")
_PACK = struct.Struct("<32sQ")
_ENTRY_SIZE = hashing.SIZE + 8 + 4 + 2


class ObjectRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored object by the BLAKE3 of its bytes."""

    digest: str
    size: int

    @property
    def key(self) -> str:
        return f"blobs/{self.digest[:2]}/{self.digest}"


@functools.lru_cache(maxsize=8)
def zero_hash(length: int) -> bytes:
    """The hash of ``length`` zero bytes."""
    return hashing.digest(bytes(length))


def frame_bound(length: int) -> int:
    """The largest zstd frame accepted for ``length`` bytes (zstd's own bound, rounded up)."""
    return length + (length >> 8) + 1024


def encoded_size(count: int, packs: int) -> int:
    """Bytes of the map of ``count`` blocks in ``packs`` packs."""
    return _HEADER.size + packs * _PACK.size + count * _ENTRY_SIZE + hashing.SIZE


class Blocks(Protocol):
    """What a cache file knows of its blocks: a `BlockMap`, or a `bootseer.chunks.chunklist.ChunkList`."""

    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def zeros(self) -> Sequence[int]:
        """The blocks for which `is_zero`: they are holes, and ready from the start."""
        ...

    def length_of(self, block: int) -> int: ...
    def is_zero(self, block: int) -> bool: ...
    def matches(self, block: int, data: hashing.Buffer) -> bool: ...


class BlockMap:
    """``count`` blocks of ``block_size`` bytes (the last may be shorter) of a data file of ``size`` bytes.

    ``offsets[i]``/``lengths[i]`` place block ``i``'s zstd frame, which several may share, in the stored object
    ``packs[pack_of[i]]``; length 0: all zero, no frame (``zeros``). ``hashes``: the BLAKE3-256 of the uncompressed
    blocks, one after another."""

    __slots__ = ("block_size", "count", "hashes", "lengths", "offsets", "pack_of", "packs", "shift", "size", "zeros")

    def __init__(
        self,
        block_size: int,
        size: int,
        packs: Iterable[ObjectRef],
        hashes: bytes | Iterable[bytes],
        offsets: Iterable[int],
        lengths: Iterable[int],
        pack_of: Iterable[int] | None = None,
    ) -> None:
        """``pack_of`` None: all frames lie in the first pack. Raises `DataError` for a map that contradicts itself."""
        if not MIN_BLOCK <= block_size <= MAX_BLOCK or block_size & (block_size - 1):
            raise DataError(f"bad block map: block size {block_size}")
        if not 0 <= size <= MAX_SIZE:
            raise DataError(f"bad block map: size {size}")
        self.block_size = block_size
        self.shift = block_size.bit_length() - 1
        self.size = size
        self.count = -(-size // block_size)
        self.packs = tuple(packs)
        self.hashes = hashes if isinstance(hashes, bytes) else b"".join(hashes)
        self.offsets = array("Q", offsets)
        self.lengths = array("I", lengths)
        self.pack_of = array("H", pack_of if pack_of is not None else bytes(2 * self.count))
        if (
            not len(self.hashes) // hashing.SIZE
            == len(self.offsets)
            == len(self.lengths)
            == self.count
            == len(self.pack_of)
        ):
            raise DataError(f"bad block map: {len(self.offsets)} entries for {self.count} blocks")
        self._check()

    def _check(self) -> None:
        self.zeros: Sequence[int] = ()
        sizes = [pack.size for pack in self.packs]
        if len(sizes) > MAX_PACKS:
            raise DataError(f"bad block map: {len(sizes)} packs are more than {MAX_PACKS}")
        if len({pack.digest for pack in self.packs}) != len(sizes):
            raise DataError("bad block map: a pack is listed twice")
        if any(not 0 <= size <= MAX_SIZE for size in sizes):
            raise DataError("bad block map: a pack of absurd size")
        if not self.count:
            return
        if max(self.lengths) > frame_bound(self.block_size):
            raise DataError("bad block map: a frame is longer than its block")
        # One loop over plain integers: every mount waits for it.
        last = len(sizes)
        zeros: list[int] = []
        for block, (pack, offset, length) in enumerate(zip(self.pack_of, self.offsets, self.lengths, strict=True)):
            if not length:
                zeros.append(block)
            elif pack >= last or offset + length > sizes[pack]:
                raise DataError(f"bad block map: block {block} lies outside of its pack")
        for block in zeros:
            if self.offsets[block] or self.pack_of[block] or self.hash_of(block) != zero_hash(self.length_of(block)):
                raise DataError(f"bad block map: block {block} has no frame but is not all zero")
        self.zeros = zeros

    def hash_of(self, block: int) -> bytes:
        """BLAKE3-256 of the uncompressed ``block``."""
        return self.hashes[block * hashing.SIZE : (block + 1) * hashing.SIZE]

    def length_of(self, block: int) -> int:
        """Uncompressed bytes of ``block``."""
        return min(self.block_size, self.size - (block << self.shift))

    def is_zero(self, block: int) -> bool:
        return self.lengths[block] == 0

    def matches(self, block: int, data: hashing.Buffer) -> bool:
        """Whether ``data`` is exactly block ``block``."""
        return len(data) == self.length_of(block) and hashing.digest(data) == self.hash_of(block)

    def encode(self) -> bytes:
        header = _HEADER.pack(
            MAGIC, VERSION, HASH_BLAKE3, CODEC_ZSTD, 0, self.block_size, len(self.packs), self.size, 0, self.count
        )
        table = b"".join(_PACK.pack(bytes.fromhex(pack.digest), pack.size) for pack in self.packs)
        columns = (little(column).tobytes() for column in (self.offsets, self.lengths, self.pack_of))
        body = b"".join((header, table, self.hashes, *columns))
        return body + hashing.digest(body)

    @classmethod
    def packs_of(cls, raw: bytes) -> list[ObjectRef]:
        """The packs of the map that is stored as ``raw``, whose hash was compared. Raises `DataError`."""
        if len(raw) < _HEADER.size or raw[:8] != MAGIC:
            raise DataError("bad block map: not a block map")
        _, version, *_, packs, _, _, _ = _HEADER.unpack_from(raw)
        if version != VERSION or len(raw) < (end := _HEADER.size + packs * _PACK.size):
            raise DataError(f"bad block map: version {version}, {len(raw)} bytes for {packs} packs")
        return [ObjectRef(digest.hex(), size) for digest, size in _PACK.iter_unpack(raw[_HEADER.size : end])]

    @classmethod
    def decode(cls, raw: bytes) -> BlockMap:
        """Parse ``raw``. Raises `DataError` for anything that `encode` would not write."""
        if len(raw) < _HEADER.size + hashing.SIZE:
            raise DataError(f"bad block map: only {len(raw)} bytes")
        magic, version, algorithm, codec, zero, block_size, packs, size, reserved, count = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise DataError("bad block map: not a block map")
        if version != VERSION:
            raise DataError(f"bad block map: version {version} is not known, the newest is {VERSION}")
        if algorithm != HASH_BLAKE3 or codec != CODEC_ZSTD:
            raise DataError(f"bad block map: hash {algorithm} or codec {codec} is not known")
        # The length first: it bounds the counts by bytes that are really there, before anything is made from them.
        end = len(raw) - hashing.SIZE
        if _HEADER.size + packs * _PACK.size + count * _ENTRY_SIZE != end:
            raise DataError(f"bad block map: {len(raw)} bytes for {count} blocks")
        if zero or reserved or any(raw[48 : _HEADER.size]):
            raise DataError("bad block map: reserved bytes are not zero")
        view = memoryview(raw)
        if hashing.digest(view[:end]) != raw[end:]:
            raise DataError("bad block map: checksum differs")
        at = _HEADER.size + packs * _PACK.size
        refs = [ObjectRef(digest.hex(), length) for digest, length in _PACK.iter_unpack(view[_HEADER.size : at])]
        columns: list[array[int]] = []
        hashes = raw[at : (at := at + count * hashing.SIZE)]
        for code in "QIH":
            column = array(code)
            column.frombytes(view[at : (at := at + count * column.itemsize)])
            columns.append(little(column))
        return cls(block_size, size, refs, hashes, *columns)


def little(column: array[int]) -> array[int]:
    """``column`` in the byte order of the file, or back from it."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column
