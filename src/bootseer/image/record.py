"""What the store knows of a converted image: one JSON record per manifest and platform (docs/internals/image.md)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from bootseer.chunks import hashing
from bootseer.errors import BootseerError, ConfigError, DataError, UnavailableError, logged
from bootseer.objects import Store, open_store, signature
from bootseer.oci import ImageConfig, Reference, in_files
from bootseer.wiretypes import json_as

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

log = logging.getLogger(__name__)

FORMAT = "bootseer-image"
VERSION = 2
FOLDER = "images"
MAX_STORED = 4 << 20
"""Bytes of a record. Its configuration is the image's, of which few have 100 KiB."""
_CHECK = b',"check":"'
"""Before the BLAKE3 of what the record is without this last field. Its name says nothing of a record's content, and a
wrong environment or tree would not be noticed otherwise. Records without one are read too."""
_SIGNATURE = b',"signature":"'
"""Before the signature of what the record is without this field and ``check``."""
_REPAIR = "convert the image with --repair"
_MAX_RELATED = 256
_READERS = 8
_SECONDS = 10.0


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds. ``image`` is the manifest's digest and never an index's."""

    image: str
    platform: str
    reference: str
    """The name it was converted from. Its registry says who may have it; which image it is, ``image`` says, since a tag
    moves."""
    tree: str
    """Digest of the lazy tree (`bootseer.blocks.tree`) with the image's files."""
    config: ImageConfig
    layer_bytes: int
    """Compressed layers, as a full pull moves them."""
    tree_bytes: int
    """The tree's data, uncompressed."""
    stored_bytes: int
    """What its own objects take in the store."""
    shared_bytes: int
    """Frames that it shares with images converted before."""
    packs: int
    """Stored objects that its block map refers to."""
    members: int
    """Tar members applied."""
    converted: int
    """When, in seconds since 1970."""
    seconds: dict[str, float]
    """Where the conversion's time went, adding up to all of it: ``layers`` (waiting for downloads and decompression),
    ``tree`` (applying members), ``pack`` (waiting for hashing, compression and reads of what is shared), ``publish``
    (from the last layer on)."""
    kin: tuple[str, ...] = ()
    """The trees that this one is likely to share blocks with, the likeliest first, as the store had them then: a start
    without a profile is foretold from theirs."""
    format: str = FORMAT
    version: int = VERSION


def key_of(image: str, platform: str) -> str:
    """``images/<64 hex digits>-<os>-<architecture>[-<variant>].json``."""
    return f"{FOLDER}/{image.removeprefix('sha256:')}-{platform.replace('/', '-')}.json"


def load(store: Store, image: str, platform: str, keys: Sequence[Ed25519PublicKey] = ()) -> ImageRecord:
    """The record, signed by one of ``keys`` if there are any. Raises `NotFoundError` when the image is not converted,
    `DataError` when the record is no such thing, and its kin `UnsignedError`."""
    return read(
        store.get(key_of(image, platform), most=MAX_STORED), image, platform, keys, where=f"in store {store.shown}"
    )


def read(data: bytes, image: str, platform: str, keys: Sequence[Ed25519PublicKey], *, where: str) -> ImageRecord:
    """The record that has the stored form ``data``; ``where`` it lies is for messages. Raises as `load` does."""
    key = key_of(image, platform)
    record = decode(data, f"{key} {where}", keys)
    if (record.image, record.platform) != (image, platform):
        raise DataError(f"{key} {where} describes another image, {record.image!r}", hint=_REPAIR)
    return record


def save(
    store: Store,
    record: ImageRecord,
    *,
    overwrite: bool = False,
    old: bytes | None = None,
    key: Ed25519PrivateKey | None = None,
) -> bool:
    """Publish, signed with ``key``; False when another conversion of the same image was first. ``old``: the record that
    this one replaces, if it is still that one; with ``overwrite`` it replaces any."""
    raw = msgspec.json.encode(record)
    if key is not None:
        raw = raw[:-1] + _SIGNATURE + signature.sign(key, raw) + b'"}'
    raw = raw[:-1] + _CHECK + hashing.hexdigest(raw).encode() + b'"}'
    name = key_of(record.image, record.platform)
    if len(raw) > MAX_STORED:
        raise DataError(
            f"the record of {record.reference} would have {len(raw)} bytes, more than {MAX_STORED}",
            hint="its configuration (labels, history) is too long",
        )
    if old is not None and not overwrite:
        return store.replace(name, raw, old=old)
    return store.put(name, raw, overwrite=overwrite)


def with_origin(
    store: Store,
    record: ImageRecord,
    stored: bytes,
    ref: Reference,
    key: Ed25519PrivateKey | None,
    read_all: Callable[[], None],
) -> ImageRecord:
    """``record``, whose form in ``store`` is ``stored``; one of an image from a file names the registry of ``ref`` from
    now on, which says who may have the image. ``read_all`` reads the layers there, verified: who has a manifest could
    push that alone. A signed record is changed with a ``key`` only. Trouble is a log line."""
    if not (ref.registry and in_files(record.reference)):
        return record
    try:
        if _SIGNATURE in stored and key is None:
            raise ConfigError("it is signed, and there is no key to sign it with")
        read_all()
        changed = msgspec.structs.replace(record, reference=str(ref))
        if save(store, changed, old=stored, key=key):
            return changed
    except BootseerError as exc:
        log.warning("the record of %s does not get the name %s: %s", record.reference, ref, exc)
    return record


def remove(store: Store | str, records: Iterable[ImageRecord]) -> None:
    """Forget conversions; their trees and blocks stay, as others may share them."""
    store = open_store(store) if isinstance(store, str) else store
    for record in records:
        store.delete(key_of(record.image, record.platform))


def listing(store: Store) -> Iterator[ImageRecord]:
    """All records of a store; one that is damaged, or that a newer version made, is left out with a line in the log."""
    for info in store.list(FOLDER):
        if record := _look(store, info.key):
            yield record


def platforms(store: Store, digits: str) -> dict[str, list[str]]:
    """The converted images whose digest begins with the hexadecimal ``digits``, and the platforms of each. No record is
    read."""
    found: dict[str, list[str]] = {}
    for info in store.list(FOLDER):
        digest, _, platform = info.key.removeprefix(f"{FOLDER}/").removesuffix(".json").partition("-")
        if digest.startswith(digits) and platform:
            found.setdefault(f"sha256:{digest}", []).append(platform.replace("-", "/"))
    return found


def related(store: Store, ref: Reference, config: ImageConfig) -> list[str]:
    """Trees of records that are likely to share blocks with the image ``ref``, the likeliest first: those with the most
    layers in common, then of the same repository, then the newest; of up to 256 records read in about ten seconds. A
    store that fails here costs sharing only."""
    mine = set(config.rootfs.diff_ids)
    name = str(msgspec.structs.replace(ref, tag="", digest=""))
    ranked: list[tuple[tuple[int, bool, int], str]] = []
    end = time.monotonic() + _SECONDS
    with logged(log.warning, "blocks of other images are not shared"):
        infos = itertools.islice(store.some(FOLDER), _MAX_RELATED)
        with ThreadPoolExecutor(_READERS, "related") as pool:
            while some := list(itertools.islice(infos, 2 * _READERS)):
                for other in pool.map(lambda info: _look(store, info.key), some):
                    if other is not None:
                        common = len(mine.intersection(other.config.rootfs.diff_ids))
                        same = other.reference.startswith((f"{name}:", f"{name}@"))
                        ranked.append(((common, same, other.converted), other.tree))
                if time.monotonic() > end:
                    log.warning(
                        "store %s is slow: blocks of %d images are looked at, not of all", store.shown, len(ranked)
                    )
                    break
    ranked.sort(reverse=True)
    return list(dict.fromkeys(tree for _, tree in ranked))


def _look(store: Store, key: str) -> ImageRecord | None:
    try:
        return decode(store.get(key, most=MAX_STORED), key)
    except UnavailableError:
        raise
    except BootseerError as exc:  # anybody's link, pipe or record without rights hides no other one
        log.warning("%s in store %s", exc, store.shown)
        return None


def decode(data: bytes, what: str, keys: Sequence[Ed25519PublicKey] = ()) -> ImageRecord:
    """The record that has the stored form ``data``, of whatever image. Raises as `load` does."""
    body, check, rest = data.rpartition(_CHECK)
    if check and rest != hashing.hexdigest(body + b"}").encode() + b'"}':
        raise DataError(f"{what} is damaged: its hash differs", hint=_REPAIR)
    if keys:
        # What is verified is what is read: nothing else that is in ``data`` counts from here on.
        signed, _, mark = body.rpartition(_SIGNATURE)
        data = signed + b"}"
        signature.verify(keys, data, mark.removesuffix(b'"') if signed else b"", what)
    try:
        record = json_as(data, ImageRecord)
    except ValueError as exc:
        raise DataError(f"{what} is not an image record: {exc}", hint=_REPAIR) from None
    if (record.format, record.version) != (FORMAT, VERSION):
        said = f"{what} has format {record.format!r} version {record.version}, the newest known is {VERSION}"
        raise DataError(said, hint="a newer bootseer made it")
    return record
