"""What the demo needs before any start, made once and kept: the site's folder, the index, and all of it on the node.

Each part has a stamp with what it was made from, and is made again when that changes. The stamp goes before a part is
touched and comes when it is whole, so an interrupted one is made again.
"""

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
from bootseer import oci, stripefs
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
    """Paths of the prepared parts below ``cache``.

    ``site`` is the site's shared folder: ``image`` (an OCI layout), ``store`` (the image, converted), ``checkpoint``
    (plain) and ``striped``. ``rootfs``, ``job_env`` and ``site / checkpoint`` are what the local start uses.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.site, self.index, self.rootfs, self.empty, self.job_env = (
            cache / name for name in ("site", "index", "rootfs", "empty", "job-env")
        )
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
        parts = {"index": self._index, "image": self._image, "checkpoint": self._checkpoint, "store": self._store}
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
        work, wheels = self._fresh(self.index, self.job_env), self.index / "wheels"
        wheels.mkdir(parents=True)
        requirements, pip = image.JOB / "requirements.txt", image.pip(work)
        image.fetch(pip, "download", requirements, "--dest", str(wheels))
        link_projects(wheels, self.index / "simple")
        image.install(pip, self.job_env, requirements, JOB_ENV, "--no-index", "--find-links", str(wheels))

    def _image(self, say: Say) -> None:
        layout = self.site / "image"
        work = self._fresh(layout, self.empty, self.rootfs)
        self.site.mkdir(exist_ok=True)
        image.build(layout, self.empty, work, lambda what: say(f"image: {what}"))
        shutil.rmtree(work)
        say("image: unpacked once, for the start with everything on the node")
        with oci.open_image(f"oci:{layout}") as made:
            oci.unpack(made, self.rootfs)

    def _checkpoint(self, say: Say) -> None:
        self._fresh(self.checkpoint, self.site / "striped")
        self.checkpoint.mkdir()
        state = str(self.checkpoint / STATE)
        self._train("--save", state, "--steps", str(_STEPS_SAVED))
        self._reference.write_text(json.dumps(self._train("--resume", state, "--steps", str(_STEPS_RESUMED))))
        fs = stripefs.open_fs(str(self.site / "striped"))
        fs.put(Path(state), f"checkpoint/{STATE}")
        fs.commit("checkpoint")

    def _train(self, *args: str) -> dict[int, float]:
        """Run the job's script on this machine, outside any container."""
        packages = f"{self.rootfs}{image.site_packages()}:{self.job_env}"
        environ = {"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1", "BOOTSEER_EVENTS": ""}
        return losses(run([image.PYTHON, str(image.JOB / "train.py"), *args], env=environ))

    def _store(self, say: Say) -> None:
        self._fresh(self.site / "store")
        began = time.monotonic()
        environ = {**SETTINGS, "BOOTSEER_CACHE_DIR": str(self.cache / "build")}
        store = str(self.site / "store")
        run([*BOOTSEER, "image", "convert", f"oci:{self.site / 'image'}", "--store", store, "--json"], env=environ)
        self._conversion.write_text(f"{time.monotonic() - began:.1f}")
        self._fresh()
