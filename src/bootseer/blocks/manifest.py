"""Tree manifests: the small JSON object that names the parts of a lazy tree, and the local copy of the small parts.

Store keys: ``trees/<digest>.json`` (the manifest; its name is the BLAKE3 of its bytes) and ``blobs/<aa>/<digest>`` (by
BLAKE3 of the stored bytes). Everything a tree consists of is verified against this chain before it is used.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec

from bootseer.blocks import _hash
from bootseer.blocks._zstd import decompress
from bootseer.blocks.blockmap import BlockMap, ObjectRef
from bootseer.blocks.cachelock import Hold
from bootseer.errors import DataError, NotFoundError, from_os_error
from bootseer.store import Store

_FORMAT = "bootseer-tree"
_VERSION = 2
_MAX_MANIFEST = 1 << 16
_MAX_MAP = 1 << 30
_MAX_META = 1 << 34


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
        if self.meta.size > _MAX_META or self.map.size > _MAX_MAP:
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


class LocalTree(msgspec.Struct, frozen=True):
    """The small parts of a tree, verified and on this node."""

    digest: str
    manifest: TreeManifest
    map: BlockMap
    meta: Path
    cache: Path
    """Folder of the tree's cache file."""
    hold: Hold
    """Keeps the small parts here for as long as this object lives."""

    @property
    def map_digest(self) -> bytes:
        return bytes.fromhex(self.manifest.map.digest)


def tree_key(digest: str) -> str:
    if not _hash.is_hexdigest(digest):
        raise NotFoundError(f"{digest!r} is not a tree digest", hint="it has 64 hexadecimal digits")
    return f"trees/{digest}.json"


def localize(store: Store, digest: str, cache_dir: Path, *, meta: bool = True) -> LocalTree:
    """Bring manifest, map and meta of a tree into ``cache_dir``, verified; what is there and intact is not fetched.

    ``meta`` False: without it, for who only needs blocks, or calls `localize_meta` while something else goes on.
    Raises `NotFoundError`, `DataError`, `UnavailableError`, or `FullError` and kin for the cache.
    """
    key = tree_key(digest)
    folder = cache_dir / "trees" / digest
    try:
        hold = Hold(folder)
        raw = _kept(folder / "manifest.json", digest)
        if raw is None:
            raw = store.get(key)
            TreeManifest.decode(raw, digest)
            _keep(folder / "manifest.json", raw)
        manifest = TreeManifest.decode(raw, digest)
        encoded = _kept(folder / "map", manifest.map.digest)
        if encoded is None:
            encoded = fetch(store, manifest.map)
            _keep(folder / "map", encoded)
    except OSError as exc:
        raise from_os_error(exc, f"keep tree {digest[:12]} in cache {folder}") from exc
    blocks = BlockMap.decode(encoded, manifest.single_pack)
    if blocks.size != manifest.data_size:
        raise DataError(f"block map of tree {digest[:12]} does not fit its data")
    tree = LocalTree(digest, manifest, blocks, folder / "meta", cache_dir / "blocks" / manifest.map.digest, hold)
    if meta:
        localize_meta(store, tree)
    return tree


def localize_meta(store: Store, tree: LocalTree) -> None:
    """Bring the meta of ``tree`` to where it belongs, verified. Raises as `localize`."""
    manifest = tree.manifest
    try:
        if not tree.meta.exists() or _hash.file_hexdigest(tree.meta) != manifest.meta.digest:
            stored = fetch(store, manifest.meta_stored)
            content = decompress(stored, manifest.meta.size)
            if _hash.hexdigest(content) != manifest.meta.digest:
                raise DataError(f"meta of tree {tree.digest[:12]} is damaged: its hash differs")
            _keep(tree.meta, content)
    except OSError as exc:
        raise from_os_error(exc, f"keep tree {tree.digest[:12]} in cache {tree.meta.parent}") from exc


def fetch(store: Store, ref: ObjectRef) -> bytes:
    """The object's bytes, verified. Raises `DataError`, `NotFoundError`, `UnavailableError`."""
    with store.open(ref.key) as reader:
        if reader.size != ref.size:
            raise DataError(f"object {ref.key} in store {store.url} has {reader.size} bytes, not {ref.size}")
        raw = reader.read(0, ref.size)
    if _hash.hexdigest(raw) != ref.digest:
        raise DataError(f"object {ref.key} in store {store.url} is damaged: its hash differs")
    return raw


def _kept(path: Path, digest: str) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    return raw if _hash.hexdigest(raw) == digest else None


def _keep(path: Path, raw: bytes) -> None:
    # By rename, as a mount may still use the file of the same name; no fsync, as it is verified at every use.
    tmp = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        tmp.write_bytes(raw)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
