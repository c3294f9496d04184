"""Objects of a registry store as the registry has them: blobs, read in ranges and described before they are put."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer.errors import DataError, from_os_error
from bootseer.oci.registry import Registry
from bootseer.oci.spec import Descriptor, digest_of
from bootseer.store import _artifact
from bootseer.store.base import RangeReader


class BlobReader(RangeReader):
    streams = True

    def __init__(self, registry: Registry, item: Descriptor, key: str) -> None:
        self._registry, self._item, self._key = registry, item, key
        self.size = item.size

    def read(self, offset: int, length: int) -> bytes:
        if offset + length > self.size:
            raise DataError(f"{self._key} ends at {self.size}, wanted {offset + length}")
        return self._registry.read_range(self._item, offset, length)

    def pieces(self, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
        if offset + sum(lengths) > self.size:
            raise DataError(f"{self._key} ends at {self.size}, wanted {offset + sum(lengths)}")
        return self._registry.read_pieces(self._item, offset, lengths)

    def original(self, offset: int, length: int) -> bytes | None:
        if not self._registry.mirrored:
            return None
        return self._registry.read_range(self._item, offset, length, fresh=True)

    def close(self) -> None:
        """Connections are the store's."""


def descriptor_of(data: bytes | Path) -> Descriptor:
    """Digest and size of bytes, or of what a local file has."""
    if isinstance(data, bytes):
        return Descriptor(_artifact.OBJECT, digest_of(data), len(data))
    try:
        with open(data, "rb") as file:
            digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
            return Descriptor(_artifact.OBJECT, digest, file.tell())
    except OSError as exc:
        raise from_os_error(exc, f"read {data!s}") from exc
