"""The hot pack: the blocks that starts of a job touch, in first-touch order, as one object to be read from end to end
(``docs/internals/hotpack.md``). It is advice: every block is checked against the block map, so a bad pack costs time
and nothing else."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Container

import msgspec

from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, frame_bound, little
from bootseer.errors import DataError

MAGIC = b"BSHOTPCK"
VERSION = 2
MAX_BLOCKS = 1 << 20
"""Bounds the index to 8 MiB; 64 GiB of hot blocks of 64 KiB."""

MAX_FRAME = 4 << 20
"""Bytes of the blocks of one frame that readers accept: every fetching thread may hold that much more."""

_HEADER = struct.Struct("<8sHHIQ32s32sQI20x")
HEADER_SIZE = _HEADER.size
"""Bytes at the start of a pack that `shape_of` and `age_of` look at."""
_NUMBER = 4
_DRIFT = 3600 * 10**9
"""Nanoseconds by which clocks may differ."""


class HotPack(msgspec.Struct, frozen=True):
    """Header and index of a hot pack: ``blocks`` in first-touch order and the lengths of their frames. Each frame has
    the bytes of the next ``per_frame`` blocks (the last frame: of those that are left). ``tree`` and ``map``
    (hexadecimal) say what it fits, ``created`` is Unix time in nanoseconds. Frames begin at byte `base`."""

    tree: str
    map: str
    created: int
    block_size: int
    blocks: array[int]
    lengths: array[int]
    per_frame: int = 1

    @property
    def base(self) -> int:
        return index_size(len(self.blocks), self.per_frame)

    @property
    def size(self) -> int:
        """Bytes of the whole object."""
        return self.base + sum(self.lengths)

    def encode(self) -> bytes:
        """Header and index, sealed."""
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            0,
            self.block_size,
            len(self.blocks),
            bytes.fromhex(self.tree),
            bytes.fromhex(self.map),
            self.created,
            self.per_frame,
        )
        body = head + little(self.blocks).tobytes() + little(self.lengths).tobytes()
        return body + hashing.digest(body)

    @classmethod
    def decode(cls, raw: bytes, size: int, tree: str, map_digest: str, blocks: BlockMap) -> HotPack:
        """Parse the beginning ``raw`` (at least header and index) of an object of ``size`` bytes. Raises `DataError`
        for one that does not fit this tree and map, names a block twice, or is cut short."""
        count, per_frame = shape_of(raw)
        end = index_size(count, per_frame) - hashing.SIZE
        if len(raw) < end + hashing.SIZE:
            raise DataError("bad hot pack: its index is cut off")
        if hashing.digest(memoryview(raw)[:end]) != raw[end : end + hashing.SIZE]:
            raise DataError("bad hot pack: checksum of the index differs")
        _, _, flags, block_size, _, of_tree, of_map, created, _ = _HEADER.unpack_from(raw)
        if flags or any(raw[_HEADER.size - 20 : _HEADER.size]):
            raise DataError("bad hot pack: reserved bytes are not zero")
        if (of_tree.hex(), of_map.hex(), block_size) != (tree, map_digest, blocks.block_size):
            raise DataError("bad hot pack: it is of another tree")
        if per_frame > 1 and per_frame * block_size > MAX_FRAME:
            raise DataError(f"bad hot pack: {per_frame} blocks in a frame")
        index = raw[_HEADER.size : end]
        numbers, lengths = (little(array("I", part)) for part in (index[: count * _NUMBER], index[count * _NUMBER :]))
        seen = bytearray(blocks.count)
        for entry, block in enumerate(numbers):
            if block >= blocks.count or blocks.is_zero(block) or seen[block]:
                raise DataError(f"bad hot pack: entry {entry} is not possible")
            seen[block] = 1
        bound = frame_bound(per_frame * block_size)
        if lengths and not 0 < min(lengths) <= max(lengths) <= bound:
            raise DataError("bad hot pack: the length of a frame is not possible")
        self = cls(tree, map_digest, created, block_size, numbers, lengths, per_frame)
        if self.size != size:
            raise DataError(f"bad hot pack: {size} bytes, its index says {self.size}")
        return self


def index_size(count: int, per_frame: int) -> int:
    """Bytes of header and index of ``count`` blocks, ``per_frame`` to a frame."""
    return _HEADER.size + (count + -(-count // per_frame)) * _NUMBER + hashing.SIZE


def shape_of(raw: bytes) -> tuple[int, int]:
    """What the header at the start of ``raw`` announces: blocks, blocks per frame. Raises `DataError`."""
    if len(raw) < _HEADER.size:
        raise DataError(f"bad hot pack: only {len(raw)} bytes")
    magic, version, _, _, count, _, _, _, per_frame = _HEADER.unpack_from(raw)
    if (magic, version) != (MAGIC, VERSION):
        raise DataError(f"bad hot pack: not one of version {VERSION}, the newest that is known")
    if count > MAX_BLOCKS:
        raise DataError(f"bad hot pack: {count} blocks")
    if not 0 < per_frame <= MAX_BLOCKS:
        raise DataError(f"bad hot pack: {per_frame} blocks in a frame")
    return int(count), int(per_frame)


def age_of(raw: bytes) -> int:
    """When the pack that begins with ``raw`` was made, as `age_order`. Raises `DataError`."""
    shape_of(raw)
    return age_order(int(_HEADER.unpack_from(raw)[7]))


def age_order(created: int) -> int:
    """Larger for a newer pack: when it was ``created``. One from the future counts as the oldest, as it would otherwise
    be the newest for ever."""
    return created if created <= time.time_ns() + _DRIFT else -1


def pack_key(folder: str, digest: str) -> str:
    """The store key of the hot pack whose bytes have this ``digest``, in the folder ``profiles/<tree>/<job>``."""
    return f"{folder}/hot-{digest}.pack"


def is_pack(key: str) -> bool:
    """Whether a store key names a hot pack."""
    name = key.rpartition("/")[2]
    return name.startswith("hot-") and name.endswith(".pack")


def pages_key(key: str) -> str:
    """The store key of the page list that belongs to the hot pack ``key``; see `bootseer.blocks.formats.pagelist`."""
    return f"{key.removesuffix('.pack')}.fuse.pages"


def is_pages_of(key: str, packs: Container[str]) -> bool:
    """Whether a store key names the page list of one of ``packs``."""
    return key.endswith(".fuse.pages") and f"{key.removesuffix('.fuse.pages')}.pack" in packs
