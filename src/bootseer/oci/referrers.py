"""Artifacts that refer to an image, where the registry keeps no list of them: the fallback tag (distribution spec 1.1).

The index tagged ``sha256-<hex>`` lists the artifacts with subject ``sha256:<hex>``. Registries have no conditional
write, so an entry is added by reading, writing and looking again: an entry that another writer overwrote between is
entered again. Within a process writers of one repository take turns. Two processes can still lose an entry when one
writes long after its read; bootseer finds its own objects by their own tags as well (`bootseer.store.registry`).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from bootseer.errors import DataError, NotFoundError, UnavailableError
from bootseer.oci import spec
from bootseer.oci._turns import turn
from bootseer.oci.reference import Reference
from bootseer.oci.spec import INDEX, Descriptor, Index, digest_of

log = logging.getLogger(__name__)

_TRIES = 8
_SETTLE = 0.05
"""Seconds between writing the index and looking at it again: others that read before us have mostly written by then."""


class _Artifact(msgspec.Struct, frozen=True, rename="camel"):
    """What an index entry needs of a manifest."""

    config: Descriptor | None = None
    artifact_type: str = ""
    subject: Descriptor | None = None
    annotations: dict[str, str] | None = None


class _Index(msgspec.Struct, frozen=True, rename="camel"):
    manifests: tuple[msgspec.Raw, ...] = ()
    schema_version: int = 2
    media_type: str = INDEX


def tag_of(digest: str) -> str:
    """``sha256-<hex>``: the fallback tag of a subject."""
    return digest.replace(":", "-")[:128]


class Registry(Protocol):
    """What is needed of a `bootseer.oci.registry.Registry`; its ``repr`` names registry and repository."""

    ref: Reference

    def manifest(
        self, selector: str, *, accept: Sequence[str] = ..., fresh: bool = ...
    ) -> tuple[bytes, Descriptor]: ...

    def store_manifest(self, body: bytes, media_type: str, selector: str) -> bool: ...


def fallback(registry: Registry, digest: str) -> tuple[Descriptor, ...]:
    """The entries of the fallback index; none when there is no index."""
    try:
        body, _ = registry.manifest(tag_of(digest), accept=(INDEX,), fresh=True)
    except NotFoundError:
        return ()
    return spec.decode(body, Index, f"referrers of {digest} in registry {registry.ref.registry}").manifests


def enter(registry: Registry, body: bytes, media_type: str) -> None:
    """Enter the artifact manifest ``body`` in its subject's fallback index; nothing to do without a subject."""
    artifact = msgspec.json.decode(body, type=_Artifact)
    if artifact.subject is None:
        return
    kind = artifact.artifact_type or (artifact.config.media_type if artifact.config else "")
    entry = Descriptor(media_type, digest_of(body), len(body), annotations=artifact.annotations, artifact_type=kind)
    subject, tag = artifact.subject.digest, tag_of(artifact.subject.digest)
    with turn(f"{registry!r}@{subject}"):
        for attempt in range(_TRIES):
            entries = _entries(registry, tag)
            if entry.digest in entries:
                return
            entries[entry.digest] = msgspec.Raw(msgspec.json.encode(entry))
            index = msgspec.json.encode(_Index(tuple(entries.values())))
            registry.store_manifest(index, INDEX, tag)
            time.sleep(_SETTLE * (1 + attempt) * random.uniform(0.5, 1.5))
            if attempt:
                log.info("the index of artifacts of %s was changed by others: entering %s again", subject, entry.digest)
    if entry.digest not in _entries(registry, tag):
        raise UnavailableError(
            f"cannot enter artifact {entry.digest} for {subject} in registry {registry.ref.registry}: others keep"
            " changing the index",
            hint="run again",
        )


def _entries(registry: Registry, tag: str) -> dict[str, msgspec.Raw]:
    """Digest -> entry, in order and byte for byte as others wrote them."""
    try:
        body, _ = registry.manifest(tag, accept=(INDEX,), fresh=True)
    except NotFoundError:
        return {}
    try:
        items = msgspec.json.decode(body, type=_Index).manifests
        return {msgspec.json.decode(bytes(item), type=Descriptor).digest: item for item in items}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise DataError(f"tag {tag} in registry {registry.ref.registry} is no index of artifacts: {exc}") from None
