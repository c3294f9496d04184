"""Container images of benchmarks and of the full demo: this machine's Debian or Ubuntu, Python packages, and a job.

The key of one is a hash of everything it is made from, so that a change rebuilds it. Layers are cut as images of this
kind are: base system, CUDA libraries, torch, the job.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer import oci
from bootseer.demo.image import compile_bytecode
from bootseer.demo.programs import run
from bootseer.errors import FullError, UnsupportedError
from support.layouts import LayerDir, push, write_layout
from support.registry import DockerRegistry

_PIP = "pip==26.3"
_VERSION = 1
"""Of the steps below; a change of it rebuilds every image."""

Say = Callable[[str], None]


class Workload(NamedTuple):
    """One job and the image around it."""

    name: str
    job: Path
    """Folder with the job, as the image has it at ``/job``."""
    packages: tuple[str, ...]
    """Python packages in the image, as ``name==version``, or by name with the version of this environment."""
    disk_gib: float
    """Free disk that is asked for when nothing is cached: an estimate with some air, not a measured peak."""


def uv() -> str:
    """Path of the ``uv`` program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise UnsupportedError("uv is not installed", hint="run scripts/setup")
    return found


def _system_python() -> tuple[str, str]:
    """(version such as ``3.11``, release codename such as ``bookworm``) of this machine: the image has the same."""
    version = run(["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    release = platform.freedesktop_os_release()
    if codename := release.get("VERSION_CODENAME"):
        return version, codename
    raise UnsupportedError("this machine's release has no codename", hint="it has to be Debian or Ubuntu")


def pinned(workload: Workload) -> list[str]:
    """What goes into the image, with the versions of the environment the demo runs in (``torch==2.15.0`` and so on)."""
    from importlib.metadata import version

    return [*(name if "==" in name else f"{name}=={version(name)}" for name in workload.packages), _PIP]


def key(workload: Workload) -> str:
    """Names the image by all it is made from: versions, release, the job's files and the steps below."""
    digest = hashlib.sha256(b"%d" % _VERSION)
    for text in (*pinned(workload), *_system_python()):
        digest.update(text.encode() + b"\0")
    for path in sorted(workload.job.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def into_registry(workload: Workload, registry: Path, repository: str, say: Say) -> None:
    """Build the image and push it, as ``repository:1``, to a new docker-registry with its files in ``registry``. Raises
    `FullError` before anything is written when the disk is too small."""
    free, work = shutil.disk_usage(registry.parent).free / 2**30, registry.with_name("build")
    if free < workload.disk_gib:
        raise FullError(
            f"only {free:.0f} GiB free at {registry.parent}, {workload.disk_gib:.0f} are needed for the image",
            hint="free some, or choose another disk",
        )
    for folder in (registry, work):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        layout = build(workload, work, lambda part: say(f"image {workload.name}: {part}"))
        say(f"image {workload.name}: push to the registry")
        with DockerRegistry(root=registry) as running:
            push(f"oci:{layout}:demo", f"{running.address}/{repository}:1")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def build(workload: Workload, work: Path, say: Say) -> Path:
    """Build the image as an OCI layout at ``work/layout`` (tag ``demo``) and return that folder.

    Takes 2-4 minutes with torch.
    """
    version, codename = _system_python()
    site = f"usr/local/lib/python{version}/dist-packages"
    work.mkdir(parents=True, exist_ok=True)
    base = work / "base.tar"
    say(f"base system ({codename}, Python {version})")
    components = "main,universe" if platform.freedesktop_os_release()["ID"] == "ubuntu" else "main"
    include = "--include=python3,ca-certificates"
    run(["mmdebstrap", "--quiet", "--variant=minbase", include, f"--components={components}", codename, str(base)])
    say(f"Python packages ({', '.join(pinned(workload))})")
    packages = work / "packages"
    run(
        [
            uv(),
            "pip",
            "install",
            "--quiet",
            "--python",
            "/usr/bin/python3",
            "--target",
            str(packages),
            *pinned(workload),
        ]
    )
    say("byte code")
    compile_bytecode("/usr/bin/python3", packages, f"/{site}")
    folders = [*_split(packages, work, site), _job_layer(workload, work)]
    say("layers (gzip)")
    config = oci.ContainerConfig(
        env=("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"),
        cmd=("python3",),
        working_dir="/job",
    )
    layout = work / "layout"
    write_layout(layout, [base, *map(LayerDir, folders)], config, "demo", level=6)
    return layout


def _split(packages: Path, work: Path, site: str) -> Iterator[Path]:
    """Move the packages into layer folders: CUDA libraries, torch, the rest (``rename``: no byte is copied)."""
    groups: dict[str, tuple[str, ...]] = {
        "cuda": ("nvidia", "triton"),
        "torch": ("torch", "functorch", "torchgen"),
        "rest": (),
    }
    for layer, names in groups.items():
        members = [entry for entry in sorted(packages.iterdir()) if entry.name in names or not names]
        if not members:
            continue
        folder = work / f"layer-{layer}" / site
        folder.mkdir(parents=True)
        for entry in members:
            os.rename(entry, folder / entry.name)
        yield work / f"layer-{layer}"


def _job_layer(workload: Workload, work: Path) -> Path:
    root = work / "layer-job"
    shutil.copytree(workload.job, root / "job", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("opt/job-env", "checkpoint"):
        (root / folder).mkdir(parents=True)
    return root
