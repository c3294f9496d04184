"""OCI image layouts (image-spec 1.1): folders with ``oci-layout``, ``index.json`` and ``blobs/sha256/``, also as tar
files (``oci-archive``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import msgspec

from bootseer.closing import Closing
from bootseer.errors import DataError, NotFoundError, doing, from_os_error
from bootseer.kernel import links
from bootseer.oci.members import Members
from bootseer.oci.names import chosen, several
from bootseer.oci.spec import INDEX, MAX_DOCUMENT, Descriptor, Index, decode, describe, digest_of, images_of

REF_NAME = "org.opencontainers.image.ref.name"
_NAMES = (REF_NAME, "io.containerd.image.name")
"""Annotations with the name of an image: what the first means nobody says, containerd puts the whole name into its own.
"""
_CHUNK = 1 << 18


class Layout(Closing):
    """A layout to read from: the folder ``root``, or ``members`` of the tar file ``root``, which it closes.
    `NotFoundError` when it is none."""

    def __init__(self, root: Path, members: Members | None = None) -> None:
        self.root = root
        self._members = members
        if not ("oci-layout" in members if members else (root / "oci-layout").is_file()):
            hint = "it has no file oci-layout"
            if members and "manifest.json" in members:
                hint = f"docker-archive:{root}"
            elif not members and root.is_file():
                hint = f"oci-archive:{root}"
            raise NotFoundError(f"{root} is not an OCI layout", hint=hint)

    def index(self) -> Index:
        with doing(f"read the index of layout {self.root}"), self._open("index.json") as file:
            body = file.read(MAX_DOCUMENT + 1)
        if len(body) > MAX_DOCUMENT:
            raise DataError(f"index.json of {self.root} is larger than {MAX_DOCUMENT} bytes")
        return decode(body, Index, f"index.json of {self.root}")

    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file of the layout, which may be another user's folder. Raises `FileNotFoundError`."""
        if self._members:
            return self._members.open(name)
        try:
            where, base = os.path.abspath(self.root / name), os.path.abspath(self.root)
            return os.fdopen(links.open_followed(where, os.O_RDONLY, base=base), "rb")
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise from_os_error(exc, f"read {self.root / name}") from exc

    def manifest(self, selector: str) -> tuple[bytes, Descriptor]:
        """The manifest or index of a name, tag or digest, verified, with its descriptor (media type empty: nobody
        says); of the only image when none is said. Of several under one name, one for each platform, an index. Raises
        `ConfigError` when there are several to choose from, `NotFoundError`, `DataError`."""
        entry, *more = found = self._entries(selector)
        if more:
            body = msgspec.json.encode(Index(schema_version=2, manifests=tuple(found)))
            return body, Descriptor(INDEX, digest_of(body), len(body))
        digest = entry.digest
        try:
            with self._open(_blob(digest)) as file:
                body = file.read(MAX_DOCUMENT + 1)
        except FileNotFoundError:
            raise NotFoundError(f"manifest of image {digest} is missing in layout {self.root}") from None
        if len(body) > MAX_DOCUMENT:
            raise DataError(f"manifest {digest} in layout {self.root} is larger than {MAX_DOCUMENT} bytes")
        item = describe(body, entry.media_type, f"manifest {digest} in layout {self.root}")
        if item.digest != digest:
            raise DataError(f"manifest in layout {self.root} does not match its digest {digest}")
        return body, item

    def _entries(self, selector: str) -> list[Descriptor]:
        items = self.index().manifests
        if selector.startswith("sha256:"):
            return [next((item for item in items if item.digest == selector), Descriptor("", selector, 0))]
        images = images_of(items) or items
        named = [
            (_names(item), msgspec.structs.replace(item, annotations=None))
            for item in items
            if item in images or (selector and item.artifact_type)  # one that is asked for is named as what it is
        ]
        found = list(dict.fromkeys(chosen(named, selector, where := f"layout {self.root}")))
        if len(found) > 1 and not any(item.platform for item in found):
            raise several(where, ())
        return found

    def blob(self, item: Descriptor) -> Iterator[bytes]:
        """The blob's bytes, unverified."""
        try:
            with self._open(_blob(item.digest)) as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except FileNotFoundError:
            raise NotFoundError(f"blob {item.digest} is missing in layout {self.root}") from None

    def close(self) -> None:
        if self._members:
            self._members.close()


def _names(item: Descriptor) -> set[str]:
    """Without the digest that some tools write behind a name."""
    said = ((item.annotations or {}).get(key, "") for key in _NAMES)
    return {name.partition("@")[0] for name in said} - {""}


def _blob(digest: str) -> str:
    """Raises `DataError` when ``digest`` is none."""
    return f"blobs/sha256/{Descriptor('', digest, 0).hex}"
