"""OCI image layouts (image-spec 1.1): folders with ``oci-layout``, ``index.json`` and ``blobs/sha256/``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bootseer.errors import ConfigError, DataError, NotFoundError, doing, from_os_error
from bootseer.kernel import links
from bootseer.oci.spec import MAX_DOCUMENT, Descriptor, Index, decode, describe

REF_NAME = "org.opencontainers.image.ref.name"
_CHUNK = 1 << 18


class Layout:
    """A layout folder to read from. `NotFoundError` when it is none."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / "oci-layout").is_file():
            raise NotFoundError(f"{root} is not an OCI layout", hint="it has no file oci-layout")

    def index(self) -> Index:
        with doing(f"read the index of layout {self.root}"), self._open(self.root / "index.json") as file:
            body = file.read(MAX_DOCUMENT + 1)
        if len(body) > MAX_DOCUMENT:
            raise DataError(f"index.json of {self.root} is larger than {MAX_DOCUMENT} bytes")
        return decode(body, Index, f"index.json of {self.root}")

    def _open(self, path: Path) -> IO[bytes]:
        """A file of the layout, which may be another user's folder. Raises `FileNotFoundError`."""
        try:
            where, base = os.path.abspath(path), os.path.abspath(self.root)
            return os.fdopen(links.open_followed(where, os.O_RDONLY, base=base), "rb")
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise from_os_error(exc, f"read {path}") from exc

    def manifest(self, selector: str) -> tuple[bytes, Descriptor]:
        """The manifest or index of a tag or digest, verified, with its descriptor (media type empty: nobody says); of
        the only image when neither is said.

        Raises `ConfigError` when there are several to choose from, `NotFoundError`, `DataError`.
        """
        entry = self._entry(selector)
        digest = entry.digest
        try:
            with self._open(self.blob_path(digest)) as file:
                body = file.read(MAX_DOCUMENT + 1)
        except FileNotFoundError:
            raise NotFoundError(f"manifest of image {digest} is missing in layout {self.root}") from None
        if len(body) > MAX_DOCUMENT:
            raise DataError(f"manifest {digest} in layout {self.root} is larger than {MAX_DOCUMENT} bytes")
        item = describe(body, entry.media_type, f"manifest {digest} in layout {self.root}")
        if item.digest != digest:
            raise DataError(f"manifest in layout {self.root} does not match its digest {digest}")
        return body, item

    def _entry(self, tag: str) -> Descriptor:
        """What has this tag or digest; without one, the only image or the one tagged latest."""
        items = self.index().manifests
        if tag.startswith("sha256:"):
            return next((item for item in items if item.digest == tag), Descriptor("", tag, 0))
        if not tag and len(items) == 1:
            return items[0]
        tags = {(item.annotations or {}).get(REF_NAME, ""): item for item in reversed(items)}
        if (wanted := tag or "latest") in tags:
            return tags[wanted]
        known = ", ".join(sorted(filter(None, tags)))
        if not tag and items:
            raise ConfigError(f"layout {self.root} holds several images", hint=f"name one of {known}")
        raise NotFoundError(f"image {wanted} does not exist in layout {self.root}", hint=f"it has {known or '-'}")

    def blob_path(self, digest: str) -> Path:
        """Raises `DataError` when ``digest`` is none."""
        return self.root / "blobs" / "sha256" / Descriptor("", digest, 0).hex

    def blob(self, item: Descriptor) -> Iterator[bytes]:
        """The blob's bytes, unverified."""
        try:
            with self._open(self.blob_path(item.digest)) as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except FileNotFoundError:
            raise NotFoundError(f"blob {item.digest} is missing in layout {self.root}") from None

    def close(self) -> None:
        """Nothing is kept open."""
