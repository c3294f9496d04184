"""The hot pack: the blocks that starts of a job touch, in first-touch order, as one object to be read from end to end.

On disk and in the store: ``docs/internals/hotpack.md``. It is advice like the traces it is made from: every block is
checked against the block map, so a bad pack costs time and nothing else.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from bootseer import faults
from bootseer.blocks import _hash
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.formats.blockmap import BlockMap, frame_bound, little
from bootseer.blocks.publish.packs import compress
from bootseer.errors import DataError, from_os_error
from bootseer.store import ObjectInfo, Store

log = logging.getLogger(__name__)

MAGIC = b"BSHOTPCK"
VERSION = 2
MAX_BLOCKS = 1 << 20
"""Bounds the index to 8 MiB; 64 GiB of hot blocks of 64 KiB."""

MAX_FRAME = 4 << 20
"""Bytes of the blocks of one frame that readers accept: every fetching thread may hold that much more."""

_HEADER = struct.Struct("<8sHHIQ32s32sQI20x")
_ENTRY_V1 = struct.Struct("<II")
_NUMBER = 4
_FRAME = 1 << 20
"""Bytes of blocks: neighbours in time are of one kind, often of one file. What this and the level save, and what they
cost: ``bench/hotpack.py``, and the table in ``docs/internals/hotpack.md``."""
_LEVEL = 12
_QUICK_LEVEL = 3
"""Once somebody waits for the end."""
_DRIFT = 3600 * 10**9
"""Clocks may differ by this; a pack from a later time has no time: it would be the newest for ever."""
_SHARE = 0.25
"""Of a core. A low priority would be simpler, but a thread that does not run while
it holds the interpreter's lock holds up the readers of this process."""


class HotPack(msgspec.Struct, frozen=True):
    """Header and index of a hot pack: ``blocks`` in first-touch order and the lengths of their frames.

    Each frame has the bytes of the next ``per_frame`` blocks (the last frame: of those that are left). ``tree`` and
    ``map`` (hexadecimal) say what it fits, ``created`` is Unix time in nanoseconds. The frames follow one another from
    byte `base` on. Encoded as ``version``; that of version 1 has one block per frame.
    """

    tree: str
    map: str
    created: int
    block_size: int
    blocks: array[int]
    lengths: array[int]
    per_frame: int = 1
    version: int = VERSION

    @property
    def base(self) -> int:
        return index_size(len(self.blocks), self.per_frame, self.version)

    @property
    def size(self) -> int:
        """Bytes of the whole object."""
        return self.base + sum(self.lengths)

    def encode(self) -> bytes:
        """Header and index, sealed."""
        head = _HEADER.pack(
            MAGIC,
            self.version,
            0,
            self.block_size,
            len(self.blocks),
            bytes.fromhex(self.tree),
            bytes.fromhex(self.map),
            self.created,
            self.per_frame if self.version > 1 else 0,
        )
        if self.version == 1:
            index = b"".join(_ENTRY_V1.pack(*entry) for entry in zip(self.blocks, self.lengths, strict=True))
        else:
            index = little(self.blocks).tobytes() + little(self.lengths).tobytes()
        body = head + index
        return body + _hash.digest(body)

    @classmethod
    def decode(cls, raw: bytes, size: int, tree: str, map_digest: str, blocks: BlockMap) -> HotPack:
        """Parse the beginning ``raw`` (at least header and index) of an object of ``size`` bytes.

        Raises `DataError` for one that does not fit this tree and map, names a block twice, or is cut short.
        """
        count, per_frame, version = shape_of(raw)
        end = index_size(count, per_frame, version) - _hash.SIZE
        if len(raw) < end + _hash.SIZE:
            raise DataError("bad hot pack: its index is cut off")
        if _hash.digest(memoryview(raw)[:end]) != raw[end : end + _hash.SIZE]:
            raise DataError("bad hot pack: checksum of the index differs")
        _, _, flags, block_size, _, of_tree, of_map, created, _ = _HEADER.unpack_from(raw)
        if flags or any(raw[_HEADER.size - (20 if version > 1 else 24) : _HEADER.size]):
            raise DataError("bad hot pack: reserved bytes are not zero")
        if (of_tree.hex(), of_map.hex(), block_size) != (tree, map_digest, blocks.block_size):
            raise DataError("bad hot pack: it is of another tree")
        if per_frame > 1 and per_frame * block_size > MAX_FRAME:
            raise DataError(f"bad hot pack: {per_frame} blocks in a frame")
        numbers, lengths = _columns(raw[_HEADER.size : end], count, version)
        seen = bytearray(blocks.count)
        for entry, block in enumerate(numbers):
            if block >= blocks.count or blocks.is_zero(block) or seen[block]:
                raise DataError(f"bad hot pack: entry {entry} is not possible")
            seen[block] = 1
        bound = frame_bound(per_frame * block_size)
        if lengths and not 0 < min(lengths) <= max(lengths) <= bound:
            raise DataError("bad hot pack: the length of a frame is not possible")
        self = cls(tree, map_digest, created, block_size, numbers, lengths, per_frame, version)
        if self.size != size:
            raise DataError(f"bad hot pack: {size} bytes, its index says {self.size}")
        return self


def _columns(index: bytes, count: int, version: int) -> tuple[array[int], array[int]]:
    """Block numbers and lengths of frames out of the index."""
    if version == 1:
        rows = array("I", index)
        return little(rows[::2]), little(rows[1::2])
    return little(array("I", index[: count * _NUMBER])), little(array("I", index[count * _NUMBER :]))


def index_size(count: int, per_frame: int, version: int = VERSION) -> int:
    """Bytes of header and index of ``count`` blocks, ``per_frame`` to a frame."""
    entries = count * _ENTRY_V1.size if version == 1 else (count + -(-count // per_frame)) * _NUMBER
    return _HEADER.size + entries + _hash.SIZE


def shape_of(raw: bytes) -> tuple[int, int, int]:
    """What the header at the start of ``raw`` announces: blocks, blocks per frame, version. Raises `DataError`."""
    if len(raw) < _HEADER.size:
        raise DataError(f"bad hot pack: only {len(raw)} bytes")
    magic, version, _, _, count, _, _, _, per_frame = _HEADER.unpack_from(raw)
    if magic != MAGIC or version not in (1, VERSION):
        raise DataError("bad hot pack: not one of a known version")
    if count > MAX_BLOCKS:
        raise DataError(f"bad hot pack: {count} blocks")
    if version == 1:
        return int(count), 1, 1
    if not 0 < per_frame <= MAX_BLOCKS:
        raise DataError(f"bad hot pack: {per_frame} blocks in a frame")
    return int(count), int(per_frame), int(version)


# -- making one ----------------------------------------------------------------------------------------------------


class Ready(Protocol):
    """Where blocks are read from: a `bootseer.blocks.cache.blockfile.CacheFile`."""

    @property
    def map(self) -> BlockMap: ...

    def is_ready(self, first: int, last: int) -> bool: ...

    def read(self, offset: int, length: int) -> bytes: ...


def build(
    cache: Ready,
    order: Iterable[int],
    path: Path,
    *,
    tree: str,
    map_digest: str,
    created: int,
    stop: threading.Event | None = None,
    hurry: threading.Event | None = None,
    share: float = _SHARE,
) -> HotPack | None:
    """Write the hot pack of those blocks of ``order`` that ``cache`` has to ``path`` (a new file).

    Works on one frame at a time and rests in between, so that it takes ``share`` of one core, until ``hurry`` is set:
    from then on without rests, and with less compression. Within a frame blocks are in the order of the file: they come
    at once anyway, and neighbours are written at once. Returns None when ``stop`` is set or no block is there. On None
    and on any error there is no file. Raises `DataError` when the cache has a block that is not what the map says,
    `FullError` and kin.
    """
    blocks = cache.map
    wanted = [block for block in dict.fromkeys(order) if not blocks.is_zero(block) and cache.is_ready(block, block)]
    wanted = wanted[:MAX_BLOCKS]
    per_frame = max(1, _FRAME >> blocks.shift)
    groups = [sorted(wanted[at : at + per_frame]) for at in range(0, len(wanted), per_frame)]
    lengths = array("I")
    made = False
    stop, hurry = stop or threading.Event(), hurry or threading.Event()
    try:
        with open(path, "xb") as out:
            out.seek(index_size(len(wanted), per_frame))
            for group in groups:
                began = time.monotonic()
                frame = _frame(cache, group, _QUICK_LEVEL if hurry.is_set() else _LEVEL)
                out.write(frame)
                lengths.append(len(frame))
                if stop.is_set() or (hurry.wait((time.monotonic() - began) * (1 / share - 1)) and stop.is_set()):
                    break
            else:
                numbers = array("I", [block for group in groups for block in group])
                pack = HotPack(tree, map_digest, created, blocks.block_size, numbers, lengths, per_frame)
                out.seek(0)
                out.write(pack.encode())
                made = bool(wanted)
    except OSError as exc:
        raise from_os_error(exc, f"write a hot pack to {path}") from exc
    finally:
        if not made:
            path.unlink(missing_ok=True)
    return pack if made else None


def _frame(cache: Ready, group: Sequence[int], level: int) -> bytes:
    blocks = cache.map
    parts = []
    for block in group:
        faults.point("blocks.hotpack.block")
        data = cache.read(block << blocks.shift, blocks.length_of(block))
        if not blocks.matches(block, data):
            raise DataError(f"block {block} in the cache is damaged")
        parts.append(data)
    return compress(b"".join(parts), level)


def publish(store: Store, folder: str, path: Path, pack: HotPack) -> str:
    """Put the hot pack at ``path`` into the store folder ``profiles/<tree>/<job>``, then remove older ones of it.

    Who reads an older one sees it vanish, and goes on with the packs. Returns the key.
    """
    digest = _hash.file_hexdigest(path)
    key = f"{folder}/hot-{digest}.pack"
    faults.point("blocks.hotpack.before-publish")
    store.put(key, path)
    faults.point("blocks.hotpack.before-retire")
    left = set()
    for info in packs_in(store, folder):
        created = _created(store, info) if info.key != key else None
        if created is not None and (created, info.key) < (pack.created, key):
            store.delete(info.key)
        else:
            left.add(info.key)
    for info in store.list(folder):
        if info.key.endswith(".pages") and f"{info.key.rsplit('.', 2)[0]}.pack" not in left:
            store.delete(info.key)
    return key


def pages_key(key: str, driver: str) -> str:
    """The store key of the page list of ``driver`` that belongs to the hot pack ``key``; see
    `bootseer.blocks.formats.pagelist`."""
    return f"{key.removesuffix('.pack')}.{driver}.pages"


def _created(store: Store, info: ObjectInfo) -> int:
    """When the pack was made; a damaged one or one from the future is the oldest. Raises `UnavailableError`."""
    source = StoreSource(store, info.key)
    try:
        raw = source.read(0, 0, min(info.size, _HEADER.size))
        shape_of(raw)
        return made_at(int(_HEADER.unpack_from(raw)[7]))
    except DataError:
        return -1
    finally:
        source.close()


def made_at(created: int) -> int:
    """When a pack was made that says ``created``; one from the future is the oldest."""
    return created if created <= time.time_ns() + _DRIFT else -1


def packs_in(store: Store, folder: str) -> Iterator[ObjectInfo]:
    """The hot packs in the store folder ``profiles/<tree>/<job>``, as the store lists them."""
    for info in store.list(folder):
        name = info.key.rpartition("/")[2]
        if name.startswith("hot-") and name.endswith(".pack"):
            yield info
