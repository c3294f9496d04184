"""Publication of a tree: objects first, the manifest last, so that a tree in the store is always whole."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from bootseer import faults
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.packs import LEVEL, PackWriter, Progress
from bootseer.blocks.publish.spool import PACK_LIMIT
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import DEFAULT_BLOCK, MAX_ENCODED, BlockMap, ObjectRef
from bootseer.chunks.manifest import MAX_META, TreeManifest, TreeRef, meta_bound, tree_key
from bootseer.chunks.zstd import compress
from bootseer.errors import DataError, NotFoundError, doing
from bootseer.objects import Store, uses

log = logging.getLogger(__name__)

_PIECE = 4 << 20


class TreeWriter:
    """A tree on its way into a store: its data is written to ``packs``, then `seal` makes it a tree. A context manager,
    as `PackWriter` is; ``folder`` and the other arguments are passed on to that. What the store has of it already is
    read back, and replaced when it is damaged. Raises `NotWritableError`, `FullError`, `UnavailableError`, and
    `DataError` when that cannot be."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        block_size: int = DEFAULT_BLOCK,
        known: KnownBlocks | None = None,
        progress: Progress | None = None,
        pack_limit: int = PACK_LIMIT,
    ) -> None:
        """``progress(done, total)``, from any thread, counts bytes put and bytes that are ready to be put."""
        self._progress = progress
        self._lock = threading.Lock()
        self._put_bytes = self._ready_bytes = 0
        self._store = store
        self.packs = PackWriter(folder, self._keep, block_size=block_size, known=known, pack_limit=pack_limit)

    def __enter__(self) -> TreeWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.packs.close()

    def seal(
        self, meta: bytes, dead: Iterable[tuple[int, int]] = (), beside: Callable[[], None] = lambda: None
    ) -> TreeRef:
        """Publish what was written as the data of the EROFS image ``meta``. Data ranges ``dead`` are never read.
        ``beside`` is called while the last data is on its way. `DataError` for a tree that no reader would accept: more
        than 2 GiB of ``meta``, or far more than is stored of it, a map of more than 1 GiB."""
        if len(meta) > MAX_META:
            raise DataError(f"the tree is too large to be mounted: {len(meta)} bytes of metadata")
        objects: list[bytes] = [meta, stored := compress(meta, LEVEL)]
        if len(meta) > meta_bound(len(stored)):
            raise DataError(f"the tree cannot be mounted: {len(stored)} stored bytes are {len(meta)} of metadata")
        refs: list[ObjectRef] = []

        def put_metadata(made: BlockMap) -> None:
            objects.append(encoded := made.encode())
            if len(encoded) > MAX_ENCODED:
                raise DataError(f"the tree is too large to be mounted: its block map has {len(encoded)} bytes")
            refs.extend(ObjectRef(hashing.hexdigest(raw), len(raw)) for raw in objects)
            for raw, ref in [*zip(objects, refs, strict=True)][1:]:
                self._keep(raw, ref)
            beside()

        packed = self.packs.finish(dead, put_metadata)
        for pack in packed.foreign:
            self._store.keep(pack.key)
        faults.point("tree.publish.after-data")
        manifest = TreeManifest(meta=refs[0], meta_stored=refs[1], map=refs[2], data_size=packed.map.size).encode()
        digest = hashing.hexdigest(manifest)
        faults.point("tree.publish.before-manifest")
        _put(self._store, tree_key(digest), manifest, ObjectRef(digest, len(manifest)))
        faults.point("tree.publish.before-note")
        uses.hold(self._store, digest, [tree_key(digest), *(ref.key for ref in (*packed.map.packs, *refs[1:]))])
        own = packed.stored + sum(map(len, objects[1:])) + len(manifest)
        return TreeRef(digest, len(meta) + packed.map.size, own, packed.shared, len(packed.map.packs))

    def _keep(self, data: bytes | Path, ref: ObjectRef) -> None:
        self._count(0, ref.size)
        _put(self._store, ref.key, data, ref)
        self._count(ref.size, 0)

    def _count(self, done: int, ready: int) -> None:
        with self._lock:
            self._put_bytes += done
            self._ready_bytes += ready
            state = self._put_bytes, self._ready_bytes
        if self._progress is not None:
            self._progress(*state)


def publish(store: Store, meta: Path, data: Path, *, block_size: int = DEFAULT_BLOCK) -> TreeRef:
    """Publish the tree of the EROFS files ``meta`` and ``data``; again: changes nothing, same digest. It stays in the
    store as long as the object ``published/<digest>`` does. Up to 2 GiB of temporary space are used in the folder of
    ``data``. Nothing is shared with other trees, so the digest depends only on the two files, ``block_size`` and the
    version of zstd. Raises as `TreeWriter`, and `DataError` when ``data`` changes meanwhile."""
    with doing(f"make a work folder in {data.parent}"):
        work = Path(tempfile.mkdtemp(prefix=".publish-", dir=data.parent))
    try:
        with TreeWriter(store, work, block_size=block_size) as out:
            _copy(data, out.packs)
            with doing(f"read {meta}"):
                content = meta.read_bytes()
            made = out.seal(content)
            store.put(f"{uses.PUBLISHED}/{made.digest}", b"")
            return made
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy(data: Path, out: PackWriter) -> None:
    with doing(f"publish {data}"), open(data, "rb", buffering=0) as source:
        size = os.fstat(source.fileno()).st_size
        buffer = bytearray(1 << 20)
        while count := source.readinto(buffer):
            out.write(memoryview(buffer)[:count])
    if out.position != size:
        raise DataError(f"{data} changed while it was published")


def _put(store: Store, key: str, data: bytes | Path, ref: ObjectRef) -> None:
    if store.put(key, data) or _intact(store, key, ref):
        return
    log.warning("object %s in store %s is damaged; replacing it", key, store.shown)
    store.put(key, data, overwrite=True)
    if not _intact(store, key, ref):
        raise DataError(
            f"object {key} in store {store.shown} is damaged, and cannot be replaced",
            hint="a registry keeps a blob that it has: its operator must remove that from its storage",
        )


def _intact(store: Store, key: str, ref: ObjectRef) -> bool:
    try:
        with store.open(key) as reader:
            if reader.size != ref.size:
                return False
            state = hashing.hasher()
            for offset in range(0, ref.size, _PIECE):
                state.update(reader.read(offset, min(_PIECE, ref.size - offset)))
    except (DataError, NotFoundError):
        return False
    return state.hexdigest() == ref.digest
