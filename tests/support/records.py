"""Records of images that were never converted."""

from __future__ import annotations

from bootseer.image.record import ImageRecord
from bootseer.oci import ImageConfig, RootFS


def record_of(image: str, tree: str) -> ImageRecord:
    """Of the image whose digest is 64 times the hex digit ``image``, and which has ``tree``."""
    config = ImageConfig(architecture="amd64", os="linux", rootfs=RootFS(diff_ids=()))
    return ImageRecord(
        image=f"sha256:{image * 64}", platform="linux/amd64", reference=f"localhost/{image}:1", tree=tree,
        config=config,
        layer_bytes=0, tree_bytes=0, stored_bytes=0, shared_bytes=0, packs=0, members=0, converted=1, seconds={},
    )  # fmt: skip
