"""What the demo needs before any start, made once and kept: the folder of the site, and the index. Each part has a
stamp with what it was made from, which goes before the part is touched and comes when it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bootseer
from bootseer import stripefs
from bootseer.demo import image
from bootseer.demo.image import Say
from bootseer.demo.programs import BOOTSEER, run
from bootseer.demo.starts import losses
from bootseer.errors import FullError
from bootseer.stripefs import layout
from bootseer.wiretypes import loaded

JOB_ENV = "/opt/job-env"
STATE = "state.safetensors"
SETTINGS = {"BOOTSEER_CONFIG": os.devnull}
"""Variables for programs of ours: what is set for this machine does not count."""
_DISK = 4e9
_STEPS_SAVED, _STEPS_RESUMED = 10, 3


def make(name: str, stamp: Path, key: str, build: Callable[[], None], say: Say) -> None:
    """Have ``build`` make a part, unless ``stamp`` says that it was made from ``key``."""
    if stamp.exists() and stamp.read_text() == key:
        return
    began = time.monotonic()
    say(f"{name}: to be made")
    stamp.unlink(missing_ok=True)
    build()
    stamp.write_text(key)
    say(f"{name}: made in {time.monotonic() - began:.0f} s")


def link_projects(wheels: Path, simple: Path) -> None:
    """Make ``simple/<name>`` for every project a link to the folder of wheels, whose listing is the project's page."""
    simple.mkdir()
    for name in {re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower() for wheel in wheels.glob("*.whl")}:
        (simple / name).symlink_to(f"../{wheels.name}")


class Ingredients:
    """Paths of the prepared parts below ``cache``. ``site`` is the site's shared folder: ``image`` (an OCI layout),
    ``store`` (the image, converted), ``checkpoint`` (plain) and ``striped``."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.site, self.index = cache / "site", cache / "index"
        self.checkpoint = self.site / "checkpoint"
        self._reference = cache / "losses.json"
        self._conversion = cache / "conversion.json"

    def prepare(self, say: Say) -> None:
        """Make what is missing. Raises `FullError` before anything is written when the disk is too small."""
        key = hashlib.sha256(f"{bootseer.__version__} {layout.VERSION} {sys.version} {image.PYTHON}".encode())
        for path in sorted((*image.JOB.iterdir(), Path(image.__file__), Path(__file__))):
            if path.is_file():
                key.update(path.read_bytes())
        if not self._conversion.exists() and (free := shutil.disk_usage(self.cache).free) < _DISK:
            raise FullError(
                f"only {free / 1e9:.1f} GB free at {self.cache}, the demo needs {_DISK / 1e9:.0f}",
                hint="free some, or choose another disk with --cache",
            )
        parts = {"index": self._index, "image": self._image, "store": self._store}
        for name, build in parts.items():
            make(name, self.cache / f"{name}.key", key.hexdigest(), lambda build=build: build(say), say)  # type: ignore[misc]

    @property
    def reference_losses(self) -> dict[int, float]:
        """Losses of the steps after the checkpoint, as the run that wrote it went on: step -> loss."""
        return {int(step): loss for step, loss in loaded(json.loads, self._reference.read_text()).items()}

    @property
    def conversion_seconds(self) -> float:
        return float(loaded(json.loads, self._conversion.read_text()))

    def _fresh(self, *folders: Path) -> Path:
        """Remove ``folders``; returns an empty folder for what is in between."""
        work = self.cache / "build"
        for folder in (*folders, work):
            shutil.rmtree(folder, ignore_errors=True)
        work.mkdir(parents=True)
        return work

    def _index(self, say: Say) -> None:
        work, wheels = self._fresh(self.index), self.index / "wheels"
        wheels.mkdir(parents=True)
        image.fetch(image.pip(work), "download", image.JOB / "requirements.txt", "--dest", str(wheels))
        link_projects(wheels, self.index / "simple")

    def _image(self, say: Say) -> None:
        """And the checkpoint, by its packages."""
        layout, wheels = self.site / "image", self.index / "wheels"
        work = self._fresh(layout, self.checkpoint, self.site / "striped")
        self.checkpoint.mkdir(parents=True)
        packages = image.build(layout, work, lambda what: say(f"image: {what}"))
        requirements, job_env = image.JOB / "requirements.txt", work / "job-env"
        image.install(image.pip(work), job_env, requirements, JOB_ENV, "--no-index", "--find-links", str(wheels))
        say("checkpoint: trained on this machine")
        environ = {"PYTHONPATH": f"{packages}:{job_env}", "PYTHONDONTWRITEBYTECODE": "1", "BOOTSEER_EVENTS": ""}
        train, state = [image.PYTHON, str(image.JOB / "train.py")], str(self.checkpoint / STATE)
        run([*train, "--save", state, "--steps", str(_STEPS_SAVED)], env=environ)
        found = losses(run([*train, "--resume", state, "--steps", str(_STEPS_RESUMED)], env=environ))
        self._reference.write_text(json.dumps(found))
        fs = stripefs.open_fs(str(self.site / "striped"))
        fs.put(Path(state), f"checkpoint/{STATE}")
        fs.commit("checkpoint")
        shutil.rmtree(work)

    def _store(self, say: Say) -> None:
        self._fresh(self.site / "store")
        began = time.monotonic()
        environ = {**SETTINGS, "BOOTSEER_CACHE_DIR": str(self.cache / "build")}
        store = str(self.site / "store")
        run([*BOOTSEER, "image", "convert", f"oci:{self.site / 'image'}", "--store", store, "--json"], env=environ)
        self._conversion.write_text(f"{time.monotonic() - began:.1f}")
        self._fresh()
