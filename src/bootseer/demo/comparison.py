"""The comparison of one job's starts: ordinary, the bootseer way for the first time, and again on a cold node. What is
started, and from which servers, a `Recipe` says."""

from __future__ import annotations

import abc
import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Protocol

from bootseer.demo import starts, workplace
from bootseer.demo.starts import Measured
from bootseer.errors import DataError

ORDER = ("ordinary", "first", "again")
Say = Callable[[str], None]


class Site(Protocol):
    """The servers of a recipe, while they run, and a node that reaches them over one link."""

    def start(self, variant: str, work: Path) -> Measured:
        """Start the job in the folder ``work`` and wait for its end, and for what it leaves to the next start."""


class Recipe(abc.ABC):
    """One job, its image, and the servers it starts from."""

    rate_mbit: float
    halves: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    """The variants of a round, those without bootseer and those with it; every second round begins with the latter."""
    what: ClassVar[Mapping[str, str]]
    """What each variant does, in words."""
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
        self.starts: dict[str, list[Measured]] = {}

    def run(self) -> None:
        """Prepare, start, compare. Raises `BootseerError`; whatever was mounted or started is gone after."""
        with workplace.session(self.cache, lambda: self.recipe.prepare(self.say)) as work:
            self.began = time.monotonic()
            with self.recipe.open(work, self.say) as site:
                for number in range(self.rounds):
                    if self.rounds > 1:
                        self.say(f"round {number + 1} of {self.rounds}")
                    for variant in itertools.chain(*self.recipe.halves[:: 1 if number % 2 == 0 else -1]):
                        self._start(site, variant, work / "job")
                self.finish(site, work)
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

    def finish(self, site: Site, work: Path) -> None:
        """All starts are over, and the servers still run."""

    def median(self, variant: str) -> Measured:
        """The start of ``variant`` that took the median of seconds (of an even number, the quicker one)."""
        found = sorted(self.starts[variant], key=lambda done: done.seconds)
        return found[(len(found) - 1) // 2]

    def rows(self) -> dict[str, list[str]]:
        """What stands below the stages, for each of `ORDER`."""
        ordinary, *ours = (self.median(variant) for variant in ORDER)
        less = [f"{done.seconds / ordinary.seconds - 1:+.0%}" for done in ours]
        moved = [f"{done.bytes_ready / 1e6:,.0f} MB" for done in (ordinary, *ours)]
        return {"over the link until then": moved, "less than ordinary": ["", *less]}
