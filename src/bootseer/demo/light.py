"""The recipe of ``bootseer demo``: a job in JAX, its image with this machine's Python, a folder behind a slow link."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from bootseer.demo import starts, workplace
from bootseer.demo.comparison import Recipe, Say
from bootseer.demo.ingredients import JOB_ENV, SETTINGS, STATE, Ingredients
from bootseer.demo.programs import BOOTSEER
from bootseer.demo.site import Link, SharedSite
from bootseer.launch.job import CheckpointTable, EnvTable, ImageTable, Job, JobTable

_PUBLICATION_SECONDS = 180.0
_PIP = "python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-cache-dir --no-deps"
_TRAINING = JobTable(
    name="demo",
    command=["python3", "/job/train.py", "--resume", f"/checkpoint/{STATE}"],
    gpus=8,
    env={"PYTHONPATH": JOB_ENV},
    cwd="/job",
)


class Light(Recipe):
    """What it needs is made below ``cache``; ``rate_mbit`` limits the node's link."""

    halves = (("ordinary",), ("first", "again"))
    what: ClassVar[Mapping[str, str]] = {
        "ordinary": "image pulled whole and unpacked, pip install, checkpoint copied",
        "first": "lazy image without a profile, set-up command captured, striped checkpoint",
        "again": "cold node: hot blocks prefetched, environment mounted, striped checkpoint",
    }
    kept = ("job/events", "site/store")
    checkpoint = "striped/checkpoint"
    """Where the site has it."""

    def __init__(self, cache: Path, rate_mbit: float) -> None:
        self.ingredients = Ingredients(cache)
        self.rate_mbit = rate_mbit

    def prepare(self, say: Say) -> None:
        self.ingredients.prepare(say)
        self.conversion = {"seconds": self.ingredients.conversion_seconds}

    @property
    def reference_losses(self) -> Mapping[int, float]:
        return self.ingredients.reference_losses

    @contextlib.contextmanager
    def open(self, work: Path, say: Say) -> Iterator[LightSite]:
        parts = self.ingredients
        # servers are warm, nodes are cold: each start has a new cache and a new mount of the site's folder
        starts.read_all(parts.site)
        self.lay_out(work / "site")
        with SharedSite(work / "site", parts.index, work) as shared:
            yield LightSite(self, shared)

    def lay_out(self, site: Path) -> None:
        """Make the folder of the site, in which starts leave snapshots and traces."""
        shutil.copytree(self.ingredients.site, site, copy_function=os.link)


class LightSite:
    """The site of ``recipe``, as ``shared`` serves it."""

    def __init__(self, recipe: Light, shared: SharedSite) -> None:
        self._recipe, self._shared = recipe, shared

    def start(self, variant: str, work: Path, *, program: Sequence[str] = BOOTSEER) -> starts.Measured:
        """``variant``: also any other name of a start with bootseer; ``program`` as of `starts.run`."""
        link = Link(self._recipe.rate_mbit)
        with self._shared.reached(link):
            done = starts.run(
                variant,
                self._job(plain=variant == "ordinary"),
                work,
                environ={**SETTINGS, "BOOTSEER_STORE": str(self._shared.store)},
                received=lambda: link.bytes,
                without="all" if variant == "ordinary" else "",
                program=program,
            )
            workplace.await_end(work, _PUBLICATION_SECONDS)  # the next node is to find what this one recorded
        return done

    @property
    def _ref(self) -> str:
        return f"oci:{self._shared.shared}/image"

    def _job(self, *, plain: bool) -> Job:
        """The job as a user writes it; ``plain``: its checkpoint lies in plain files."""
        index = self._shared.index
        pip = [*_PIP.split(), "--index-url", index, "--trusted-host", str(urlsplit(index).hostname)]
        return Job(
            job=_TRAINING,
            image=ImageTable(ref=self._ref),
            env=EnvTable(
                command=[*pip, "--target", JOB_ENV, "--requirement", "/job/requirements.txt"],
                targets=[JOB_ENV],
                key_files=["/job/requirements.txt"],
            ),
            checkpoint=CheckpointTable(
                url=f"{self._shared.shared}/{'checkpoint' if plain else self._recipe.checkpoint}", path="/checkpoint"
            ),
        )
