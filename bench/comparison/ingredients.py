"""What the demo needs before any start: image in a registry, filled index, checkpoint with its reference losses.

Made once and kept in the demo's cache folder; each part has a stamp with what it was made from, and is made again when
that changes. The stamp goes before a part is touched and comes when it is whole, so an interrupted one is made again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from bench.comparison import image, index
from bench.comparison.recipe import Recipe
from bootseer.demo.image import compile_bytecode
from bootseer.demo.ingredients import make
from bootseer.demo.programs import run
from bootseer.demo.starts import losses
from bootseer.errors import FullError
from support.layouts import push
from support.registry import DockerRegistry

log = logging.getLogger(__name__)

Say = Callable[[str], None]


class Ingredients:
    """Paths and figures of the prepared parts of ``recipe`` below ``cache``."""

    def __init__(self, recipe: Recipe, cache: Path) -> None:
        self.recipe = recipe
        self.cache = cache
        self.repository = f"demo/{recipe.name}"
        self.registry = cache / "registry"
        self.index = cache / "index"
        self.job_env = cache / "job-env"
        self.checkpoint = cache / "checkpoint"
        self.reference = cache / "reference.json"

    def prepare(self, say: Say) -> None:
        """Make what is missing. Raises `FullError` before anything is written when the disk is too small."""
        self.cache.mkdir(parents=True, exist_ok=True)
        self._check_disk()
        make(
            "package index",
            self.index / "requirements.txt",
            self._requirements.read_text(),
            lambda: self._index(say),
            say,
        )
        key = image.key(self.recipe)
        make("container image", self.cache / "image.key", key, lambda: self._image(say), say)
        make("job environment", self.job_env / ".key", key, lambda: self._job_env(say), say)
        make("checkpoint", self.cache / "checkpoint.key", key, lambda: self._checkpoint(say), say)

    def reference_losses(self) -> dict[int, float]:
        """Losses of the steps after the checkpoint, as the run that wrote it went on: step -> loss."""
        return {int(step): loss for step, loss in json.loads(self.reference.read_text()).items()}

    def _check_disk(self) -> None:
        cached = sum(f.stat().st_size for f in self.registry.rglob("*") if f.is_file()) if self.registry.exists() else 0
        needed = self.recipe.disk_gib - cached / 2**30
        free = shutil.disk_usage(self.cache).free / 2**30
        if free < needed:
            raise FullError(
                f"only {free:.0f} GiB free at {self.cache}, the demo needs {needed:.0f}",
                hint="free some, or choose another disk with --cache",
            )

    @property
    def _requirements(self) -> Path:
        return self.recipe.job / "requirements.txt"

    def _index(self, say: Say) -> None:
        index.fill(self.index, self._requirements)

    def _image(self, say: Say) -> None:
        work = self.cache / "build"
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(self.registry, ignore_errors=True)
        try:
            layout = image.build(self.recipe, work, lambda part: say(f"container image: {part}"))
            say("container image: push to the registry")
            with DockerRegistry(root=self.registry) as registry:
                push(f"oci:{layout}:demo", f"{registry.address}/{self.repository}:1")
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _job_env(self, say: Say) -> None:
        shutil.rmtree(self.job_env, ignore_errors=True)
        target = ["--target", str(self.job_env), "--requirement", str(self._requirements)]
        wheels = ["--no-index", "--find-links", str(self.index / "wheels")]
        run([image.uv(), "pip", "install", "--quiet", "--python", "/usr/bin/python3", *wheels, *target])
        compile_bytecode("/usr/bin/python3", self.job_env, "/opt/job-env")

    def _checkpoint(self, say: Say) -> None:
        work = self.cache / "checkpoint.new"
        shutil.rmtree(work, ignore_errors=True)
        self.train("--save", str(work), "--steps", str(self.recipe.steps_saved))
        losses = self.train("--resume", str(work), "--steps", str(self.recipe.steps_resumed))
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        os.rename(work, self.checkpoint)
        self.reference.write_text(json.dumps(losses))

    def train(self, *args: str) -> dict[int, float]:
        """Run the job's script on this machine, outside any container. Returns its losses: step -> loss."""
        environ = {"PYTHONPATH": str(self.job_env), "BOOTSEER_EVENTS": ""}
        return losses(run([sys.executable, str(self.recipe.job / "train.py"), *args], env=environ))
