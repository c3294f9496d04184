"""Finding the converted image that a reference names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from bootseer import config as settings
from bootseer import oci
from bootseer.config import Config
from bootseer.errors import NotFoundError, PrivilegeError
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.objects import Store, open_store, signature


def resolve(
    ref: oci.Reference | str, store: Store | str, *, plain_http: bool | None = None, config: Config | None = None
) -> ImageRecord:
    """The record of what ``ref`` names now, in ``store`` (or the one at that URL). A tag is looked up at its registry,
    as it may have moved. ``config`` (None: the settings of this node) says whose signature it must have.

    Raises `NotFoundError` (no such image, or not converted into this store), `UnavailableError`, `UnsignedError`, and
    `ConfigError` for what is no key.
    """
    parsed = oci.Reference.parse(ref) if isinstance(ref, str) else ref
    store = open_store(store) if isinstance(store, str) else store
    if parsed.digest:
        with contextlib.suppress(NotFoundError):
            return converted(parsed, parsed.digest, store, config)
    return converted(parsed, oci.resolve_digest(parsed, plain_http=plain_http), store, config)


def converted(ref: oci.Reference, digest: str, store: Store, config: Config | None = None) -> ImageRecord:
    """As `resolve`, when it is known that ``ref`` names the manifest ``digest``. No registry is asked."""
    keys = signature.trusted_keys(config or settings.load())
    try:
        return records.load(store, digest, oci.host_platform(), keys)
    except NotFoundError:
        raise NotFoundError(
            f"image {ref} ({digest[:19]}) is not converted in store {store.shown}",
            hint=f"run bootseer image convert {ref}",
        ) from None


def readable_for(
    ref: oci.Reference, store: Store, config: Config, digest_for: Callable[[oci.Reference], str]
) -> ImageRecord:
    """The record of the image that ``ref`` names at its registry, for somebody whom that registry, and the one that the
    image was converted from, give its manifest: ``digest_for`` asks a registry as this somebody.

    Raises `NotFoundError`, `PrivilegeError`, `UnavailableError` (also when a registry does not answer: then nobody
    knows who may read it), `UnsignedError`, `ConfigError`.
    """
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
