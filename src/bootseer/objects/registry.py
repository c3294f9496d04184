"""A store in a repository of an OCI registry: objects are layers of artifacts (docs/howto/registry.md).

``registry://HOST[:PORT]/NAME[@sha256:...]``, or ``registry+http://`` and ``registry+https://`` to choose. A digest
names an image of that repository: what is put without a subject of its own then refers to that image.

Publication: the blob first, then a manifest, then a tag per key; a key is there when its tag is, so no index is ever
rewritten. A registry has no conditional write: "the first publication wins" is a look before and after writing the tag,
so two writers of one key on two machines can both believe they won.

Concurrency: one lock guards what is remembered; no request is made under it. Puts of one key by threads of one process
take turns.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from bootseer import faults
from bootseer.backends.interface import Source, clean
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, PrivilegeError, doing
from bootseer.objects import artifact
from bootseer.objects.artifact import Item
from bootseer.objects.base import ObjectInfo, Store, check_key, check_size, no_store
from bootseer.oci.reference import Reference
from bootseer.oci.registry import Registry, turn
from bootseer.oci.spec import MANIFEST, Descriptor, decode, digest_of

log = logging.getLogger(__name__)

_SCHEMES: dict[str, bool | None] = {"registry": None, "registry+http": True, "registry+https": False}
_LOOKERS = 8
_REMEMBERED = 100_000
"""Objects that are remembered at most; then all are forgotten."""
_LISTED = 1.0
"""Seconds for which a list of tags is good: a start asks for several folders of it, one after another."""


class _Batch:
    """Objects on their way into one artifact: uploaded, but not yet named by a manifest."""

    def __init__(self, subject: Descriptor | None) -> None:
        self.subject = subject
        self.objects: dict[str, Item] = {}
        self.new: list[tuple[str, bool]] = []
        """Keys to tag, in the order of their puts, with whether they replace what is there."""


class RegistryStore(Store):
    """Objects in the repository of ``url``. `ConfigError` when it names none."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.url = url.rstrip("/")
        try:
            ref = Reference.parse(rest.rstrip("/"))
        except ConfigError as exc:
            raise ConfigError(f"bad store {url}: {exc.message}", hint="write registry://HOST[:PORT]/NAME") from None
        host = rest.partition("/")[0]
        if ref.tag not in ("", "latest") or ref.registry != host or scheme not in _SCHEMES:
            raise ConfigError(f"bad store {url}", hint="write registry://HOST[:PORT]/NAME, without a tag")
        self._image = ref.digest
        self._ref = msgspec.structs.replace(ref, digest="", tag="latest")
        self._registry = Registry(self._ref, plain_http=_SCHEMES[scheme])
        self._lock = threading.Lock()
        self._known: dict[str, Item] = {}
        self._known_tags: dict[str, str] = {}  # the key of each
        self._referred: dict[str, dict[str, Item]] = {}
        self._listed: tuple[list[str], float] = ([], 0.0)
        self._batch: _Batch | None = None
        self._has_config = False

    def get(self, key: str, *, most: int) -> bytes:
        item = self._find(key)
        check_size(item.size, most, key, self.shown)
        data = item.data
        if digest_of(data) != item.digest:
            data = b"".join(self._registry.blob(item))
        if digest_of(data) != item.digest and self._registry.mirrored:
            log.warning("%s in store %s was damaged at a mirror; asking the registry itself", key, self.url)
            data = self._registry.read_range(item, 0, item.size, fresh=True)
        if digest_of(data) != item.digest:
            raise DataError(f"{key} in store {self.url} does not match its digest {item.digest}")
        return data

    def open(self, key: str) -> Source:
        return _BlobReader(self._registry, self._find(key), f"{key} in store {self.url}")

    def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, self._find(key).size)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        check_key(key)
        with turn(f"{self._ref.registry}/{self._ref.name}/{key}", "key"):
            if not overwrite and (found := self._lookup(key)):
                with self._lock:
                    if self._batch:
                        self._batch.objects.setdefault(key, found)
                return False
            item = _descriptor_of(data)
            self._registry.put_blob(item, data)
            faults.point("store.put.before-publish")
            with self._lock:
                if self._batch:
                    self._batch.objects[key] = item
                    self._batch.new.append((key, overwrite))
                    return True
            return self._publish({key: item}, [(key, overwrite)], self._default_subject())

    @contextlib.contextmanager
    def batch(self, *, subject: Descriptor | None = None) -> Iterator[None]:
        """Group all puts of this store object meanwhile into one artifact that refers to ``subject``.

        Others see them when the block ends, in the order they were put; this store object at once. When it raises,
        nothing is published. Inside a batch already: part of that.
        """
        with self._lock:
            outer = self._batch
            if outer is None:
                self._batch = _Batch(subject or None)
        if outer is not None:
            yield
            return
        try:
            yield
        except BaseException:
            with self._lock:
                self._batch = None
            raise
        with self._lock:
            batch, self._batch = self._batch, None
        if batch and batch.new:
            self._publish(batch.objects, batch.new, batch.subject or self._default_subject())

    def keep(self, key: str) -> None:
        item = self._find(key)
        with self._lock:
            if self._batch:
                self._batch.objects.setdefault(key, item)

    def check_there(self) -> None:
        with contextlib.suppress(PrivilegeError):  # not each registry tells its tags to all who may read
            if not self._image and next(self._registry.tags(), None) is None:
                raise no_store(self.shown)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from sorted(self.some(prefix), key=lambda info: info.key)

    def some(self, prefix: str) -> Iterator[ObjectInfo]:
        """A request per object that was not seen before, ``_LOOKERS`` at a time and ahead."""
        below = clean(prefix)
        start = artifact.tag_prefix(below)
        tags = list(dict.fromkeys(tag for tag in self._tags() if tag.startswith(start)))
        seen, rest = set(tags), iter(tags)
        with ThreadPoolExecutor(_LOOKERS, thread_name_prefix="registry-list") as pool:
            while some := list(itertools.islice(rest, _LOOKERS)):
                for found in pool.map(self._tagged, some):
                    if found and (not below or found[0].startswith(below + "/")):
                        yield ObjectInfo(found[0], found[1].size)
        if self._image:
            for key, item in sorted(self._refers(self._image, again=True).items()):
                # With a tag it was there already, or is deleted.
                if artifact.tag_of(key) not in seen and (not below or key.startswith(below + "/")):
                    yield ObjectInfo(key, item.size)

    def _tags(self) -> Sequence[str]:
        """The tags of `artifact.TAG`; those of others are no object's."""
        with self._lock:
            before = tags, until = self._listed
        if time.monotonic() >= until:
            tags = [tag for tag in self._registry.tags() if tag.startswith(artifact.tag_prefix(""))]
            with self._lock:
                if self._listed is before:  # nothing was written here meanwhile
                    self._listed = tags, time.monotonic() + (_LISTED if len(tags) <= _REMEMBERED else 0.0)
        return tags

    def _tagged(self, tag: str) -> tuple[str, Item] | None:
        """Key and blob of the object with this tag; None when it is deleted, or not understood."""
        with self._lock:
            if (known := self._known_tags.get(tag)) in self._known:
                return known, self._known[known]
        try:
            objects = self._objects(tag) or {}
        except DataError as exc:
            log.warning("ignoring tag %s in store %s: %s", tag, self.url, exc.message)
            return None
        for key, item in objects.items():
            if artifact.tag_of(key) == tag:
                self._remember({key: msgspec.structs.replace(item, data=b"")}, tag)  # a listing may be long
                return key, item
        return None

    def _remember(self, objects: Mapping[str, Item], tag: str = "") -> None:
        """Ask for ``objects`` no more, as far as their keys name their content. ``tag``: by which one was found."""
        with self._lock:
            if len(self._known) > _REMEMBERED:
                self._known.clear()
                self._known_tags.clear()
            for key, item in objects.items():
                if _immutable(key):
                    self._known[key] = item
                    if tag:
                        self._known_tags[tag] = key

    def _forget(self, key: str) -> None:
        with self._lock:
            self._listed = [], 0.0
            self._referred.clear()
            self._known.pop(key, None)
            self._known_tags.pop(artifact.tag_of(key), None)

    def delete(self, key: str) -> None:
        """As far as the registry lets us: a manifest of this key alone is deleted, else the tag leads nowhere."""
        check_key(key)
        tag = artifact.tag_of(key)
        with turn(f"{self._ref.registry}/{self._ref.name}/{key}", "key"):
            self._forget(key)
            try:
                body, manifest = self._registry.manifest(tag, fresh=True)
                found = _decode(body)
                there = key in found.objects
                if list(found.objects) == [key] and not found.subject:
                    with contextlib.suppress(BootseerError):
                        if self._registry.delete_manifest(manifest.digest):
                            return
            except NotFoundError:
                there = self._lookup(key) is not None  # among an image's artifacts, without a tag
            if there:
                self._put_config()
                self._registry.store_manifest(artifact.build({}, None), MANIFEST, tag)
            self._forget(key)

    def close(self) -> None:
        """Drop kept connections; the store stays usable."""
        self._registry.close()

    def _default_subject(self) -> Descriptor | None:
        return self._registry.head_manifest(self._image) if self._image else None

    def _find(self, key: str) -> Item:
        if (item := self._lookup(check_key(key))) is None:
            raise NotFoundError(f"no object {key} in store {self.url}")
        return item

    def _lookup(self, key: str) -> Item | None:
        """The blob of ``key``: of the batch, remembered, by its tag, or among an image's artifacts."""
        with self._lock:
            if self._batch and key in self._batch.objects:
                return self._batch.objects[key]
            if key in self._known:
                return self._known[key]
        tag = artifact.tag_of(key)
        objects = self._objects(tag)
        if objects is not None:
            self._remember(objects)
            return objects.get(key)
        for image in filter(None, (self._image, _image_of(key))):
            if item := self._refers(image).get(key):
                return item
        return None

    def _objects(self, selector: str) -> dict[str, Item] | None:
        """The objects of the artifact with this tag or digest; None when there is none.

        Tags are asked of the registry itself: a mirror may be behind.
        """
        try:
            body, _ = self._registry.manifest(selector, fresh=":" not in selector)
        except NotFoundError:
            return None
        return _decode(body).objects

    def _refers(self, image: str, *, again: bool = False) -> dict[str, Item]:
        """The objects of all artifacts of ours that refer to ``image``; remembered once there are any."""
        with self._lock:
            if not again and self._referred.get(image):
                return self._referred[image]
        found: dict[str, Item] = {}
        for item in self._registry.referrers(image):
            try:
                found |= self._objects(f"sha256:{item.hex}") or {}
            except DataError as exc:
                log.warning("ignoring artifact %s of %s: %s", item.digest, image, exc.message)
        self._remember(found)
        with self._lock:
            self._referred[image] = found
        return found

    def _put_config(self) -> None:
        if not self._has_config:
            config = Descriptor(artifact.EMPTY_TYPE, digest_of(artifact.EMPTY), len(artifact.EMPTY))
            self._registry.put_blob(config, artifact.EMPTY)
            self._has_config = True

    def _publish(self, objects: dict[str, Item], new: Sequence[tuple[str, bool]], subject: Descriptor | None) -> bool:
        """Store the artifact, then tag each new key; whether all tags are ours."""
        self._put_config()
        body = artifact.build(objects, subject)
        if subject:
            self._registry.put_manifest(body, MANIFEST, digest_of(body))
        won = True
        for key, overwrite in new:
            won = self._tag(key, body, objects[key], overwrite=overwrite) and won
        for key, _ in new:
            self._forget(key)
        return won

    def _tag(self, key: str, body: bytes, item: Descriptor, *, overwrite: bool) -> bool:
        """Write the tag of ``key``; False when somebody else was first, as far as that can be seen."""
        tag = artifact.tag_of(key)
        checked = not overwrite and not _immutable(key)  # those say the same whoever writes them
        if checked and key in (self._objects(tag) or {}):
            return False
        faults.point("registry.publish.before-tag")
        self._registry.store_manifest(body, MANIFEST, tag)
        if not checked:
            return True
        there = (self._objects(tag) or {}).get(key)
        return there is not None and there.digest == item.digest


class _BlobReader(Source):
    def __init__(self, registry: Registry, item: Descriptor, key: str) -> None:
        self._registry, self._item, self._key = registry, item, key
        self.size = item.size

    def read(self, offset: int, length: int) -> bytes:
        return b"".join(self.pieces(offset, [length]))

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


def _descriptor_of(data: bytes | Path) -> Item:
    """Of bytes, or of what a local file has."""
    if isinstance(data, bytes):
        return Item(artifact.OBJECT, digest_of(data), len(data), data=data)
    with doing(f"read {data!s}"), open(data, "rb") as file:
        digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        return Item(artifact.OBJECT, digest, file.tell())


def _decode(body: bytes) -> artifact.Found:
    return decode(body, artifact.Found, "the manifest of an artifact")


def _immutable(key: str) -> bool:
    """Whether ``key`` names its content: whoever writes it writes the same."""
    return key.startswith(("blobs/", "trees/")) or (key.startswith("profiles/") and key.endswith((".trace", ".pack")))


def _image_of(key: str) -> str:
    """The image whose artifacts a key of `bootseer.image.record` is among, or empty."""
    folder, _, name = key.partition("/")
    return f"sha256:{name[:64]}" if folder == "images" and len(name) > 64 else ""
