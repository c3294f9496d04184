"""The documents of OCI and Docker v2 images as typed records (OCI image-spec 1.1)."""

from __future__ import annotations

import hashlib
import platform as _platform
import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec

from bootseer.errors import ConfigError, DataError
from bootseer.wiretypes import json_as, known

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
CONFIG_TYPES = (CONFIG, "application/vnd.docker.container.image.v1+json", "application/octet-stream", "")
"""Of images. The last two are of old ones; another type makes an artifact."""
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
_TAR = (LAYER, "application/vnd.oci.image.layer.nondistributable.v1.tar")
_DOCKER_TAR = ("application/vnd.docker.image.rootfs.diff.tar", "application/vnd.docker.image.rootfs.foreign.diff.tar")
ELSEWHERE = (_TAR[1], _DOCKER_TAR[1])
"""How types of layers begin that need not be in the registry."""
LAYER_TYPES = frozenset(kind + end for kind in _TAR for end in ("", "+gzip", "+zstd")) | frozenset(
    kind + end for kind in _DOCKER_TAR for end in ("", ".gzip", ".zstd")
)
"""Of layers that are read: all are tar, plain or compressed by gzip or zstd."""
INDEX_TYPES = (INDEX, DOCKER_LIST)
IMAGE_TYPES = (MANIFEST, DOCKER_MANIFEST)
MANIFEST_TYPES = (*IMAGE_TYPES, *INDEX_TYPES)
MAX_DOCUMENT = 8 << 20
"""A manifest, index or config larger than this is refused (registries cap manifests at 4 MiB)."""

_ANY = ("application/json", "application/octet-stream", "text/plain")
"""What servers of files say of a document that they do not know."""

_ARCH = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


_COMMON = {"amd64": "v1", "arm64": "v8", "arm": "v7"}
"""The variant of an architecture that goes without saying; some images say it, others do not."""
_LEVEL = re.compile(r"v(\d+)(?:\.(\d+))?\Z", re.ASCII)
_PLATFORM = re.compile(r"[a-z0-9]\w*(/[a-z0-9][\w.-]*){1,2}\Z", re.ASCII)


class Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> Platform:
        """``os/architecture[/variant]``; `ConfigError` when ``text`` is no such thing."""
        if not _PLATFORM.match(text):
            raise ConfigError(f"bad platform {text!r}", hint="write OS/ARCH[/VARIANT], such as linux/arm64")
        os, architecture, variant = [*text.split("/"), ""][:3]
        return cls(architecture, os, variant).normal()

    def normal(self) -> Platform:
        """The same with one spelling: ``linux/aarch64`` and ``linux/arm64/v8`` are ``linux/arm64``."""
        architecture = _ARCH.get(self.architecture, self.architecture)
        variant = "" if self.variant == _COMMON.get(architecture) else self.variant
        return Platform(architecture, self.os, variant)

    def fits(self, wanted: Platform) -> bool:
        """Whether machines such as ``wanted`` run images for this: lower variants, too, and any where none is said."""
        if (self.os, self.architecture) != (wanted.os, wanted.architecture):
            return False
        return not wanted.variant or self.variant == wanted.variant or () < self._level <= wanted._level

    def behind(self, wanted: Platform) -> tuple[bool, bool, tuple[int, ...]]:
        """Of those that fit, the least is the best for ``wanted``: the same, the next lower one, the next higher."""
        above = self._level > wanted._level
        return self != wanted, above, self._level if above else tuple(-number for number in self._level)

    @property
    def _level(self) -> tuple[int, ...]:
        """How much its variant asks of a machine; empty where that is not known."""
        found = _LEVEL.match(self.variant or _COMMON.get(self.architecture, ""))
        return (int(found[1]), int(found[2] or 0)) if found else ()

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


ATTESTATION = Platform("unknown", "unknown")
"""Of what BuildKit says of an image, beside it in an index."""
_ATTESTED = "vnd.docker.reference.type"
"""Annotation that says the same."""


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A typed pointer to a blob: size in bytes and ``sha256:...`` digest."""

    media_type: str
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    platform: Platform | None = None
    annotations: dict[str, str] | None = None
    artifact_type: str = ""
    """Of an artifact in the list of those that refer to an image."""

    @property
    def hex(self) -> str:
        """The digest's 64 hex digits; `DataError` when it is not a sha256 digest."""
        algorithm, _, text = self.digest.partition(":")
        if algorithm != "sha256" or len(text) != 64 or not set(text) <= set("0123456789abcdef"):
            raise DataError(f"unsupported digest {self.digest!r} in an image")
        return text


class Manifest(msgspec.Struct, frozen=True, rename="camel", omit_defaults=False):
    schema_version: int
    config: Descriptor
    layers: tuple[Descriptor, ...] = ()
    media_type: str = MANIFEST
    artifact_type: str | msgspec.UnsetType = msgspec.UNSET


class Index(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: int
    manifests: tuple[Descriptor, ...] = ()
    media_type: str = INDEX


class Document(msgspec.Struct, frozen=True, rename="camel"):
    """What of a document says whether it is a manifest or an index."""

    media_type: str = ""
    manifests: Any = None
    config: Any = None
    layers: Any = None
    fs_layers: Any = None
    """Of Docker's schema 1."""


class ContainerConfig(msgspec.Struct, frozen=True, rename="pascal", omit_defaults=True):
    """How to start a container of the image: the ``config`` object of the image configuration."""

    user: str = ""
    env: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | str | None = None
    cmd: tuple[str, ...] | str | None = None
    working_dir: str = ""
    labels: dict[str, str | None] | None = None
    volumes: dict[str, Any] | None = None
    stop_signal: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """``env``, by name; what has none is no variable."""
        return dict(item.partition("=")[::2] for item in self.env or () if item[:1] not in ("", "="))


class RootFS(msgspec.Struct, frozen=True):
    diff_ids: tuple[str, ...] = ()
    type: str = "layers"

    @property
    def chain_ids(self) -> list[str]:
        """For each layer the digest that names it together with all below it (image-spec 1.1, "Layer ChainID")."""
        chains: list[str] = []
        for diff_id in self.diff_ids:
            chains.append(digest_of(f"{chains[-1]} {diff_id}".encode()) if chains else diff_id)
        return chains


class ImageConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The image configuration document; ``rootfs.diff_ids`` are digests of the uncompressed layers."""

    architecture: str
    os: str
    rootfs: RootFS
    config: ContainerConfig | None = None
    variant: str = ""
    created: Any = None


T = TypeVar("T")


def decode(data: bytes, kind: type[T], what: str) -> T:
    """Parse a JSON document into ``kind``; `DataError` naming ``what`` when it does not fit."""
    try:
        try:
            return json_as(data, kind)
        except msgspec.ValidationError:
            return msgspec.convert(_without_nulls(json_as(data, object)), known(kind))
    except ValueError as exc:
        raise DataError(f"{what} is not a valid {kind.__name__.lower()}: {exc}") from None


def _without_nulls(document: object) -> object:
    """Without the fields that are null: Go writes that for what is empty, and reads it as if the field were missing."""
    inside = [document]
    while inside:
        one = inside.pop()
        if isinstance(one, dict):
            for name in [name for name, value in one.items() if value is None]:
                del one[name]
            inside += one.values()
        elif isinstance(one, list):
            inside += one
    return document


def describe(body: bytes, media_type: str, what: str) -> Descriptor:
    """Of the manifest or index ``body``, whose media type is ``media_type`` to who gave it (empty, or of `_ANY`: nobody
    says). `DataError` when the document says otherwise, or can be read as a manifest and as an index (CVE-2021-41190).
    """
    found = decode(body, Document, f"{what}, given as {media_type!r}," if media_type else what)
    media_type = "" if media_type in _ANY else media_type
    if media_type and found.media_type not in ("", media_type):
        raise DataError(f"{what} was given as {media_type!r} and calls itself {found.media_type!r}")
    if found.manifests and (found.layers or found.config):
        raise DataError(f"{what} has the fields of an index and of a manifest")
    return Descriptor(media_type or found.media_type, digest_of(body), len(body))


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def host_platform() -> str:
    """This machine's platform in OCI words, such as ``linux/amd64``."""
    machine = _platform.machine()
    return f"linux/{_ARCH.get(machine, machine)}"


def images_of(items: Iterable[Descriptor]) -> list[Descriptor]:
    """Those that may be images: no attestations, and no artifacts beside others."""
    found = [item for item in items if item.platform != ATTESTATION and _ATTESTED not in (item.annotations or {})]
    return [item for item in found if not item.artifact_type] or found


def select(index: Index, wanted: Platform, what: str) -> Descriptor:
    """The descriptor of ``index`` that is the best for ``wanted`` (`Platform.normal`); `DataError` when none fits."""
    images = images_of(index.manifests)
    items = [(item.platform.normal(), item) for item in images if item.platform]
    if fit := [one for one in items if one[0].fits(wanted)]:
        return min(fit, key=lambda one: one[0].behind(wanted))[1]
    if len(images) == 1 and images[0].platform is None:
        return images[0]
    have = sorted(str(platform) for platform, _ in items)
    else_has = "attestations alone" if index.manifests and not images else "none"
    raise DataError(f"{what} has no image for {wanted}", hint=f"it has {', '.join(have) or else_has}")
