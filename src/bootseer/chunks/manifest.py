"""Tree manifests: the small JSON object that names the parts of a lazy tree. Store keys: ``trees/<digest>.json`` (the
manifest; its name is the BLAKE3 of its bytes) and ``blobs/<aa>/<digest>`` (by BLAKE3 of the stored bytes). Everything a
tree consists of is verified against this chain before it is used."""

from __future__ import annotations

import msgspec

from bootseer.chunks import hashing
from bootseer.chunks.blockmap import MAX_ENCODED, MAX_SIZE, ObjectRef, frame_bound
from bootseer.errors import DataError, NotFoundError
from bootseer.wiretypes import json_as

_FORMAT = "bootseer-tree"
_VERSION = 2
MAX_MANIFEST = 1 << 16
"""Bytes of a tree manifest."""
MAX_META = 2 << 30
"""Bytes of EROFS metadata: images have about 100 per file, so 20 million files."""
_FREE, _TIMES = 256 << 20, 100
"""Metadata may have so many bytes, and beyond them so many times what is stored of them, which is about a tenth: else
a few bytes in a store would fill the memory of who looks at them."""


def meta_bound(stored: int) -> int:
    """Bytes that metadata may have of which ``stored`` are stored."""
    return min(MAX_META, max(_FREE, _TIMES * stored))


class TreeManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tree consists of: zstd-compressed EROFS ``meta``, and the block ``map``, which names the stored packs."""

    format: str = _FORMAT
    version: int = _VERSION
    meta: ObjectRef
    meta_stored: ObjectRef
    map: ObjectRef
    data_size: int

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1) + b"\n"

    @classmethod
    def decode(cls, raw: bytes, digest: str) -> TreeManifest:
        """Parse the manifest called ``digest``. Raises `DataError`."""
        if len(raw) > MAX_MANIFEST or hashing.hexdigest(raw) != digest:
            raise DataError(f"tree manifest {digest[:12]} is damaged: its hash differs")
        try:
            self = json_as(raw, cls)
        except ValueError as exc:
            raise DataError(f"tree manifest {digest[:12]} is not understood: {exc}") from None
        if (self.format, self.version) != (_FORMAT, _VERSION):
            raise DataError(
                f"tree manifest {digest[:12]} has format {self.format} {self.version}, the newest known is {_VERSION}"
            )
        refs = self.meta, self.meta_stored, self.map
        if not all(hashing.is_hexdigest(ref.digest) and ref.size >= 0 for ref in refs):
            raise DataError(f"tree manifest {digest[:12]} is not understood: bad reference")
        sizes = (
            (self.meta.size, meta_bound(self.meta_stored.size)),
            (self.map.size, MAX_ENCODED),
            (self.data_size, MAX_SIZE),
        )
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


def tree_key(digest: str) -> str:
    if not hashing.is_hexdigest(digest):
        raise NotFoundError(f"{digest!r} is not a tree digest", hint="it has 64 hexadecimal digits")
    return f"trees/{digest}.json"
