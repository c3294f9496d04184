"""Images as registries and OCI layouts hold them: names, manifests, verified layers, unpacking, writing and pushing."""

from bootseer.oci.image import Image, open_image, preflight, resolve_digest
from bootseer.oci.inroot import open_in_root
from bootseer.oci.reference import Reference
from bootseer.oci.spec import ContainerConfig, Descriptor, ImageConfig, Manifest, RootFS, host_platform
from bootseer.oci.unpack import Unpacked, unpack
from bootseer.oci.write import LayerDir, push, write_layout

__all__ = [
    "ContainerConfig",
    "Descriptor",
    "Image",
    "ImageConfig",
    "LayerDir",
    "Manifest",
    "Reference",
    "RootFS",
    "Unpacked",
    "host_platform",
    "open_image",
    "open_in_root",
    "preflight",
    "push",
    "resolve_digest",
    "unpack",
    "write_layout",
]
