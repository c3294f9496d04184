"""Images in archives of ``docker save`` and ``podman save``: tar files with a ``manifest.json``."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterator
from typing import IO

import msgspec

from bootseer.errors import DataError
from bootseer.oci.inflate import COMPRESSED
from bootseer.oci.members import Members
from bootseer.oci.names import chosen, several
from bootseer.oci.spec import (
    CONFIG,
    LAYER,
    MANIFEST,
    MAX_DOCUMENT,
    Descriptor,
    ImageConfig,
    Manifest,
    decode,
    digest_of,
)

_CHUNK = 1 << 20
_MOST_LAYERS = 1000
_MOST_IMAGES = 1000
_NAMED_BY_DIGEST = re.compile(r"(?:.*/)?([0-9a-f]{64})(?:\.tar(?:\.gz)?)?\Z")
"""Compressed layers of docker since 25, and of others."""


class _Saved(msgspec.Struct, frozen=True, rename="pascal"):
    """One image in ``manifest.json``; ``config`` and ``layers`` are members of the archive."""

    config: str
    layers: tuple[str, ...] = ()
    repo_tags: tuple[str, ...] | None = None


class Archive:
    """An archive to read from; it closes ``members``. There is no manifest in it: one is made of what it says, so that
    the digest of an image is another than in a registry. Not safe for use by several threads. Raises `DataError` when
    it is no such archive."""

    def __init__(self, members: Members) -> None:
        self._files, self._path = members, members.path
        self._documents: dict[str, bytes] = {}
        """Digest -> configuration."""
        self._layers: dict[str, str] = {}
        """Digest -> name."""
        self._seen: dict[str, tuple[int, str]] = {}
        """Name of a layer -> its size, and its digest if it is compressed: it may be named many times."""
        images = decode(self._document("manifest.json"), list[_Saved], f"manifest.json of {self._path}")
        self._images = [(one.repo_tags or (), msgspec.structs.replace(one, repo_tags=None)) for one in images]
        """Names, and what the image is made of."""
        if len(self._images) > _MOST_IMAGES:
            raise DataError(f"archive {self._path} has more than {_MOST_IMAGES} images")

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._files.open(name) as file:
                yield file
        except FileNotFoundError:
            hint = "docker save and podman save write it" if name == "manifest.json" else ""
            raise DataError(f"archive {self._path} has no file {name}", hint=hint) from None

    def _document(self, name: str) -> bytes:
        with self._member(name) as file:
            data = file.read(MAX_DOCUMENT + 1)
        if len(data) > MAX_DOCUMENT:
            raise DataError(f"{name} in archive {self._path} is larger than {MAX_DOCUMENT} bytes")
        return data

    def _manifest(self, saved: _Saved) -> bytes:
        if len(saved.layers) > _MOST_LAYERS:
            raise DataError(f"archive {self._path} has an image of more than {_MOST_LAYERS} layers")
        raw = self._document(saved.config)
        diff_ids = decode(raw, ImageConfig, f"{saved.config} in archive {self._path}").rootfs.diff_ids
        if len(diff_ids) != len(saved.layers):
            raise DataError(f"archive {self._path} has {len(saved.layers)} layers but {len(diff_ids)} diff ids")
        return self._made(raw, [self._layer(*layer) for layer in zip(saved.layers, diff_ids, strict=True)])

    def _made(self, config: bytes, layers: list[Descriptor]) -> bytes:
        item = Descriptor(CONFIG, digest_of(config), len(config))
        self._documents[item.digest] = config
        return msgspec.json.encode(Manifest(schema_version=2, config=item, layers=tuple(layers)))

    def _layer(self, name: str, diff_id: str) -> Descriptor:
        """What is compressed is told by its name, or, where that says nothing, by reading it."""
        if name not in self._seen:
            with self._member(name) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                digest = ""
                if file.read(5).startswith(COMPRESSED):
                    named = _NAMED_BY_DIGEST.match(name)
                    digest = f"sha256:{named[1]}" if named else ""
                    if digest in ("", diff_id):  # some name it by what it is inside
                        file.seek(0)
                        digest = _sha256(iter(functools.partial(file.read, _CHUNK), b""))
            self._seen[name] = size, digest
        size, digest = self._seen[name]
        digest = digest or diff_id
        self._layers[digest] = name
        return Descriptor(LAYER, digest, size)

    def manifest(self, selector: str) -> tuple[bytes, Descriptor]:
        """The manifest of the image with a name, tag or digest; of the only one when nothing is said. Raises
        `ConfigError` when there are several to choose from, `NotFoundError`."""
        where = f"archive {self._path}"
        if selector.startswith("sha256:"):
            bodies = map(self._manifest, dict.fromkeys(made_of for _, made_of in self._images))
            found = chosen([((digest_of(body),), body) for body in bodies], selector, where)
        else:
            found = list(map(self._manifest, dict.fromkeys(chosen(self._images, selector, where))))
        body, *more = dict.fromkeys(found)
        if more:
            raise several(where, ())
        return body, Descriptor(MANIFEST, digest_of(body), len(body))

    def blob(self, item: Descriptor) -> Iterator[bytes]:
        """The bytes of a layer or configuration, unverified."""
        if (document := self._documents.get(item.digest)) is not None:
            yield document
            return
        with self._member(self._layers[item.digest]) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def close(self) -> None:
        self._files.close()


def _sha256(chunks: Iterator[bytes]) -> str:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return f"sha256:{hasher.hexdigest()}"
