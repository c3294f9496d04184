"""`bootseer run` with the strongest other tools in place of the ordinary ones: ``python -m bench.demo.strongest ...``

hdfs-native copies the checkpoint. The image comes through nydusd, which prefetches what the job is known to open, where
``BENCH_NYDUS`` has the arguments of `peers.nydus`; containerd pulls it else. uv, with a full cache that costs nothing,
stands in the job file. `Strongest` makes all that once. A start of bootseer may have the same command, ``first-uv``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import msgspec

import bootseer
from bench.common import ordinary, peers
from bench.common.debian import uv
from bench.image.parts import nydus_image
from bootseer import oci
from bootseer.demo.programs import run
from bootseer.errors import BootseerError, UnsupportedError
from bootseer.image import runtime
from bootseer.kernel import mount
from bootseer.launch.container import PYTHON_DIR
from bootseer.launch.job import Job, MountTable

PROGRAM = (sys.executable, "-m", "bench.demo.strongest")
USES_UV = ("strongest", "first-uv")
"""Starts whose job has uv's command."""
_NYDUS = "bench/nydus"
_UV_CACHE = "/opt/uv-cache"
_STREAMS = 4
_CHUNK = 8 << 20


class Strongest:
    """What these tools need, below ``work``. ``local``: the job with all but its image on the node; ``requirements``:
    what its set-up command installs. `fill` makes what a start needs, once all servers run."""

    def __init__(self, work: Path, ref: str, index_url: str, local: Job, requirements: Path) -> None:
        self._work, self._ref, self._index_url, self._local = work, ref, index_url, local
        self._requirements, self._nydus = requirements, ""

    def fill(self, variant: str, say: Callable[[str], None]) -> None:
        """What starts of ``variant`` need and is not there yet: a full cache of uv, nydus's form of the image."""
        if variant in USES_UV and not (self._work / "uv-cache").exists():
            self._fill_uv()
        if variant == "strongest" and not (self._work / "nydus-image").exists():
            self._convert(say)

    def _convert(self, say: Callable[[str], None]) -> None:
        folder, registry = self._work / "nydus-image", self._ref.partition("/")[0]
        folder.mkdir()
        try:
            peers.program("nydusd")
            bootstrap = nydus_image(folder, self._ref, f"{registry}/{_NYDUS}:1", self._open_files, say)
        except UnsupportedError:
            return
        self._nydus = json.dumps(
            {"registry": registry, "repository": _NYDUS, "bootstrap": str(bootstrap), "prefetch": "yes"}
        )

    @property
    def tools(self) -> str:
        """Their names."""
        return f"{'nydus' if self._nydus else 'containerd (nydus is not built)'}, uv, hdfs-native"

    @property
    def needs_containerd(self) -> bool:
        return not self._nydus

    def variables(self) -> dict[str, str]:
        """For the environment of a start."""
        return {"BENCH_NYDUS": self._nydus}

    def job(self, job: Job) -> Job:
        """``job`` with uv in place of pip."""
        assert job.env is not None
        command = [*self._install("/opt/uv", _UV_CACHE, job.env.targets[0], "/job/requirements.txt"),
                   "--link-mode", "copy"]  # fmt: skip
        shared = [
            MountTable(source=uv(), target="/opt/uv"),
            MountTable(source=str(self._work / "uv-cache"), target=_UV_CACHE, readonly=False),
        ]
        env = msgspec.structs.replace(job.env, command=command, key_files=["/job/requirements.txt"], key_env=[])
        return msgspec.structs.replace(job, env=env, mounts=shared)

    def _fill_uv(self) -> None:
        target = self._work / "uv-target"
        run(self._install(uv(), str(self._work / "uv-cache"), str(target), str(self._requirements)))
        shutil.rmtree(target)

    def _install(self, program: str, cache: str, target: str, requirements: str) -> list[str]:
        return [program, "pip", "install", "--quiet", "--python", "/usr/bin/python3", "--cache-dir", cache,
                "--index-url", self._index_url, "--target", target, "--requirement", requirements]  # fmt: skip

    def _open_files(self, root: Path, config: oci.ImageConfig, state: Path) -> None:
        """The job with everything local, in a root file system."""
        job = self._local
        binds = [runtime.Bind(one.source, one.target, True) for one in job.mounts]
        binds.append(runtime.Bind(str(Path(bootseer.__file__).parent), f"{PYTHON_DIR}/bootseer", True))
        paths = {"PYTHONPATH": f"{job.job.env['PYTHONPATH']}:{PYTHON_DIR}"}  # as the launcher has it
        if code := runtime.run(root, config, job.job.command, env=job.job.env | paths, mounts=binds, state_dir=state):
            raise BootseerError(f"the job ended with code {code}")


def uv_index(index: Path, work: Path) -> Path:
    """The package index ``index`` as uv wants it, in a new folder of ``work``: the page of a project lists no other's
    files."""
    folder = work / "index"
    for wheel in index.glob("wheels/*.whl"):
        project = folder / "simple" / wheel.name.partition("-")[0].lower().replace("_", "-")
        project.mkdir(parents=True, exist_ok=True)
        (project / wheel.name).symlink_to(wheel)
    return folder


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
    with oci.open_image(ref) as pulled, peers.nydus(work, **json.loads(os.environ["BENCH_NYDUS"])) as lower:
        mount.mount_overlay([lower], rootfs, upper=upper, work=inner)
        try:
            yield pulled
        finally:
            mount.unmount(rootfs)


def main() -> None:
    from bootseer.cli import main as cli

    rootfs = nydus_rootfs if os.environ.get("BENCH_NYDUS") else ordinary.containerd_rootfs
    with (
        mock.patch("bootseer.launch.node.unpacked", rootfs),
        mock.patch("bootseer.launch.checkpoint.copy_checkpoint", copy),
    ):
        cli.main()


if __name__ == "__main__":
    main()
