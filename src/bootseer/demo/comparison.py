"""The demo: one job started ordinarily, the bootseer way for the first time, and again on a cold node; side by side.

Beside them runs ``local``: the same start where image, environment and checkpoint are already on the node. Start-up
overhead is the time to the end of the first step minus that.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

from bootseer import report
from bootseer.demo import starts, tree, workplace
from bootseer.demo.image import MOUNT_POINTS, Say
from bootseer.demo.ingredients import JOB_ENV, SETTINGS, STATE, Ingredients
from bootseer.demo.programs import BOOTSEER, run
from bootseer.demo.site import Link, Site
from bootseer.errors import DataError
from bootseer.launch.job import CheckpointTable, EnvTable, ImageTable, Job, JobTable, MountTable

_PUBLICATION_SECONDS = 60.0


class Demo:
    """All starts of one demo. The events of all, and the store as they left it, stay in ``kept``."""

    def __init__(self, cache: Path, *, rate_mbit: float, say: Say) -> None:
        self.ingredients = Ingredients(cache)
        self.cache, self.rate_mbit, self.say = cache, rate_mbit, say
        self.kept = cache / "last"
        self.report = report.new("demo-jax")
        self.measured: dict[str, starts.Measured] = {}

    def run(self) -> None:
        """Prepare, start four times, compare. Raises `BootseerError`; whatever was mounted or started is gone after."""
        with workplace.only_one(self.cache):
            workplace.sweep(self.cache)
            self.ingredients.prepare(self.say)
            work = workplace.make(self.cache)
            try:
                self._compare(work)
                shutil.rmtree(self.kept, ignore_errors=True)
                self.kept.mkdir()
                os.rename(work / "site/store", self.kept / "store")
                os.rename(work / "events", self.kept / "events")
            finally:
                workplace.remove(work)

    def _compare(self, work: Path) -> None:
        parts = self.ingredients
        # servers are warm, nodes are cold: each start has a new cache and a new mount of the site's folder
        for folder in (parts.site, parts.rootfs, parts.job_env):
            starts.read_all(folder)
        shutil.copytree(parts.site, work / "site", copy_function=os.link)  # starts leave snapshots and traces in it
        began = time.monotonic()
        with Site(work / "site", parts.index, work) as site:
            self._start("local", "everything is on the node already", site, work)
            self._start("local-2", "once more: overhead counts from the quicker one", site, work)
            quicker = min(self.measured.pop("local-2"), self.measured["local"], key=lambda done: done.seconds)
            quicker.variant = "local"
            self.measured["local"] = quicker
            self._start("ordinary", "image pulled whole and unpacked, pip install, checkpoint copied", site, work)
            self._start(
                "first", "lazy image without a profile, set-up command captured, striped checkpoint", site, work
            )
            self._start(
                "again", "cold node: hot blocks prefetched, environment mounted, striped checkpoint", site, work
            )
            self.say("file trees: what a container sees, entry by entry, after a full unpack and through bootseer")
            entries, differences = self._differences(site, work)
        for line in differences:
            self.say(f"file trees differ: {line}")
        self._figures(entries > 0 and not differences, time.monotonic() - began)

    def _start(self, variant: str, what: str, site: Site, work: Path) -> None:
        self.say(f"{variant}: {what}")
        local = variant.startswith("local")
        link = Link(self.rate_mbit)
        with site.reached(link):
            done = starts.run(
                variant,
                self._local_job() if local else _job(site, plain=variant == "ordinary"),
                work,
                environ={**SETTINGS, "BOOTSEER_STORE": str(site.store)},
                received=lambda: link.bytes,
                without="all" if local or variant == "ordinary" else "",
            )
            workplace.await_end(work, _PUBLICATION_SECONDS)  # the next node is to find what this one recorded
        self.measured[variant] = done
        self.say(f"{variant}: first step after {done.seconds:.1f} s, {done.bytes_ready / 1e6:.0f} MB over the link")
        if not starts.same_losses(self.ingredients.reference_losses, done.losses):
            raise DataError(f"the losses of the {variant} start are not those of the run that wrote the checkpoint")

    def _local_job(self) -> Job:
        """The job with an image of nothing but mount points: all that it needs is mounted from this disk."""
        parts = self.ingredients
        tops = [path for path in parts.rootfs.iterdir() if path.is_dir() and not path.is_symlink()]
        tops = [path for path in tops if path.name not in {place.split("/")[0] for place in MOUNT_POINTS} - {"root"}]
        mounts = [MountTable(source=str(path), target=f"/{path.name}") for path in tops]
        mounts += [MountTable(source=str(parts.job_env), target=JOB_ENV)]
        mounts += [MountTable(source=str(parts.checkpoint), target="/checkpoint")]
        image = ImageTable(ref=f"oci:{parts.empty}")
        return Job(job=_TRAINING, image=image, mounts=mounts)

    def _differences(self, site: Site, work: Path) -> tuple[int, list[str]]:
        """Compare the unpacked image with that of the ``again`` node, mounted from its own cache; see `tree`."""
        target = work / "tree"
        target.mkdir()
        with site.reached(Link(math.inf)), contextlib.ExitStack() as stack:
            environ = {
                **SETTINGS,
                "BOOTSEER_STORE": str(site.store),
                "BOOTSEER_CACHE_DIR": str(work / "cache-again"),
                "BOOTSEER_STATE_DIR": str(work / "state-again"),
            }
            run([*BOOTSEER, "image", "mount", _ref(site), str(target)], env=environ)
            stack.callback(run, [*BOOTSEER, "unmount", str(target)], env=environ)
            return tree.differences(self.ingredients.rootfs, target)

    def _figures(self, identical: bool, total: float) -> None:
        """Runs and figures of the report, from what was measured."""
        for done in self.measured.values():
            record = done.record
            self.report.runs.append(
                report.Run(
                    variant=done.variant,
                    n=1,
                    seconds=round(done.seconds, 3),
                    bytes={"link_until_first_step": done.bytes_ready, "link_total": done.bytes_total},
                    stages=record.stages,
                    details={"image": record.image, "env": record.env, "checkpoint": record.checkpoint}
                    | {"losses": {str(step): loss for step, loss in done.losses.items()}},
                )
            )
        self.report.runs.append(report.Run(variant="convert", n=1, seconds=self.ingredients.conversion_seconds))
        add = self.report.figure
        add("overhead_reduction_first", self.reduction("first"), unit="ratio", target=">= 0.5", n=1, of="single")
        add("overhead_reduction_again", self.reduction("again"), unit="ratio", target=">= 0.8", n=1, of="single")
        add("tree_identical", identical, unit="bool", target="== 1", n=1, of="single")
        add("loss_continues", True, unit="bool", target="== 1", n=len(self.measured), of="min")
        add("total_seconds", total, unit="s", target="<= 60", n=1, of="single")
        if not identical:
            raise DataError("the file trees differ: the starts did not see the same bytes", hint="see the lines above")

    def overhead(self, variant: str) -> float:
        """Seconds to the first step beyond those of the local start."""
        return self.measured[variant].seconds - self.measured["local"].seconds

    def reduction(self, variant: str) -> float:
        """Share of the ordinary start-up overhead that ``variant`` saves."""
        return 1 - self.overhead(variant) / self.overhead("ordinary")


_TRAINING = JobTable(
    name="demo",
    command=["python3", "/job/train.py", "--resume", f"/checkpoint/{STATE}"],
    gpus=8,
    env={"PYTHONPATH": JOB_ENV},
    cwd="/job",
)


def _ref(site: Site) -> str:
    return f"oci:{site.shared}/image"


def _job(site: Site, *, plain: bool = False) -> Job:
    """The job as a user writes it, with the addresses of ``site``; ``plain``: its checkpoint in plain files."""
    pip = ["python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action", "ignore"]
    pip += [
        "--no-cache-dir",
        "--no-deps",
        "--index-url",
        site.index,
        "--trusted-host",
        str(urlsplit(site.index).hostname),
    ]
    return Job(
        job=_TRAINING,
        image=ImageTable(ref=_ref(site)),
        env=EnvTable(
            command=[*pip, "--target", JOB_ENV, "--requirement", "/job/requirements.txt"],
            targets=[JOB_ENV],
            key_files=["/job/requirements.txt"],
        ),
        checkpoint=CheckpointTable(url=f"{site.shared}/{'' if plain else 'striped/'}checkpoint", path="/checkpoint"),
    )
