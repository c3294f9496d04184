"""`bootseer run` with the strongest other tools in place of the ordinary ones: ``python -m bench.cluster.mix ...``

hdfs-native copies the checkpoint. The image comes through nydusd, which prefetches what the job is known to open, where
``CLUSTER_NYDUS`` has the arguments of `peers.nydus`; containerd pulls it else. uv stands in the job file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from bench.common import ordinary, peers
from bootseer import oci
from bootseer.kernel import mount

_STREAMS = 4
_CHUNK = 8 << 20


def copy(url: str, destination: Path) -> None:
    """Copy every file below ``url`` with hdfs-native, several ranges at once."""
    from hdfs_native import Client, FileStatus

    destination.mkdir(parents=True, exist_ok=True)
    root, _, path = url.removeprefix("hdfs://").partition("/")
    client = Client(f"hdfs://{root}")

    def fetch(status: FileStatus, start: int) -> None:
        with client.read(status.path) as reader:
            data = reader.read_range(start, min(_CHUNK, status.length - start))
        with open(destination / os.path.basename(status.path), "r+b") as out:
            out.seek(start)
            out.write(data)

    files = [status for status in client.list_status(f"/{path}") if not status.isdir]
    for status in files:
        (destination / os.path.basename(status.path)).touch()
    with ThreadPoolExecutor(_STREAMS) as pool:
        ranges = ((status, start) for status in files for start in range(0, status.length, _CHUNK))
        for _ in pool.map(lambda one: fetch(*one), ranges):
            pass


@contextlib.contextmanager
def nydus_rootfs(ref: str, rootfs: Path) -> Iterator[oci.Image]:
    """Stands in for `bootseer.launch.node.unpacked`: the image served by nydusd, writable by an overlay."""
    work = Path(os.environ["BOOTSEER_CACHE_DIR"], "nydus")  # what is in its cache stays on the node
    work.mkdir(exist_ok=True)
    upper, inner = rootfs.with_name("upper"), rootfs.with_name("inner")
    for folder in (upper, inner, rootfs):
        folder.mkdir(exist_ok=True)
    with oci.open_image(ref) as pulled, peers.nydus(work, **json.loads(os.environ["CLUSTER_NYDUS"])) as lower:
        mount.mount_overlay([lower], rootfs, upper=upper, work=inner)
        try:
            yield pulled
        finally:
            mount.unmount(rootfs)


def main() -> None:
    from bootseer.cli import main as cli

    rootfs = nydus_rootfs if os.environ.get("CLUSTER_NYDUS") else ordinary.containerd_rootfs
    with (
        mock.patch("bootseer.launch.node.unpacked", rootfs),
        mock.patch("bootseer.launch.checkpoint.copy_checkpoint", copy),
    ):
        cli.main()


if __name__ == "__main__":
    main()
