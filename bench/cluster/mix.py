"""`bootseer run` with the strongest other tools in place of the ordinary ones: ``python -m bench.cluster.mix ...``

hdfs-native copies the checkpoint. The image comes through nydusd, which prefetches what the job is known to open, where
``CLUSTER_NYDUS`` has the arguments of `peers.Nydus`; containerd pulls it else. uv stands in the job file.
"""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

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


class NydusRootfs:
    """Stands in for `bootseer.launch.ordinary.containerd_rootfs`: the image at ``rootfs``, writable by an overlay."""

    def __init__(self, ref: str, address: str, rootfs: Path, *, plain_http: bool) -> None:
        self.rootfs = rootfs
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> NydusRootfs:
        from bench.common import peers
        from bootseer.kernel import mount

        work = Path(os.environ["BOOTSEER_CACHE_DIR"], "nydus")  # what is in its cache stays on the node
        work.mkdir(exist_ok=True)
        upper, inner = self.rootfs.with_name("upper"), self.rootfs.with_name("inner")
        upper.mkdir()
        inner.mkdir()
        self.rootfs.mkdir(exist_ok=True)
        with self._stack as stack:
            lower = stack.enter_context(peers.Nydus(work, **json.loads(os.environ["CLUSTER_NYDUS"])))
            mount.mount_overlay([lower.target], self.rootfs, upper=upper, work=inner)
            stack.callback(mount.unmount, self.rootfs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()


def main() -> None:
    from bootseer.cli import main as cli

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("bootseer.launch.checkpoint.copy_checkpoint", copy))
        if os.environ.get("CLUSTER_NYDUS"):
            stack.enter_context(mock.patch("bootseer.launch.node.containerd_rootfs", NydusRootfs))
        cli.main()


if __name__ == "__main__":
    main()
