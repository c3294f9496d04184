"""The comparison of one job's starts: ordinary, the bootseer way for the first time, and again on a cold node.

Beside them runs ``local``: the same start where image, environment and checkpoint are already on the node. Start-up
overhead is the time to the end of the first step minus that. What is started, and from which servers, a `Recipe` says.
"""

from __future__ import annotations

import abc
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Protocol

from bootseer.demo import report, starts, workplace
from bootseer.demo.starts import Measured
from bootseer.errors import DataError

ORDER = ("ordinary", "first", "again")
Say = Callable[[str], None]


class Site(Protocol):
    """The servers of a recipe, while they run, and a node that reaches them over one link."""

    def start(self, variant: str, work: Path) -> Measured:
        """Start the job in the folder ``work`` and wait for its end, and for what it leaves to the next start."""

    def differences(self, work: Path) -> tuple[int, list[str]]:
        """Compare what the containers of an ordinary start see with those of ``again``, as `tree.differences` does."""


class Recipe(abc.ABC):
    """One job, its image, and the servers it starts from."""

    name: str
    """Of the report."""
    rate_mbit: float
    halves: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    """The variants of a round, those without bootseer and those with it; every second round begins with the latter."""
    what: ClassVar[Mapping[str, str]]
    """What each variant does, in words."""
    targets: ClassVar[Mapping[str, str]]
    """The figures of the report, with the target of each."""
    kept: ClassVar[tuple[str, ...]]
    """Parts of the work folder that stay when it is removed."""
    conversion: Mapping[str, float]
    """Seconds of the image's conversion: ``seconds`` in all, and of its steps."""

    @abc.abstractmethod
    def prepare(self, say: Say) -> None:
        """Make what is missing, once. Raises `FullError` before anything is written when the disk is too small."""

    @property
    @abc.abstractmethod
    def reference_losses(self) -> Mapping[int, float]:
        """Losses of the steps after the checkpoint, as the run that wrote it went on."""

    @abc.abstractmethod
    def open(self, work: Path, say: Say) -> AbstractContextManager[Site]:
        """Start the servers, with all that they write below ``work``. They are warm: their files are in memory."""


class Comparison:
    """All starts of one recipe, from the folder ``cache``. Their events stay in ``kept``."""

    def __init__(self, recipe: Recipe, cache: Path, *, rounds: int = 1, say: Say) -> None:
        self.recipe, self.cache, self.rounds, self.say = recipe, cache, rounds, say
        self.kept = cache / "last"
        self.report = report.new(recipe.name)
        self.starts: dict[str, list[Measured]] = {}

    def run(self) -> None:
        """Prepare, start, compare. Raises `BootseerError`; whatever was mounted or started is gone after."""
        with workplace.session(self.cache, lambda: self.recipe.prepare(self.say)) as work:
            began = time.monotonic()
            with self.recipe.open(work, self.say) as site:
                for number in range(self.rounds):
                    if self.rounds > 1:
                        self.say(f"round {number + 1} of {self.rounds}")
                    for variant in itertools.chain(*self.recipe.halves[:: 1 if number % 2 == 0 else -1]):
                        self._start(site, variant, work / "job")
                self.say("file trees: what a container sees, entry by entry, in an ordinary start and through bootseer")
                entries, differences = site.differences(work)
            for line in differences:
                self.say(f"file trees differ: {line}")
            self._figures(entries > 0 and not differences, time.monotonic() - began)
            shutil.rmtree(self.kept, ignore_errors=True)
            self.kept.mkdir()
            for path in self.recipe.kept:
                os.rename(work / path, self.kept / os.path.basename(path))

    def _start(self, site: Site, variant: str, work: Path) -> None:
        self.say(f"{variant}: {self.recipe.what[variant]}")
        starts.forget(variant, work)
        done = site.start(variant, work)
        self.starts.setdefault(variant, []).append(done)
        self.say(f"{variant}: first step after {done.seconds:.1f} s, {done.bytes_ready / 1e6:.0f} MB over the link")
        if not starts.same_losses(self.recipe.reference_losses, done.losses):
            raise DataError(f"the losses of the {variant} start are not those of the run that wrote the checkpoint")

    def _figures(self, identical: bool, total: float) -> None:
        """Runs and figures of the report, from what was measured."""
        for n, done in ((n, done) for found in self.starts.values() for n, done in enumerate(found, 1)):
            run = done.as_run(done.variant, n)
            run.details["bound_seconds"] = round(self.bound(done), 3)
            self.report.runs.append(run)
        conversion = dict(self.recipe.conversion)
        self.report.runs.append(report.Run(variant="convert", n=1, seconds=conversion["seconds"], details=conversion))
        ratios = [done.seconds / self.bound(done) for done in self.starts["again"]]
        values: list[tuple[str, float | bool, str]] = [
            ("overhead_reduction_first", self.reduction("first"), "ratio"),
            ("overhead_reduction_again", self.reduction("again"), "ratio"),
            ("again_vs_bound", statistics.median(ratios), "ratio"),
            ("tree_identical", identical, "bool"),
            ("loss_continues", True, "bool"),  # else it had ended there
            ("total_seconds", total / self.rounds, "s"),
        ]
        env = self.median("again").record.env
        if env["how"] == "restored-mount" and isinstance(env["seconds"], dict):
            values.append(("env_mount_ms", env["seconds"]["restore"] * 1000, "ms"))
        for name, value, unit in values:
            if target := self.recipe.targets.get(name):
                n = self.rounds if unit == "ratio" else 1
                self.report.figure(name, value, unit=unit, target=target, n=n, of="median" if n > 1 else "single")
        if not identical:
            raise DataError("the file trees differ: the starts did not see the same bytes", hint="see the lines above")

    def median(self, variant: str) -> Measured:
        """The start of ``variant`` that took the median of seconds (of an even number, the quicker one)."""
        found = sorted(self.starts[variant], key=lambda done: done.seconds)
        return found[(len(found) - 1) // 2]

    def bound(self, done: Measured) -> float:
        """Seconds that no start with these bytes can be faster than: the local start's, or what the link needs."""
        return max(self.median("local").seconds, done.bytes_ready * 8 / (self.recipe.rate_mbit * 1e6))

    def overhead(self, variant: str) -> float:
        """Seconds to the first step beyond those of the local start, of medians."""
        return self.median(variant).seconds - self.median("local").seconds

    def reduction(self, variant: str) -> float:
        """Share of the ordinary start-up overhead that ``variant`` saves."""
        return 1 - self.overhead(variant) / self.overhead("ordinary")
