"""What the full demo and bench/cluster need before any start: image in a registry, index, checkpoint, reference losses.

Made once and kept, as the parts of the small demo are (`bootseer.demo.ingredients.make`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.common import debian
from bench.common.debian import Workload
from bootseer.demo import image
from bootseer.demo.ingredients import link_projects, make
from bootseer.demo.programs import run
from bootseer.demo.starts import losses

Say = Callable[[str], None]
_STEPS_SAVED, _STEPS_RESUMED = 10, 3


class Ingredients:
    """Paths and figures of the prepared parts of ``workload`` below ``cache``."""

    def __init__(self, workload: Workload, cache: Path) -> None:
        self.workload, self.cache = workload, cache
        self.repository = f"demo/{workload.name}"
        self.registry, self.index, self.job_env, self.checkpoint, self._reference, self._build = (
            cache / name for name in ("registry", "index", "job-env", "checkpoint", "reference.json", "build")
        )

    def prepare(self, say: Say) -> None:
        """Make what is missing. Raises `FullError` before anything is written when the disk is too small."""
        self.cache.mkdir(parents=True, exist_ok=True)
        key = debian.key(self.workload)
        into_registry = partial(debian.into_registry, self.workload, self.registry, self.repository, say)
        parts: dict[str, Callable[[], None]] = {
            "image": into_registry,
            "index": self._make_index,
            "job-env": self._make_env,
            "checkpoint": self._make_checkpoint,
        }
        for name, build in parts.items():
            make(name, self.cache / f"{name}.key", key, build, say)

    @property
    def reference_losses(self) -> dict[int, float]:
        """Losses of the steps after the checkpoint, as the run that wrote it went on: step -> loss."""
        return {int(step): loss for step, loss in json.loads(self._reference.read_text()).items()}

    @property
    def _requirements(self) -> Path:
        return self.workload.job / "requirements.txt"

    def _make_index(self) -> None:
        shutil.rmtree(self.index, ignore_errors=True)
        wheels = self.index / "wheels"
        wheels.mkdir(parents=True)
        pip = [*image.pip(self._build), "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
        run([*pip, "--requirement", str(self._requirements), "--dest", str(wheels)])
        link_projects(wheels, self.index / "simple")
        shutil.rmtree(self._build, ignore_errors=True)

    def _make_env(self) -> None:
        shutil.rmtree(self.job_env, ignore_errors=True)
        target = ["--target", str(self.job_env), "--requirement", str(self._requirements)]
        wheels = ["--no-index", "--find-links", str(self.index / "wheels")]
        run([debian.uv(), "pip", "install", "--quiet", "--python", "/usr/bin/python3", *wheels, *target])
        image.compile_bytecode("/usr/bin/python3", self.job_env, "/opt/job-env")

    def _make_checkpoint(self) -> None:
        work = self.cache / "checkpoint.new"
        shutil.rmtree(work, ignore_errors=True)
        self._train("--save", str(work), "--steps", str(_STEPS_SAVED))
        found = self._train("--resume", str(work), "--steps", str(_STEPS_RESUMED))
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        os.rename(work, self.checkpoint)
        self._reference.write_text(json.dumps(found))

    def _train(self, *args: str) -> dict[int, float]:
        """Run the job's script on this machine, outside any container."""
        environ = {"PYTHONPATH": str(self.job_env), "BOOTSEER_EVENTS": ""}
        return losses(run([sys.executable, str(self.workload.job / "train.py"), *args], env=environ))
