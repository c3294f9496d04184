"""The local copy of what a mount of a tree needs at once: manifest, block map and EROFS metadata, each verified
whenever it is used. In the node cache: ``<cache_dir>/trees/<digest>/``. A `Hold` keeps them there while somebody uses
them."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.locks import Hold
from bootseer.chunks.manifest import MAX_MANIFEST, TreeManifest, tree_key
from bootseer.chunks.zstd import unpack
from bootseer.closing import whole
from bootseer.errors import DataError, NotFoundError, doing
from bootseer.objects import Store

log = logging.getLogger(__name__)
T = TypeVar("T")


class TreeParts(msgspec.Struct, frozen=True):
    """A tree whose manifest is on this node, verified, and where its other parts belong."""

    digest: str
    manifest: TreeManifest
    meta: Path
    cache: Path
    """Folder of the tree's cache file."""
    hold: Hold
    """Keeps the metadata here for as long as this object lives."""


class LocalTree(TreeParts, frozen=True):
    """The metadata of a tree, verified and on this node."""

    map: BlockMap

    @property
    def map_digest(self) -> bytes:
        return bytes.fromhex(self.manifest.map.digest)


def localize(store: Store | None, digest: str, cache_dir: Path, *, meta: bool = True) -> LocalTree:
    """Bring manifest, map and meta (unless ``meta`` is False) of a tree into ``cache_dir``, verified; what is there and
    intact is not fetched. Without a ``store`` all of it must be there, else `NotFoundError`. Raises `NotFoundError`,
    `DataError`, `UnavailableError`, or `FullError` and kin for the cache."""
    parts = localize_manifest(store, digest, cache_dir)
    blocks = BlockMap.decode(localize_map(store, parts))
    if blocks.size != parts.manifest.data_size:
        raise DataError(f"block map of tree {digest[:12]} does not fit its data")
    if meta:
        localize_meta(store, parts)
    return LocalTree(digest, parts.manifest, parts.meta, parts.cache, parts.hold, blocks)


def localize_manifest(store: Store | None, digest: str, cache_dir: Path) -> TreeParts:
    """Bring only the manifest of a tree into ``cache_dir``. Raises as `localize`."""
    key = tree_key(digest)
    folder = cache_dir / "trees" / digest
    with doing(f"keep tree {digest[:12]} in cache {folder}"):
        hold = _with_room(folder, lambda: Hold(folder))
        kept = _kept(folder / "manifest.json", digest)
        raw = _needed(store, digest).get(key, most=MAX_MANIFEST) if kept is None else kept
        manifest = TreeManifest.decode(raw, digest)
        if kept is None:
            _with_room(folder, lambda: _keep(folder / "manifest.json", [raw]))
    return TreeParts(digest, manifest, folder / "meta", cache_dir / "blocks" / manifest.map.digest, hold)


def localize_map(store: Store | None, tree: TreeParts) -> bytes:
    """Bring the block map of ``tree`` to where it belongs, verified; as it is stored. Raises as `localize`."""
    path, ref = tree.meta.parent / "map", tree.manifest.map
    with doing(f"keep tree {tree.digest[:12]} in cache {path.parent}"):
        encoded = _kept(path, ref.digest)
        if encoded is None:
            encoded = stored = fetch(_needed(store, tree.digest), ref)
            _with_room(tree.cache, lambda: _keep(path, [stored]))
    return encoded


def localize_meta(store: Store | None, tree: TreeParts) -> None:
    """Bring the meta of ``tree`` to where it belongs, verified. Raises as `localize`."""
    manifest = tree.manifest
    with doing(f"keep tree {tree.digest[:12]} in cache {tree.meta.parent}"):
        if not tree.meta.exists() or hashing.file_hexdigest(tree.meta) != manifest.meta.digest:
            stored = fetch(_needed(store, tree.digest), manifest.meta_stored)
            _with_room(
                tree.cache,
                lambda: _keep(tree.meta, _verified(unpack(stored, manifest.meta.size), manifest.meta, tree.digest)),
            )


def fetch(store: Store, ref: ObjectRef) -> bytes:
    """The object's bytes, verified; where a mirror has them wrong, those of the store itself. Raises `DataError`,
    `NotFoundError`, `UnavailableError`."""
    what = f"object {ref.key} in store {store.shown}"
    with store.open(ref.key) as reader:
        if reader.size != ref.size:
            raise DataError(f"{what} has {reader.size} bytes, not {ref.size}")
        trouble = DataError(f"{what} is damaged: its hash differs")
        try:
            raw: bytes | None = reader.read(0, ref.size)
        except DataError as exc:
            raw, trouble = None, exc
        if raw is None or hashing.hexdigest(raw) != ref.digest:
            raw = reader.original(0, ref.size)
            if raw is None or hashing.hexdigest(raw) != ref.digest:
                raise trouble
            log.warning("%s was damaged at a mirror; the store itself has it right", what)
    return raw


def _needed(store: Store | None, digest: str) -> Store:
    if store is None:
        raise NotFoundError(f"tree {digest[:12]} is not whole in the node cache any more", hint="mount it again")
    return store


def _kept(path: Path, digest: str) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    return raw if hashing.hexdigest(raw) == digest else None


def _verified(pieces: Iterable[bytes], ref: ObjectRef, tree: str) -> Iterator[bytes]:
    """``pieces``; `DataError` at the end when they are not what the manifest says."""
    state = hashing.hasher()
    for piece in pieces:
        state.update(piece)
        yield piece
    if state.hexdigest() != ref.digest:
        raise DataError(f"meta of tree {tree[:12]} is damaged: its hash differs")


def _with_room(folder: Path, write: Callable[[], T]) -> T:
    """What ``write`` returns; on a full disk, once the node cache of ``folder`` has given back what it can."""
    try:
        return write()
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        from bootseer.chunks import keeping

        log.warning("%s: %s; what nobody uses is given back", folder, exc.strerror)
        keeping.make_room(folder)  # or another thread did meanwhile
    return write()


def _keep(path: Path, pieces: Iterable[bytes]) -> None:
    """``pieces`` as the file ``path``: all of them or none."""
    # By rename, as a mount may still use the file of the same name; no fsync, as it is verified at every use.
    with whole(path) as out:
        out.writelines(pieces)
