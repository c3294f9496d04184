"""Small lazy blobs for tests: random data with zero runs, packed into a folder store."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from bootseer.blocks.publish.packs import PackWriter
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.cachefile import CacheFile
from bootseer.objects.folder import FolderStore


@dataclass(frozen=True)
class LazyBlob:
    """Content, its map, and the store and key where its one pack lies ("" when it is all zero)."""

    content: bytes
    map: BlockMap
    store: FolderStore
    key: str

    def open_cache(self, folder: Path) -> CacheFile[BlockMap]:
        return CacheFile.open(folder, self.map, hashing.digest(self.map.encode()))


def content(size: int, *, seed: int = 1, block_size: int = 4096, zeros: float = 0.2) -> bytes:
    """``size`` bytes, the same for the same arguments: compressible blocks, incompressible ones and all-zero ones."""
    rand = random.Random(seed)
    parts = []
    for start in range(0, size, block_size):
        length = min(block_size, size - start)
        kind = rand.random()
        if kind < zeros:
            parts.append(bytes(length))
        elif kind < 0.6:
            parts.append((b"%d " % start * length)[:length])
        else:
            parts.append(rand.randbytes(length))
    return b"".join(parts)


def make(folder: Path, data: bytes, *, block_size: int = 4096) -> LazyBlob:
    """Pack ``data`` into a folder store below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    store = FolderStore(folder / "store")
    with PackWriter(folder, lambda path, ref: _put(store, path, ref), block_size=block_size) as out:
        out.write(data)
        packed = out.finish()
    return LazyBlob(data, packed.map, store, packed.map.packs[0].key if packed.map.packs else "")


def _put(store: FolderStore, path: Path, ref: ObjectRef) -> None:
    store.put(ref.key, path)
