"""What the store knows of a converted image: one JSON record per manifest and platform (docs/internals/image.md)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bootseer.errors import DataError
from bootseer.oci import ImageConfig
from bootseer.store import Store

FORMAT = "bootseer-image"
VERSION = 1
FOLDER = "images"


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds. ``image`` is the manifest's digest and never an index's."""

    image: str
    platform: str
    reference: str
    """The name it was converted from: for people, since a tag moves."""
    tree: str
    """Digest of the lazy tree (`bootseer.blocks.tree`) with the image's files."""
    config: ImageConfig
    layer_bytes: int
    """Compressed layers, as a full pull moves them."""
    tree_bytes: int
    """The tree's data, uncompressed."""
    stored_bytes: int
    """What its blocks take in the store."""
    members: int
    """Tar members applied."""
    seconds: dict[str, float]
    """Duration of each step of the conversion: ``unpack``, ``build``, ``publish``."""
    format: str = FORMAT
    version: int = VERSION


def key_of(image: str, platform: str) -> str:
    """``images/<64 hex digits>-<os>-<architecture>[-<variant>].json``."""
    return f"{FOLDER}/{image.removeprefix('sha256:')}-{platform.replace('/', '-')}.json"


def load(store: Store, image: str, platform: str) -> ImageRecord:
    """The record; `NotFoundError` when the image is not converted, `DataError` when the record is no such thing."""
    key = key_of(image, platform)
    record = _decode(store.get(key), f"{key} in store {store.url}")
    if (record.image, record.platform) != (image, platform):
        raise DataError(f"{key} in store {store.url} describes another image, {record.image}")
    return record


def save(store: Store, record: ImageRecord, *, overwrite: bool = False) -> bool:
    """Publish; False when another conversion of the same image was first."""
    return store.put(key_of(record.image, record.platform), msgspec.json.encode(record), overwrite=overwrite)


def listing(store: Store) -> Iterator[ImageRecord]:
    """All records of a store."""
    for info in store.list(FOLDER):
        yield _decode(store.get(info.key), f"{info.key} in store {store.url}")


def _decode(data: bytes, what: str) -> ImageRecord:
    try:
        record = msgspec.json.decode(data, type=ImageRecord)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as exc:
        raise DataError(f"{what} is not an image record: {exc}") from None
    if record.format != FORMAT or record.version != VERSION:
        raise DataError(f"{what} has format {record.format} version {record.version}", hint="a newer bootseer made it")
    return record
