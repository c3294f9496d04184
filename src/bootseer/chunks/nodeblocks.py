"""Blocks of a tree that other folders of the node cache have: an earlier build of an image has most of the next one.

Known by their hash in the block maps, as in the dedup of a store: trees whose maps name a pack in common are looked at,
the one with most of them first. Nothing there is believed: bytes are compared with the hash in the map that wants them,
and what is not right, or gone by then, comes from the store. Trust and limits: ``docs/internals/nodecache.md``."""

from __future__ import annotations

import errno
import logging
import os
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress, groupby, repeat
from pathlib import Path

from bootseer.chunks import bitmap, hashing
from bootseer.chunks.bitmap import Ready
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.frames import Run
from bootseer.chunks.locks import DATA, READING
from bootseer.chunks.manifest import MAX_MANIFEST, TreeManifest
from bootseer.errors import BootseerError
from bootseer.kernel import beneath
from bootseer.ranges import runs

log = logging.getLogger(__name__)

_MOST = 8
_MAP_BYTES = 32 << 20
"""Maps that are looked at, and their bytes in all: as much as the dedup of a store looks at."""
_HEAD_BYTES = 256 << 10
"""Of a map, in which thousands of packs have room."""
_TREES = 256
"""Trees of the node cache of which the packs are looked at."""
_PATIENCE = 1.0
"""Seconds that a collection of this process is waited for."""
_FLIPPED = bytes.maketrans(b"\0\1", b"\1\0")
_PLACE = 32
"""Bits of the block number in a place."""


class NodeBlocks:
    """Where blocks of ``map`` lie in other folders of the node cache ``cache_dir``. ``here`` has one byte per block, 1
    where one may be read; it does not change after `find`. For many threads."""

    def __init__(self, cache_dir: Path, blocks: BlockMap) -> None:
        self.map = blocks
        self.here = bytearray(blocks.count)
        self._cache_dir = cache_dir
        self._folders: list[str] = []
        self._places = array("q", bytes(8 * blocks.count))

    @classmethod
    def find(cls, cache: Path, blocks: BlockMap, ready: Ready) -> NodeBlocks:
        """Those that are not ``ready`` of the tree whose cache folder is ``cache``; bounded in maps and bytes. What
        cannot be read is left out."""
        self = cls(cache.parent.parent, blocks)
        missing = bytearray(ready[:].translate(_FLIPPED))
        try:
            with beneath.folder(self._cache_dir) as root:
                left = _MAP_BYTES
                for digest, manifest in self._kin(root, cache.name)[:_MOST]:
                    if not any(missing):
                        break
                    if manifest.map.size <= left:
                        left -= manifest.map.size
                        self._add(root, digest, manifest, missing)
        except OSError as exc:
            log.info("blocks that this node has are not looked for: %s", exc)
        if found := self.here.count(1):
            log.info("%d blocks lie in %d other folders of the node cache", found, len(self._folders))
        return self

    def _kin(self, root: int, own: str) -> list[tuple[str, TreeManifest]]:
        """The trees here whose maps name a pack of this one, those with most of its blocks first."""
        weights = {self.map.packs[number].digest: count for number, count in Counter(self.map.pack_of).items()}
        found: list[tuple[int, str, TreeManifest]] = []
        with beneath.folder("trees", root=root) as folder:
            names = sorted(filter(hashing.is_hexdigest, os.listdir(folder)))
        for digest in names[:_TREES]:
            try:
                raw = beneath.read_regular(f"trees/{digest}/manifest.json", MAX_MANIFEST, root=root)
                manifest = TreeManifest.decode(raw, digest)
                if manifest.map.digest == own or any(manifest.map.digest == one.map.digest for *_, one in found):
                    continue
                with open(beneath.open_regular(f"trees/{digest}/map", root=root), "rb", buffering=0) as file:
                    packs = BlockMap.packs_of(file.read(_HEAD_BYTES))
            except (OSError, BootseerError):
                continue
            if weight := sum(weights.get(pack.digest, 0) for pack in packs):
                found.append((weight, digest, manifest))
        return [(digest, manifest) for _, digest, manifest in sorted(found, key=lambda one: (-one[0], one[1]))]

    def _add(self, root: int, digest: str, manifest: TreeManifest, missing: bytearray) -> None:
        name = manifest.map.digest
        try:
            raw = beneath.read_regular(f"trees/{digest}/map", manifest.map.size, root=root)
            if hashing.hexdigest(raw) != name:
                return
            blocks = BlockMap.decode(raw)
            flags = beneath.read_regular(f"blocks/{name}/bitmap", manifest.map.size, root=root)
        except (OSError, BootseerError):
            return
        ready = bitmap.decode(flags, bitmap.READY, bytes.fromhex(name), blocks.count)
        if ready is None or blocks.block_size != self.map.block_size:
            return
        # Only calls that loop in C, but for the blocks that were found: a start waits for this.
        at = range(len(self._folders) << _PLACE, (len(self._folders) << _PLACE) + blocks.count)
        known = dict(zip(compress(_split(blocks.hashes), ready), compress(at, ready), strict=True))
        places = map(known.get, compress(_split(self.map.hashes), missing), repeat(-1))
        for block, place in zip(list(compress(range(self.map.count), missing)), places, strict=True):
            if place >= 0:
                self._places[block] = place
                self.here[block], missing[block] = 1, 0
        self._folders.append(name)

    def read(self, blocks: Sequence[int]) -> Iterator[Run]:
        """Those of ``blocks`` that are right where they lie, neighbours of a folder as one run; what is missing there,
        or is not what the map says, is left out."""
        for first, count in runs(blocks):
            for _, some in groupby(range(first, first + count), lambda block: self._places[block] - block):
                run = list(some)
                folder = self._places[run[0]] >> _PLACE
                if not self._folders[folder]:
                    continue
                try:
                    data = memoryview(self._bytes(run))
                except BlockingIOError:  # it is being tidied in this moment
                    continue
                except TimeoutError:  # this process makes room, which may take long
                    return
                except OSError as exc:
                    log.info("%s of the node cache is not read any more: %s", self._folders[folder][:12], exc.strerror)
                    self._folders[folder] = ""
                    continue
                yield from self._right(run, data)

    def _bytes(self, run: Sequence[int]) -> bytes:
        """Of neighbours. The file is open only for this: an open one counts as used, and is not evicted."""
        folder, block = divmod(self._places[run[0]], 1 << _PLACE)
        length = sum(map(self.map.length_of, run))
        if not READING.acquire(timeout=_PATIENCE):
            raise TimeoutError
        try:
            with beneath.folder(self._cache_dir) as root:
                fd = beneath.open_regular(f"blocks/{self._folders[folder]}/{DATA}", root=root)
            with open(fd, "rb", buffering=0) as file:
                if os.fstat(fd).st_uid != os.geteuid():
                    raise PermissionError(errno.EPERM, "it is somebody else's")
                return os.pread(file.fileno(), length, block << self.map.shift)
        finally:
            READING.release()

    def _right(self, run: Sequence[int], data: memoryview) -> Iterator[Run]:
        at = 0
        good: list[bool] = []
        for block in run:
            end = at + self.map.length_of(block)
            good.append(self.map.matches(block, data[at:end]))
            at = end
        for right, some in groupby(range(len(run)), good.__getitem__):
            if right:
                which = list(some)
                start = which[0] << self.map.shift
                yield run[which[0]], len(which), data[start : start + (len(which) << self.map.shift)]
            else:
                bad = list(some)
                log.warning("blocks %d..%d are damaged where this node had them", run[bad[0]], run[bad[-1]])


def _split(hashes: bytes) -> Iterator[bytes]:
    return (one for (one,) in struct.iter_unpack(f"{hashing.SIZE}s", hashes))
