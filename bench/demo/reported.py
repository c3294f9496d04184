"""The comparison of ``scripts/demo --full`` with a report: every start, the file trees, figures and their targets.

Start-up overhead is the time to the end of the first step minus that of ``local``: the same start where image,
environment and checkpoint are on the node already.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from bench.common import report
from bench.demo.full import Full, FullSite
from bootseer.demo.comparison import ORDER, Comparison, Say, Site
from bootseer.demo.starts import Measured
from bootseer.errors import DataError

TARGETS = {
    "overhead_reduction_first": ">= 0.5",
    "overhead_reduction_again": ">= 0.8",
    "again_vs_bound": "<= 1.5",
    "tree_identical": "== 1",
    "loss_continues": "== 1",
    "env_mount_ms": "<= 100",
    "first_vs_strongest": "<= 1.3",
    "first_uv_vs_strongest": "<= 1.3",
    "total_seconds": "<= 360",
}


def as_run(done: Measured, variant: str, n: int) -> report.Run:
    record = done.record
    return report.Run(
        variant=variant,
        n=n,
        seconds=round(done.seconds, 3),
        bytes={"link_until_first_step": done.bytes_ready, "link_total": done.bytes_total},
        stages=record.stages,
        details={"image": record.image, "env": record.env, "checkpoint": record.checkpoint}
        | {"losses": {str(step): loss for step, loss in done.losses.items()}},
    )


class Reported(Comparison):
    """Fills ``report``."""

    def __init__(self, recipe: Full, cache: Path, *, rounds: int, say: Say) -> None:
        super().__init__(recipe, cache, rounds=rounds, say=say)
        self.report = report.new(recipe.name)

    def finish(self, site: Site, work: Path) -> None:
        assert isinstance(site, FullSite)
        self.say("file trees: what a container sees, entry by entry, in an ordinary start and through bootseer")
        entries, differences = site.differences(work)
        for line in differences:
            self.say(f"file trees differ: {line}")
        self._figures(entries > 0 and not differences, time.monotonic() - self.began, site.mix.tools)

    def _figures(self, identical: bool, total: float, tools: str) -> None:
        """Runs and figures of the report, from what was measured."""
        for n, done in ((n, done) for found in self.starts.values() for n, done in enumerate(found, 1)):
            run = as_run(done, done.variant, n)
            if done.variant == "strongest":
                run.details["strongest"] = tools
            run.details["bound_seconds"] = round(self.bound(done), 3)
            self.report.runs.append(run)
        conversion = dict(self.recipe.conversion)
        self.report.runs.append(report.Run(variant="convert", n=1, seconds=conversion["seconds"], details=conversion))
        ratios = [done.seconds / self.bound(done) for done in self.starts["again"]]
        values: list[tuple[str, float | bool, str]] = [
            ("overhead_reduction_first", self.reduction("first"), "ratio"),
            ("overhead_reduction_again", self.reduction("again"), "ratio"),
            ("again_vs_bound", statistics.median(ratios), "ratio"),
            ("first_vs_strongest", self.median("first").seconds / self.median("strongest").seconds, "ratio"),
            ("first_uv_vs_strongest", self.median("first-uv").seconds / self.median("strongest").seconds, "ratio"),
            ("tree_identical", identical, "bool"),
            ("loss_continues", True, "bool"),  # else it had ended there
            ("total_seconds", total / self.rounds, "s"),
        ]
        env = self.median("again").record.env
        if env["how"] == "restored-mount" and isinstance(env["seconds"], dict):
            values.append(("env_mount_ms", env["seconds"]["restore"] * 1000, "ms"))
        for name, value, unit in values:
            n = self.rounds if unit == "ratio" else 1
            self.report.figure(name, value, unit=unit, target=TARGETS[name], n=n, of="median" if n > 1 else "single")
        if not identical:
            raise DataError("the file trees differ: the starts did not see the same bytes", hint="see the lines above")

    def bound(self, done: Measured) -> float:
        """Seconds that no start with these bytes can be faster than: the local start's, or what the link needs."""
        return max(self.median("local").seconds, done.bytes_ready * 8 / (self.recipe.rate_mbit * 1e6))

    def overhead(self, variant: str) -> float:
        """Seconds to the first step beyond those of the local start, of medians."""
        return self.median(variant).seconds - self.median("local").seconds

    def reduction(self, variant: str) -> float:
        """Share of the ordinary start-up overhead that ``variant`` saves."""
        return 1 - self.overhead(variant) / self.overhead("ordinary")

    def rows(self) -> dict[str, list[str]]:
        return {
            **super().rows(),
            "bound: local, or the link": [f"{self.bound(self.median(variant)):.1f} s" for variant in ORDER],
            "start-up overhead": [f"{self.overhead(variant):.1f} s" for variant in ORDER],
            "less overhead than ordinary": ["", *(f"{-self.reduction(variant):+.0%}" for variant in ORDER[1:])],
        }
