"""An OCI layout pushed to a registry; and what writes layouts, under one name."""

from __future__ import annotations

from bootseer.errors import ConfigError
from bootseer.oci.image import open_image
from bootseer.oci.layout import Layout
from bootseer.oci.reference import Reference
from bootseer.oci.registry import Registry
from bootseer.oci.write import Compression, LayerDir, write_layout

__all__ = ["Compression", "LayerDir", "push", "write_layout"]


def push(layout: Reference | str, ref: Reference | str, *, plain_http: bool | None = None) -> str:
    """Upload the image ``layout`` (``oci:DIR[:tag]``) to ``ref``; blobs first, the manifest last. Returns its digest.

    The manifest is read back and compared. Raises `UnavailableError`, `NotWritableError`, `PrivilegeError`.
    """
    source = Reference.parse(layout) if isinstance(layout, str) else layout
    target = Reference.parse(ref) if isinstance(ref, str) else ref
    if not source.layout or not target.registry:
        raise ConfigError(f"push goes from an OCI layout to a registry, not from {source} to {target}")
    with open_image(source) as image, Registry(target, plain_http=plain_http) as registry:
        assert isinstance(image.source, Layout)
        body, _ = image.source.manifest(image.digest)
        for item in (*image.layers, image.manifest.config):
            registry.put_blob(item, image.source.blob_path(item.digest))
        if target.digest and target.digest != image.digest:
            raise ConfigError(f"{target} names another digest than {source}")
        return registry.put_manifest(body, image.descriptor.media_type, target.tag or image.digest)
