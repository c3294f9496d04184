"""An image opened at its registry or layout: resolved for one platform, with verifying streams of its layers.

What reads layouts and archives is loaded for these alone: a start waits for each module.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from bootseer.closing import Closing
from bootseer.errors import DataError, NotFoundError, UnavailableError, UnsupportedError, logged
from bootseer.oci import spec
from bootseer.oci.credentials import Logins
from bootseer.oci.reference import Reference
from bootseer.oci.registry import Registry

if TYPE_CHECKING:
    from bootseer.oci.archive import Archive
    from bootseer.oci.layout import Layout

    Source = Registry | Layout | Archive

log = logging.getLogger(__name__)
T = TypeVar("T")
_INDEXES = 4
"""How deep indexes may name indexes."""
_UNSAID = 32
"""Entries without a platform of one index that are asked for theirs: no index of many platforms has more."""


class Image(Closing):
    """One image for one platform. ``digest`` names its manifest (never an index); ``layers`` are compressed blobs.

    Use as a context manager, or `close` it: it may hold connections.
    """

    def __init__(
        self,
        ref: Reference,
        source: Source,
        descriptor: spec.Descriptor,
        manifest: spec.Manifest,
        config: spec.ImageConfig,
        platform: spec.Platform,
    ) -> None:
        self.ref = ref
        self.platform = str(platform)
        """``os/architecture[/variant]`` that it was asked for."""
        self.digest = descriptor.digest
        self.manifest = manifest
        self.config = config
        self.layers = manifest.layers
        self.source = source
        self.descriptor = descriptor
        """Of the manifest: what artifacts made from this image name as their subject."""
        if len(config.rootfs.diff_ids) != len(self.layers):
            raise DataError(f"image {ref} has {len(self.layers)} layers but {len(config.rootfs.diff_ids)} diff ids")
        found = spec.Platform(config.architecture, config.os, config.variant or platform.variant).normal()
        if not found.fits(platform):
            raise DataError(
                f"image {ref} is for {found}, not for {platform}", hint=f"convert it with --platform {found}"
            )
        for layer in self.layers:
            layer.hex  # noqa: B018 - raises for a digest that is not sha256
            if layer.media_type not in spec.LAYER_TYPES:
                raise UnsupportedError(
                    f"image {ref} has a layer of type {layer.media_type!r}, which is not read",
                    hint="layers are tar, plain or compressed by gzip or zstd; build or copy the image so",
                )

    def layer_chunks(self, index: int) -> Iterator[bytes]:
        """The compressed bytes of layer ``index``, bottom first; `DataError` at the latest with the last chunk."""
        item = self.layers[index]
        try:
            yield from verified(self.source.blob(item), item, f"layer {item.digest} of {self.ref}")
        except NotFoundError:
            if not item.media_type.startswith(spec.ELSEWHERE):
                raise
            raise NotFoundError(
                f"layer {item.digest} of {self.ref} is not there: by its type its owner alone gives it away",
                hint="push the image with all its layers",
            ) from None

    def bottom(self, count: int) -> Image:
        """The image that the first ``count`` layers make; it shares the connections of this one."""
        rootfs = msgspec.structs.replace(self.config.rootfs, diff_ids=self.config.rootfs.diff_ids[:count])
        manifest = msgspec.structs.replace(self.manifest, layers=self.layers[:count])
        config = msgspec.structs.replace(self.config, rootfs=rootfs)
        return Image(self.ref, self.source, self.descriptor, manifest, config, spec.Platform.parse(self.platform))

    def close(self) -> None:
        self.source.close()


def verified(chunks: Iterator[bytes], item: spec.Descriptor, what: str) -> Iterator[bytes]:
    """Pass ``chunks`` through; `DataError` when their total length or digest is not the descriptor's."""
    hasher, size = hashlib.sha256(), 0
    for chunk in chunks:
        size += len(chunk)
        if size > item.size:
            raise DataError(f"{what} is longer than its {item.size} bytes")
        hasher.update(chunk)
        yield chunk
    if size != item.size:
        raise DataError(f"{what} is truncated: {size} of {item.size} bytes")
    if hasher.hexdigest() != item.hex:
        raise DataError(f"{what} is corrupt: its bytes do not match its digest")


def open_image(
    ref: Reference | str, *, platform: str = "", plain_http: bool | None = None, spool: Path | None = None
) -> Image:
    """Resolve ``ref`` for ``platform`` (``os/architecture[/variant]``; default: this machine's) and read its manifest
    and configuration. ``spool``: see `Members`.

    Raises `NotFoundError` (no such image), `UnavailableError` (no answer), `DataError` (malformed, or not for
    this platform), `PrivilegeError` (the registry wants a login).
    """
    ref = Reference.parse(ref) if isinstance(ref, str) else ref
    source = _source(ref, plain_http, spool)
    with contextlib.ExitStack() as undo:
        undo.callback(source.close)
        wanted = spec.Platform.parse(platform or spec.host_platform())
        image = past_mirrors(source, lambda: _opened(ref, source, wanted))
        undo.pop_all()
    return image


def _opened(ref: Reference, source: Source, wanted: spec.Platform) -> Image:
    body, item = _manifest(ref, source, wanted)
    manifest = spec.decode(body, spec.Manifest, f"manifest of {ref}")
    if manifest.config.media_type not in spec.CONFIG_TYPES:
        kind = manifest.artifact_type or manifest.config.media_type
        raise UnsupportedError(f"{ref} is no image, but an artifact of type {kind!r}", hint="name an image")
    what = f"configuration of {ref}"
    if manifest.config.size > spec.MAX_DOCUMENT:
        raise DataError(f"{what} is larger than {spec.MAX_DOCUMENT} bytes")
    raw = b"".join(verified(source.blob(manifest.config), manifest.config, what))
    return Image(ref, source, item, manifest, spec.decode(raw, spec.ImageConfig, what), wanted)


def resolve_digest(ref: Reference | str, *, platform: str = "", plain_http: bool | None = None) -> str:
    """The digest of the manifest that ``ref`` names now, for ``platform`` (default: this machine's); at most two small
    requests."""
    ref = Reference.parse(ref) if isinstance(ref, str) else ref
    wanted = spec.Platform.parse(platform or spec.host_platform())
    with contextlib.closing(_source(ref, plain_http)) as source:
        return past_mirrors(source, lambda: _manifest(ref, source, wanted)[1].digest)


def digest_for(ref: Reference, logins: Logins | None) -> str:
    """As `resolve_digest`, of an image in a registry, which is asked with these ``logins`` and no others, for a
    stranger (None: with those of this user). No mirrors are asked: those let anybody in."""
    with Registry(ref, mirrors=(), logins=logins, stranger=logins is not None) as registry:
        return _manifest(ref, registry, spec.Platform.parse(spec.host_platform()))[1].digest


def preflight(ref: Reference | str, *, plain_http: bool | None = None, resolved: bool = False) -> None:
    """Make sure, before anything is mounted, that this job's login may read ``ref`` at its registry.

    Raises `PrivilegeError` and `NotFoundError`. A registry that does not answer is a warning only: it may be down while
    everything needed is in the store and on this node. One small request; none for images in layouts and archives, and
    for a tag that is ``resolved`` already, where only the registry itself can have told its digest.
    """
    ref = Reference.parse(ref) if isinstance(ref, str) else ref
    if not ref.registry:
        return
    unchecked = logged(log.warning, "access to %s is not checked", ref, kinds=UnavailableError)
    with Registry(ref, plain_http=plain_http) as registry, unchecked:
        if ref.digest or registry.mirrored or not resolved:
            registry.head_manifest(ref.selector, retries=0)


def _source(ref: Reference, plain_http: bool | None, spool: Path | None = None) -> Source:
    if ref.registry:
        return Registry(ref, plain_http=plain_http)
    from bootseer.oci.archive import Archive
    from bootseer.oci.layout import Layout
    from bootseer.oci.members import Members

    if ref.layout:
        return Layout(Path(ref.layout))
    members = Members(Path(ref.archive), spool)
    with contextlib.ExitStack() as undo:
        undo.callback(members.close)
        layout = ref.is_oci_archive or ("manifest.json" not in members and "oci-layout" in members)
        source = Layout(members.path, members) if layout else Archive(members)
        undo.pop_all()
    return source


def _manifest(ref: Reference, source: Source, wanted: spec.Platform) -> tuple[bytes, spec.Descriptor]:
    """The manifest for a platform, and its descriptor. What is an index its media type says; one may name others."""
    body, item = source.manifest(ref.selector)
    for _ in range(_INDEXES):
        if item.media_type not in spec.INDEX_TYPES:
            break
        index = spec.decode(body, spec.Index, f"index of {ref}")
        child = spec.select(_said(index, source, wanted, ref), wanted, f"image {ref}")
        body, found = source.manifest(f"sha256:{child.hex}")
        item = spec.Descriptor(child.media_type, found.digest, found.size)
        if child.size != found.size or found.media_type not in ("", child.media_type):
            raise DataError(
                f"index of {ref} calls {child.digest} {child.media_type!r} of {child.size} bytes,"
                f" it is {found.media_type!r} of {found.size} bytes"
            )
    if item.media_type not in spec.IMAGE_TYPES:
        if spec.decode(body, spec.Document, f"manifest of {ref}").fs_layers is not None:
            hint = "push the image again with docker, podman or skopeo of today"
            raise UnsupportedError(f"{ref} has a manifest of schema 1, which is not read", hint=hint)
        raise DataError(f"{ref} is not a valid manifest of an image: its media type is {item.media_type!r}")
    return body, item


def _said(index: spec.Index, source: Source, wanted: spec.Platform, ref: Reference) -> spec.Index:
    """``index`` with what its entries that name no platform say themselves, where it matters: indexes what is in them,
    images what their configuration says."""
    items = spec.images_of(index.manifests)
    unsaid = [item for item in items if item.platform is None]
    same = any(item.platform and item.platform.normal() == wanted for item in items)
    if same or len(items) == 1 or not unsaid:
        return index
    if len(unsaid) > _UNSAID:
        log.warning("%s has %d entries without a platform, which are not asked for theirs", ref, len(unsaid))
        return index
    found = [item for item in items if item.platform]
    for item in (one for one in unsaid if one.media_type in spec.MANIFEST_TYPES):
        with logged(log.warning, "an entry of %s is passed over", ref, kinds=(NotFoundError, DataError)):
            found += _asked(item, source, ref)
    return msgspec.structs.replace(index, manifests=tuple(found))


def _asked(item: spec.Descriptor, source: Source, ref: Reference) -> Iterable[spec.Descriptor]:
    """What an entry without a platform stands for: itself with the platform of its configuration, what is in it, or
    nothing. Raises `NotFoundError` and `DataError`."""
    body, _ = source.manifest(f"sha256:{item.hex}")
    if item.media_type in spec.INDEX_TYPES:
        return spec.decode(body, spec.Index, f"index {item.digest} of {ref}").manifests
    config = spec.decode(body, spec.Manifest, what := f"manifest {item.digest} of {ref}").config
    if config.media_type not in spec.CONFIG_TYPES or config.size > spec.MAX_DOCUMENT:
        return ()
    raw = past_mirrors(source, lambda: b"".join(verified(source.blob(config), config, what)))
    told = spec.decode(raw, spec.ImageConfig, what)
    return (msgspec.structs.replace(item, platform=spec.Platform(told.architecture, told.os, told.variant)),)


def past_mirrors(source: Source, doing: Callable[[], T]) -> T:
    """What ``doing`` returns; when it finds damaged bytes and mirrors may have given them, it is done once more
    without mirrors."""
    try:
        return doing()
    except DataError as exc:
        if not (isinstance(source, Registry) and source.leave_mirrors()):
            raise
        log.warning("%s; again, with what the registry itself gives", exc.message)
    return doing()
