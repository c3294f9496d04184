"""Publication of a tree: objects first, the manifest last, so that a tree in the store is always whole."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from bootseer import faults
from bootseer.blocks import _hash
from bootseer.blocks.blockmap import DEFAULT_BLOCK
from bootseer.blocks.manifest import ObjectRef, TreeManifest, TreeRef, tree_key
from bootseer.blocks.pack import Progress, compress, pack
from bootseer.errors import DataError, NotFoundError, from_os_error
from bootseer.store import Store

log = logging.getLogger(__name__)

_PIECE = 4 << 20


def publish(
    store: Store,
    meta: Path,
    data: Path,
    *,
    level: int = 3,
    block_size: int = DEFAULT_BLOCK,
    threads: int | None = None,
    progress: Progress | None = None,
    repair: bool = False,
) -> TreeRef:
    """Publish the tree of the EROFS files ``meta`` and ``data``; again: changes nothing, same digest.

    ``progress(done, total)`` counts bytes of ``data``. Temporary space as large as the stored form is used in the
    folder of ``data``. The digest depends only on the two files, ``level``, ``block_size`` and the version of zstd.
    ``repair``: read back what the store has of it already, and replace what is damaged. Raises `NotWritableError`,
    `FullError`, `UnavailableError`.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=".publish-", dir=data.parent))
    except OSError as exc:
        raise from_os_error(exc, f"make a work folder in {data.parent}") from exc
    try:
        packed = pack(data, work / "blob", block_size=block_size, level=level, threads=threads, progress=progress)
        blob = ObjectRef(packed.digest, packed.map.stored_size)
        _put(store, blob.key, work / "blob", blob, repair)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    faults.point("tree.publish.after-data")
    try:
        content = meta.read_bytes()
    except OSError as exc:
        raise from_os_error(exc, f"read {meta}") from exc
    stored, encoded = compress(content, level), packed.map.encode()
    refs = [ObjectRef(_hash.hexdigest(raw), len(raw)) for raw in (content, stored, encoded)]
    _put(store, refs[1].key, stored, refs[1], repair)
    _put(store, refs[2].key, encoded, refs[2], repair)
    manifest = TreeManifest(
        meta=refs[0], meta_stored=refs[1], map=refs[2], data_size=packed.map.size, data_stored=blob
    ).encode()
    digest = _hash.hexdigest(manifest)
    faults.point("tree.publish.before-manifest")
    _put(store, tree_key(digest), manifest, ObjectRef(digest, len(manifest)), repair)
    return TreeRef(digest, len(content) + packed.map.size, blob.size + len(stored) + len(encoded) + len(manifest))


def _put(store: Store, key: str, data: bytes | Path, ref: ObjectRef, repair: bool) -> None:
    if not store.put(key, data) and repair and not _intact(store, key, ref):
        log.warning("object %s in store %s is damaged; replacing it", key, store.url)
        store.put(key, data, overwrite=True)


def _intact(store: Store, key: str, ref: ObjectRef) -> bool:
    try:
        with store.open(key) as reader:
            if reader.size != ref.size:
                return False
            state = _hash.hasher()
            for offset in range(0, ref.size, _PIECE):
                state.update(reader.read(offset, min(_PIECE, ref.size - offset)))
    except (DataError, NotFoundError):
        return False
    return state.hexdigest() == ref.digest
