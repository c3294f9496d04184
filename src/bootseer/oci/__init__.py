"""Images as registries and OCI layouts hold them: names, manifests, verified layers, and unpacking. What handles layers
is loaded when it is first used: block servers wait for each module that they import."""

import importlib
from typing import TYPE_CHECKING

from bootseer.oci.reference import Reference, in_files
from bootseer.oci.spec import ContainerConfig, ImageConfig, RootFS, host_platform

if TYPE_CHECKING:
    from bootseer.oci.folder import unpack
    from bootseer.oci.image import Image, digest_for, open_image, preflight, resolve_digest

__all__ = [
    "ContainerConfig",
    "Image",
    "ImageConfig",
    "Reference",
    "RootFS",
    "digest_for",
    "host_platform",
    "in_files",
    "open_image",
    "preflight",
    "resolve_digest",
    "unpack",
]

_LAZY = {
    "Image": "image",
    "digest_for": "image",
    "open_image": "image",
    "preflight": "image",
    "resolve_digest": "image",
    "unpack": "folder",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"bootseer.oci.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'bootseer.oci' has no attribute {name!r}")
