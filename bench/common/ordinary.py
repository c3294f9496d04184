"""`bootseer run` with the ordinary tools where a technique is switched off: ``python -m bench.common.ordinary run ...``

As a competent user does it today. Image: ``ctr images pull`` (layers in parallel, ``unpigz`` where installed) into the
snapshotter of the containerd at ``BENCH_CONTAINERD``. Checkpoint: Hadoop's own client, which ``BENCH_HDFS_CLIENT``
names, copies plain files. Nothing here is slowed on purpose, and the container runtime is the same in all starts.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from bootseer import oci
from bootseer.demo.programs import run

PROGRAM = (sys.executable, "-m", "bench.common.ordinary")
_DEADLINE = 3600.0


@contextlib.contextmanager
def containerd_rootfs(ref: str, rootfs: Path) -> Iterator[oci.Image]:
    """Stands in for `bootseer.launch.node.unpacked`: pulled and unpacked by containerd, mounted writable."""
    ctr = ["ctr", "--address", os.environ["BENCH_CONTAINERD"], "images"]
    run([*ctr, "pull", "--plain-http", ref], deadline=_DEADLINE)
    rootfs.mkdir(parents=True, exist_ok=True)
    try:
        run([*ctr, "mount", "--rw", ref, str(rootfs)], deadline=60.0)
        with oci.open_image(ref) as pulled:
            yield pulled
    finally:  # also after a mount that failed or Ctrl-C: containerd may have got as far as that
        run([*ctr, "unmount", "--rm", str(rootfs)], deadline=60.0)


def copy_checkpoint(url: str, destination: Path) -> None:
    """Stands in for `bootseer.launch.checkpoint.copy_checkpoint`."""
    destination.mkdir(parents=True, exist_ok=True)
    client = shlex.split(os.environ["BENCH_HDFS_CLIENT"])
    run([*client, "-get", "-f", "-t", "4", f"{url.rstrip('/')}/*", str(destination)], deadline=_DEADLINE)


def main() -> None:
    from bootseer.cli import main as cli

    with (
        mock.patch("bootseer.launch.node.unpacked", containerd_rootfs),
        mock.patch("bootseer.launch.checkpoint.copy_checkpoint", copy_checkpoint),
    ):
        cli.main()


if __name__ == "__main__":
    main()
