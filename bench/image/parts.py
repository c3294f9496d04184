"""What bench/image needs before any run, made once and kept below the development cache: the image and its nydus twin.

Below ``<cache>/bench/<workload>/``: ``registry`` (a docker-registry's folder with the image and nydus's data blob),
``bootstrap`` (nydus's metadata) and a stamp for each, written when the part is whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.common import debian, peers
from bench.common.debian import Workload
from bootseer import image as images
from bootseer import oci
from bootseer.demo.ingredients import make
from bootseer.errors import BootseerError
from bootseer.oci import spec
from bootseer.oci.registry import Registry
from support import devcache
from support.registry import DockerRegistry

Say = Callable[[str], None]
REPOSITORY = "bench/image"
NYDUS = "bench/nydus"
_JOB = Path(__file__).parent / "job"

TORCH = Workload(
    name="torch",
    job=_JOB,
    packages=(
        "torch", "numpy", "safetensors", "transformers==5.23.0", "tokenizers==0.23.3", "torchvision==0.29.2",
        "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2", "bitsandbytes==0.50.2", "tensorboard==2.21.0",
        "opencv-python-headless==5.0.0.93", "nvidia-cuda-nvcc==13.5.37",
    ),
    disk_gib=38.0,
)  # fmt: skip
SMALL = Workload(
    name="small",
    job=_JOB,
    packages=("numpy", "sympy", "networkx", "scipy==1.17.1", "scikit-learn==1.9.1", "pandas==3.1.1"),
    disk_gib=5.0,
)


class Parts:
    """The parts for ``workload`` and where they are."""

    def __init__(self, workload: Workload, say: Say) -> None:
        self.workload, self.say = workload, say
        self.folder = devcache.folder("bench", workload.name)
        self.registry = self.folder / "registry"
        self.bootstrap = self.folder / "bootstrap"
        self.command = ["python3", "/job/start.py", workload.name]

    def prepare(self, *, nydus: bool) -> None:
        """Make what is missing, nydus's twin only when wanted. Raises `BootseerError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        key = debian.key(self.workload)
        image = partial(debian.into_registry, self.workload, self.registry, REPOSITORY, self.say)
        make("image", self.folder / "image.key", key, image, self.say)
        if nydus:
            make("nydus", self.folder / "nydus.key", f"{key} {peers.NYDUS}", self._nydus, self.say)

    def _nydus(self) -> None:
        with DockerRegistry(root=self.registry) as registry:
            ref, target = (f"{registry.address}/{name}:1" for name in (REPOSITORY, NYDUS))
            job = partial(_run, self.command)
            nydus_image(self.folder, ref, target, job, lambda line: self.say(f"nydus {self.workload.name}: {line}"))


def nydus_image(
    folder: Path, ref: str, target: str, job: Callable[[Path, oci.ImageConfig, Path], None], say: Say
) -> Path:
    """Make nydus's form of the image ``ref``: its data blob is pushed to ``target``, its bootstrap, which is returned,
    is in ``folder``. The files that ``job`` opens are prefetched: it is run in a root file system, with a folder for
    state."""
    bootstrap = folder / "bootstrap"
    work = folder / "nydus-build"
    shutil.rmtree(work, ignore_errors=True)
    root = work / "root"
    root.mkdir(parents=True)
    try:
        say("unpack")
        with oci.open_image(ref) as opened:
            oci.unpack(opened, root)
            config = opened.config
        say("the files the job opens")
        opens = opened_files(root, lambda: job(root, config, work))
        say(f"nydus-image create, prefetching {len(opens)} files")
        blob = work / "blob"
        argv = [str(peers.program("nydus-image")), "create", "--log-level", "warn", "--prefetch-policy", "fs",
                "--bootstrap", str(bootstrap), "--blob", str(blob), str(root)]  # fmt: skip
        done = subprocess.run(argv, input="\n".join(opens), text=True, capture_output=True, timeout=1800)
        if done.returncode:
            raise BootseerError(f"nydus-image failed: {(done.stderr or done.stdout).strip()[-300:]}")
        with open(blob, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        item = spec.Descriptor(spec.LAYER, f"sha256:{digest}", blob.stat().st_size)
        with Registry(oci.Reference.parse(target)) as registry:
            registry.put_blob(item, blob)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return bootstrap


def opened_files(root: Path, run: Callable[[], None]) -> list[str]:
    """Regular files below ``root`` that ``run`` reads, as paths of the image; seen by their access times (relatime)."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in files:
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
    run()
    found = sorted(f"/{path.relative_to(root)}" for path in files if path.exists() and path.stat().st_atime_ns)
    if not found:
        raise BootseerError(f"{root} is mounted without access times", hint="put BOOTSEER_DEV_CACHE on another disk")
    return found


def _run(command: list[str], root: Path, config: oci.ImageConfig, state: Path) -> None:
    if code := images.runtime.run(root, config, command, state_dir=state):
        raise BootseerError(f"the bench's job ended with code {code}")
