"""Tree manifests: the small JSON object that names the parts of a lazy tree, and the local copy of the small parts.

Store keys: ``trees/<digest>.json`` (the manifest; its name is the BLAKE3 of its bytes) and ``blobs/<aa>/<digest>`` (by
BLAKE3 of the stored bytes). Everything a tree consists of is verified against this chain before it is used.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from bootseer.blocks import _hash
from bootseer.blocks._zstd import unpack
from bootseer.blocks.cache.cachelock import Hold
from bootseer.blocks.formats.blockmap import MAX_ENCODED, MAX_SIZE, BlockMap, ObjectRef, frame_bound
from bootseer.errors import DataError, NotFoundError, from_os_error
from bootseer.store import Store

log = logging.getLogger(__name__)

_FORMAT = "bootseer-tree"
_VERSION = 2
_MAX_MANIFEST = 1 << 16
MAX_META = 2 << 30
"""Bytes of EROFS metadata: images have about 100 per file, so 20 million files."""


class TreeManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tree consists of: zstd-compressed EROFS ``meta``, and the block ``map``, which names the stored packs.

    Version 1 had maps that name no pack: ``data_stored`` is the one object with all frames.
    """

    format: str = _FORMAT
    version: int = _VERSION
    meta: ObjectRef
    meta_stored: ObjectRef
    map: ObjectRef
    data_size: int
    data_stored: ObjectRef | msgspec.UnsetType = msgspec.UNSET

    @property
    def single_pack(self) -> ObjectRef | None:
        """``data_stored`` of version 1."""
        return self.data_stored if isinstance(self.data_stored, ObjectRef) else None

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1) + b"\n"

    @classmethod
    def decode(cls, raw: bytes, digest: str) -> TreeManifest:
        """Parse the manifest called ``digest``. Raises `DataError`."""
        if len(raw) > _MAX_MANIFEST or _hash.hexdigest(raw) != digest:
            raise DataError(f"tree manifest {digest[:12]} is damaged: its hash differs")
        try:
            self = msgspec.json.decode(raw, type=cls)
        except msgspec.MsgspecError as exc:
            raise DataError(f"tree manifest {digest[:12]} is not understood: {exc}") from None
        pack = self.single_pack
        refs = (self.meta, self.meta_stored, self.map, *([pack] if pack is not None else []))
        if self.format != _FORMAT or self.version not in (1, _VERSION):
            raise DataError(
                f"tree manifest {digest[:12]} has format {self.format} {self.version}", hint="use a newer bootseer"
            )
        if (pack is None) != (self.version == _VERSION):
            raise DataError(f"tree manifest {digest[:12]} is not understood: data_stored and version do not fit")
        if not all(_hash.is_hexdigest(ref.digest) and ref.size >= 0 for ref in refs):
            raise DataError(f"tree manifest {digest[:12]} is not understood: bad reference")
        sizes = (self.meta.size, MAX_META), (self.map.size, MAX_ENCODED), (self.data_size, MAX_SIZE)
        if any(not 0 <= size <= most for size, most in (*sizes, (self.meta_stored.size, frame_bound(self.meta.size)))):
            raise DataError(f"tree manifest {digest[:12]} is not understood: absurd sizes")
        return self


class TreeRef(msgspec.Struct, frozen=True):
    """A published tree: its digest, and bytes: uncompressed (meta and data), stored for it, and stored frames that it
    shares with trees that were there before; and the number of packs that it refers to."""

    digest: str
    size: int
    stored: int
    shared: int = 0
    packs: int = 0


class TreeParts(msgspec.Struct, frozen=True):
    """A tree whose manifest is on this node, verified, and where its other small parts belong."""

    digest: str
    manifest: TreeManifest
    meta: Path
    cache: Path
    """Folder of the tree's cache file."""
    hold: Hold
    """Keeps the small parts here for as long as this object lives."""


class LocalTree(TreeParts, frozen=True):
    """The small parts of a tree, verified and on this node."""

    map: BlockMap

    @property
    def map_digest(self) -> bytes:
        return bytes.fromhex(self.manifest.map.digest)


def tree_key(digest: str) -> str:
    if not _hash.is_hexdigest(digest):
        raise NotFoundError(f"{digest!r} is not a tree digest", hint="it has 64 hexadecimal digits")
    return f"trees/{digest}.json"


def localize(store: Store, digest: str, cache_dir: Path, *, meta: bool = True) -> LocalTree:
    """Bring manifest, map and meta of a tree into ``cache_dir``, verified; what is there and intact is not fetched.

    ``meta`` False: without it, for who only needs blocks. Raises `NotFoundError`, `DataError`, `UnavailableError`, or
    `FullError` and kin for the cache.
    """
    parts = localize_manifest(store, digest, cache_dir)
    manifest = parts.manifest
    encoded = localize_map(store, parts)
    blocks = BlockMap.decode(encoded, manifest.single_pack)
    if blocks.size != manifest.data_size:
        raise DataError(f"block map of tree {digest[:12]} does not fit its data")
    tree = LocalTree(digest, manifest, parts.meta, parts.cache, parts.hold, blocks)
    if meta:
        localize_meta(store, tree)
    return tree


def localize_manifest(store: Store, digest: str, cache_dir: Path) -> TreeParts:
    """Bring only the manifest of a tree into ``cache_dir``. Raises as `localize`."""
    key = tree_key(digest)
    folder = cache_dir / "trees" / digest
    try:
        hold = Hold(folder)
        raw = _kept(folder / "manifest.json", digest)
        if raw is None:
            raw = store.get(key)
            TreeManifest.decode(raw, digest)
            _keep(folder / "manifest.json", [raw])
    except OSError as exc:
        raise from_os_error(exc, f"keep tree {digest[:12]} in cache {folder}") from exc
    manifest = TreeManifest.decode(raw, digest)
    return TreeParts(digest, manifest, folder / "meta", cache_dir / "blocks" / manifest.map.digest, hold)


def localize_map(store: Store, tree: TreeParts) -> bytes:
    """Bring the block map of ``tree`` to where it belongs, verified, and return it as it is stored. Raises as
    `localize`."""
    path, ref = tree.meta.parent / "map", tree.manifest.map
    try:
        encoded = _kept(path, ref.digest)
        if encoded is None:
            encoded = fetch(store, ref)
            _keep(path, [encoded])
    except OSError as exc:
        raise from_os_error(exc, f"keep tree {tree.digest[:12]} in cache {path.parent}") from exc
    return encoded


def localize_meta(store: Store, tree: TreeParts) -> None:
    """Bring the meta of ``tree`` to where it belongs, verified. Raises as `localize`."""
    manifest = tree.manifest
    try:
        if not tree.meta.exists() or _hash.file_hexdigest(tree.meta) != manifest.meta.digest:
            stored = fetch(store, manifest.meta_stored)
            _keep(tree.meta, _verified(unpack(stored, manifest.meta.size), manifest.meta, tree.digest))
    except OSError as exc:
        raise from_os_error(exc, f"keep tree {tree.digest[:12]} in cache {tree.meta.parent}") from exc


def fetch(store: Store, ref: ObjectRef) -> bytes:
    """The object's bytes, verified; where a mirror has them wrong, those of the store itself.

    Raises `DataError`, `NotFoundError`, `UnavailableError`.
    """
    what = f"object {ref.key} in store {store.url}"
    with store.open(ref.key) as reader:
        if reader.size != ref.size:
            raise DataError(f"{what} has {reader.size} bytes, not {ref.size}")
        trouble = DataError(f"{what} is damaged: its hash differs")
        try:
            raw: bytes | None = reader.read(0, ref.size)
        except DataError as exc:
            raw, trouble = None, exc
        if raw is None or _hash.hexdigest(raw) != ref.digest:
            raw = reader.original(0, ref.size)
            if raw is None or _hash.hexdigest(raw) != ref.digest:
                raise trouble
            log.warning("%s was damaged at a mirror; the store itself has it right", what)
    return raw


def _kept(path: Path, digest: str) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    return raw if _hash.hexdigest(raw) == digest else None


def _verified(pieces: Iterable[bytes], ref: ObjectRef, tree: str) -> Iterator[bytes]:
    """``pieces``; `DataError` at the end when they are not what the manifest says."""
    state = _hash.hasher()
    for piece in pieces:
        state.update(piece)
        yield piece
    if state.hexdigest() != ref.digest:
        raise DataError(f"meta of tree {tree[:12]} is damaged: its hash differs")


def _keep(path: Path, pieces: Iterable[bytes]) -> None:
    """``pieces`` as the file ``path``: all of them or none."""
    # By rename, as a mount may still use the file of the same name; no fsync, as it is verified at every use.
    tmp = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        with open(tmp, "xb") as out:
            out.writelines(pieces)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
