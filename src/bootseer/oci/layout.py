"""OCI image layouts (image-spec 1.1): folders with ``oci-layout``, ``index.json`` and ``blobs/sha256/``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from bootseer.errors import ConfigError, DataError, NotFoundError, from_os_error
from bootseer.oci.reference import Reference
from bootseer.oci.spec import MAX_DOCUMENT, Descriptor, Index, decode, digest_of

REF_NAME = "org.opencontainers.image.ref.name"
_CHUNK = 1 << 18


class Layout:
    """A layout folder to read from. `NotFoundError` when it is none."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / "oci-layout").is_file():
            raise NotFoundError(f"{root} is not an OCI layout", hint="it has no file oci-layout")

    def index(self) -> Index:
        try:
            return decode((self.root / "index.json").read_bytes(), Index, f"index.json of {self.root}")
        except OSError as exc:
            raise from_os_error(exc, f"read the index of layout {self.root}") from exc

    def find(self, ref: Reference) -> Descriptor:
        """The manifest or index that ``ref`` names; without a tag or digest, the only one or the one tagged latest."""
        items = self.index().manifests
        if ref.digest:
            for item in items:
                if item.digest == ref.digest:
                    return item
            path = self.blob_path(Descriptor("", ref.digest, 0))
            if path.is_file():
                return Descriptor("", ref.digest, path.stat().st_size)
            raise NotFoundError(f"image {ref} does not exist in layout {self.root}")
        if not ref.tag and len(items) == 1:
            return items[0]
        wanted = ref.tag or "latest"
        for item in items:
            if (item.annotations or {}).get(REF_NAME) == wanted:
                return item
        tags = sorted(filter(None, ((item.annotations or {}).get(REF_NAME, "") for item in items)))
        if not ref.tag and items:
            raise ConfigError(f"layout {self.root} holds several images", hint=f"name one of {', '.join(tags)}")
        raise NotFoundError(
            f"image {ref} does not exist in layout {self.root}", hint=f"it has {', '.join(tags) or '-'}"
        )

    def blob_path(self, item: Descriptor) -> Path:
        return self.root / "blobs" / "sha256" / item.hex

    def document(self, item: Descriptor, what: str) -> bytes:
        """A small blob, whole and verified."""
        path = self.blob_path(item)
        try:
            if path.stat().st_size > MAX_DOCUMENT:
                raise DataError(f"{what} is larger than {MAX_DOCUMENT} bytes")
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFoundError(f"{what} is missing in layout {self.root}: {item.digest}") from None
        if digest_of(data) != item.digest:
            raise DataError(f"{what} in layout {self.root} does not match its digest {item.digest}")
        return data

    def blob(self, item: Descriptor) -> Iterator[bytes]:
        """The blob's bytes, unverified."""
        try:
            with open(self.blob_path(item), "rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except FileNotFoundError:
            raise NotFoundError(f"layer {item.digest} is missing in layout {self.root}") from None


def save_index(root: Path, item: Descriptor, tag: str) -> None:
    """Add ``item`` to the layout's index under ``tag``, replacing an earlier image of that tag."""
    path = root / "index.json"
    others: tuple[Descriptor, ...] = ()
    if path.exists():
        others = Layout(root).index().manifests
    named = msgspec.structs.replace(item, annotations={**(item.annotations or {}), REF_NAME: tag})
    kept = tuple(m for m in others if (m.annotations or {}).get(REF_NAME) != tag)
    (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    tmp = root / ".index.json.tmp"
    tmp.write_bytes(msgspec.json.encode(Index(schema_version=2, manifests=(*kept, named))))
    tmp.replace(path)
