"""Finding the converted image that a reference names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable

from bootseer import config as settings
from bootseer import oci
from bootseer.config import Config
from bootseer.errors import ConfigError, NotFoundError, PrivilegeError
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.objects import Store, open_store, signature
from bootseer.oci.spec import Platform

_SHOWN = 12
"""Digits of an image that are printed."""
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{6,64})")
"""Fewer than `_SHOWN` may be a name, too: they are where an image was converted by it, or none begins with them."""


def resolve(
    ref: oci.Reference | str,
    store: Store | str,
    *,
    platform: str = "",
    plain_http: bool | None = None,
    config: Config | None = None,
) -> ImageRecord:
    """The record of what ``ref`` names now, in ``store`` (or the one at that URL), for ``platform`` (default: this
    machine's). A tag is looked up at its registry, as it may have moved. ``config`` (None: the settings of this node)
    says whose signature it must have. Raises `NotFoundError` (no such image, or not converted into this store),
    `UnavailableError`, `UnsignedError`, and `ConfigError` for what is no key."""
    parsed = oci.Reference.parse(ref) if isinstance(ref, str) else ref
    store = open_store(store) if isinstance(store, str) else store
    if parsed.digest:
        with contextlib.suppress(NotFoundError):
            return converted(parsed, parsed.digest, store, config, platform=platform)
    digest = oci.resolve_digest(parsed, platform=platform, plain_http=plain_http)
    return converted(parsed, digest, store, config, platform=platform)


def converted(
    ref: oci.Reference | str, digest: str, store: Store, config: Config | None = None, *, platform: str = ""
) -> ImageRecord:
    """As `resolve`, when it is known that ``ref`` names the manifest ``digest``. No registry is asked."""
    keys = signature.trusted_keys(config or settings.load())
    try:
        return records.load(store, digest, platform or oci.host_platform(), keys)
    except NotFoundError:
        wanted = f" for {platform}" if platform else ""
        raise NotFoundError(
            f"image {ref} ({digest[:19]}) is not converted in store {store.shown}{wanted}",
            hint=f"run bootseer image convert {ref}" + (f" --platform {platform}" if platform else ""),
        ) from None


def named(
    text: str, store: Store, *, platform: str = "", plain_http: bool | None = None, config: Config | None = None
) -> list[ImageRecord]:
    """The records of what a user calls ``text``: a name, as `resolve` takes it, of one platform (default: this
    machine's); or the digest of an image, or first digits of it, of each platform that it was converted for (or of
    ``platform``). Raises as `resolve`, and `ConfigError` for digits that several images begin with."""
    platform = str(Platform.parse(platform)) if platform else ""
    if digits := _ID.fullmatch(text):
        images = records.platforms(store, digits[1])
        if images and len(text) < _SHOWN and _is_name(text, store):
            images = {}
        if len(images) > 1:
            raise ConfigError(f"several images begin with {digits[1]}", hint="give more digits")
        for image, found in images.items():
            if platform and platform not in found:
                hint = f"it is for {', '.join(found)}"
                raise NotFoundError(f"image {text} is not converted for {platform} in store {store.shown}", hint=hint)
            return [converted(text, image, store, config, platform=one) for one in ([platform] if platform else found)]
        if text.startswith("sha256:") or len(digits[1]) >= _SHOWN:
            raise NotFoundError(f"no image {text} in store {store.shown}", hint="bootseer store ls prints them")
    return [resolve(text, store, platform=platform, plain_http=plain_http, config=config)]


def _is_name(text: str, store: Store) -> bool:
    """Whether an image was converted by the name ``text``."""
    name = str(oci.Reference.parse(text))
    return any(one.reference == name for one in records.listing(store))


def only(
    text: str, store: Store, *, platform: str = "", plain_http: bool | None = None, config: Config | None = None
) -> ImageRecord:
    """The one of `named`: of several that for this machine. Raises as it, and `ConfigError` when none is."""
    found = named(text, store, platform=platform, plain_http=plain_http, config=config)
    fitting = [one for one in found if one.platform == oci.host_platform()] if len(found) > 1 else found
    if not fitting:
        known = ", ".join(one.platform for one in found)
        raise ConfigError(f"image {text} is converted for several platforms", hint=f"--platform says which: {known}")
    return fitting[0]


def converted_from(text: str, store: Store, platform: str = "") -> list[ImageRecord]:
    """The records, of each platform or of ``platform``, of what was converted by the name ``text``; nobody is asked
    what that names now. Raises `NotFoundError`, and `ConfigError` for several images."""
    name = text if text.startswith("sha256:") else str(oci.Reference.parse(text))  # nothing has a digest as its name
    platform = str(Platform.parse(platform)) if platform else ""
    found = [one for one in records.listing(store) if one.reference == name and platform in ("", one.platform)]
    if not found:
        raise NotFoundError(f"no image in store {store.shown} was converted from {name}")
    if len({one.image for one in found}) > 1:
        ids = ", ".join(dict.fromkeys(one.image[7 : 7 + _SHOWN] for one in found))
        raise ConfigError(f"several images were converted from {name}", hint=f"name them: {ids}")
    return found


def readable_for(
    ref: oci.Reference, store: Store, config: Config, digest_for: Callable[[oci.Reference], str]
) -> ImageRecord:
    """The record of the image that ``ref`` names at its registry, for somebody whom that registry, and the one that the
    image was converted from, give its manifest: ``digest_for`` asks a registry as this somebody. Raises
    `NotFoundError`, `PrivilegeError`, `UnavailableError` (also when a registry does not answer: then nobody knows who
    may read it), `UnsignedError`, `ConfigError`."""
    record = converted(ref, digest_for(ref), store, config)
    origin = oci.Reference.parse(record.reference)
    if not origin.registry:
        raise PrivilegeError(
            f"{ref} was converted from a file, {origin}: no registry says who may read it",
            hint="have root mount it, or convert it from its registry",
        )
    if not same_repository(ref, origin):
        exact = oci.Reference(registry=origin.registry, name=origin.name, digest=record.image)
        if digest_for(exact) != record.image:
            raise PrivilegeError(f"{exact} is not the image that was converted")
    return record


def same_repository(ref: oci.Reference, origin: oci.Reference, mirrors: Iterable[str] = ()) -> bool:
    """Whether ``ref`` is in the repository of ``origin``, or in its place at one of the ``mirrors`` of that registry
    (`Config.registry_mirrors`). That another registry gives somebody the manifest says nothing: who had it once may
    push it anywhere."""
    places = {(origin.registry, origin.name)} if origin.registry else set()
    for mirror in mirrors if places else ():
        host, _, prefix = mirror.rpartition("://")[2].partition("/")
        places.add((host, "/".join(filter(None, (prefix.strip("/"), origin.name)))))
    return (ref.registry, ref.name) in places
