"""Objects as OCI artifacts: the manifest that holds them, and the tags they are found by (docs/howto/registry.md)."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping

import msgspec

from bootseer.oci.spec import MANIFEST, Descriptor, digest_of

KEY = "org.opencontainers.image.title"
"""Annotation of a layer with its store key; other tools take it as the file name."""
ARTIFACT = "application/vnd.bootseer.objects.v1"
OBJECT = "application/vnd.bootseer.object.v1"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
TAG = "bootseer"
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,14}\Z")
_SMALL = 16 << 10
_SMALL_ALL = 256 << 10
"""Bytes that a manifest may hold of an object, as the records of images and trees have a few KiB; and of all together,
as registries take manifests of 4 MiB."""
_LEVELS = 7
_HASH = 10


class Item(Descriptor, frozen=True, rename="camel", omit_defaults=True):
    """A blob; a small one with its ``data`` (image-spec 1.1), which saves a reader a request."""

    data: bytes = b""

    def __post_init__(self) -> None:
        if not len(self.data) == self.size <= _SMALL:
            msgspec.structs.force_setattr(self, "data", b"")


class Artifact(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """An image manifest that is no image (image-spec 1.1, "artifact usage")."""

    schema_version: int
    media_type: str
    artifact_type: str
    config: Descriptor
    layers: tuple[Item, ...]
    subject: Descriptor | None = None

    def encode(self) -> bytes:
        # No time and no order of ours: the same objects give the same digest, so publishing again changes nothing.
        return msgspec.json.encode(self, order="deterministic")


class Found(msgspec.Struct, frozen=True, rename="camel"):
    """What reading needs of any manifest."""

    layers: tuple[Item, ...] = ()
    artifact_type: str = ""
    config: Descriptor | None = None
    subject: Descriptor | None = None

    @property
    def objects(self) -> dict[str, Item]:
        """Key -> blob; empty for artifacts that are not ours."""
        if self.artifact_type != ARTIFACT:
            return {}
        return {item.annotations[KEY]: item for item in self.layers if item.annotations and item.annotations.get(KEY)}


def build(objects: Mapping[str, Item], subject: Descriptor | None) -> bytes:
    """The manifest of an artifact with these objects (key -> blob), the same whatever their order."""
    items = sorted(objects.items())
    few = sum(len(one.data) for _, one in items) <= _SMALL_ALL
    layers = tuple(
        Item(OBJECT, one.digest, one.size, annotations={KEY: key}, data=one.data if few else b"") for key, one in items
    )
    config = Item(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY))
    # OCI 1.1 wants at least one layer; the empty one marks a deleted key.
    target = Descriptor(subject.media_type, subject.digest, subject.size) if subject else None
    return Artifact(2, MANIFEST, ARTIFACT, config, layers or (config,), target).encode()


def tag_of(key: str) -> str:
    """The tag of ``key``: ``bootseer``, then each part of the key, as it is when it is short and plain, else hashed: 80
    bits a part, at most 7 parts (deeper ones are hashed together), so any key fits in a tag's 128 characters. The
    manifest has the key itself, so a collision is seen and never gives another key's bytes."""
    parts = key.split("/")
    if len(parts) > _LEVELS:
        parts = [*parts[: _LEVELS - 1], "/".join(parts[_LEVELS - 1 :])]
    return ".".join((TAG, *map(_part, parts)))


def tag_prefix(prefix: str) -> str:
    """What the tags of all keys below the folder ``prefix`` begin with."""
    parts = [part for part in prefix.split("/") if part][: _LEVELS - 1]
    return ".".join((TAG, *map(_part, parts))) + "."


def _part(part: str) -> str:
    if _PLAIN.match(part):
        return part
    return base64.b32encode(hashlib.blake2b(part.encode(), digest_size=_HASH).digest()).decode().lower()
