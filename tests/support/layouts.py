"""An OCI layout pushed to a registry, or written with layers that are compressed as others do it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, cast

import zstandard

from bootseer import oci
from bootseer.errors import ConfigError
from bootseer.oci import write
from bootseer.oci.image import open_image
from bootseer.oci.layout import Layout
from bootseer.oci.reference import Reference
from bootseer.oci.registry import Registry
from bootseer.oci.write import LayerDir

__all__ = ["Compression", "LayerDir", "push", "write_layout"]

Compression = Literal["gzip", "zstd", "none"]


def write_layout(
    folder: Path,
    layers: Sequence[Path | LayerDir],
    config: oci.ContainerConfig,
    tag: str,
    *,
    compression: Compression | Sequence[Compression] = "gzip",
    level: int | None = None,
) -> str:
    """`write.write_layout` with this ``compression`` of all layers, or of each. ``level``: that of gzip, by pigz."""
    gzip = write.packed_by_gzip if level is None else partial(_pigz, level)
    packers = {"gzip": ("+gzip", gzip), "zstd": ("+zstd", _zstd), "none": ("", contextlib.nullcontext)}
    kinds = [compression] * len(layers) if isinstance(compression, str) else compression
    return write.write_layout(folder, layers, config, tag, packers=[packers[kind] for kind in kinds])


@contextlib.contextmanager
def _zstd(out: BinaryIO) -> Iterator[BinaryIO]:
    machine = zstandard.ZstdCompressor(level=3, threads=len(os.sched_getaffinity(0)))
    with machine.stream_writer(out, closefd=False) as sink:
        yield cast(BinaryIO, sink)


@contextlib.contextmanager
def _pigz(level: int, out: BinaryIO) -> Iterator[BinaryIO]:
    argv = ["pigz", "-n", "-c", f"-{level}", "-p", str(len(os.sched_getaffinity(0)))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out) as process:
        yield cast(BinaryIO, process.stdin)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, argv)


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
            registry.put_blob(item, image.source.root / "blobs/sha256" / item.hex)
        if target.digest and target.digest != image.digest:
            raise ConfigError(f"{target} names another digest than {source}")
        return registry.put_manifest(body, image.descriptor.media_type, target.tag or image.digest)
