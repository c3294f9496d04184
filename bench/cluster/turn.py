"""What it is worth that a checkpoint waits for the image's hot blocks: the torch job of the full demo.

    scripts/bench turn [--rounds 5] [--out report.json]

As `scripts/demo --full` (a torch image, HDFS with four DataNodes, a link of 1 Gbit/s), but only starts that are known:
after one that is recorded, in each round one in turn and one with the checkpoint beside the hot blocks, in alternating
order. ``bench/start`` measures the same for a job that is light on imports, on a folder.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench.cluster.started import BESIDE, IN_TURN, STARTED
from bench.common import figures, invocation, peers
from bench.comparison import comparison, starts
from bench.comparison.recipe import RECIPES
from bootseer.demo import workplace
from bootseer.report import Report, Run, new
from support.netns import Node

_SETTLE_SECONDS = 300.0


class Turns(comparison.Demo):
    """The demo's site and its job; ``document`` grows by the runs."""

    def __init__(self, document: Report, rounds: int, results: Path) -> None:
        super().__init__(
            RECIPES["torch"],
            peers.cache_dir() / "demo/torch",
            rate_mbit=1000,
            subnet="10.77.0.0/24",
            rounds=1,
            results=results,
            say=invocation.say,
        )
        self.document, self._times = document, rounds

    def _ordinary_starts(self, site: starts.Site, node: Node, work: Path) -> None:
        pass

    def _bootseer_starts(self, site: starts.Site, node: Node, work: Path) -> None:
        self._start("first", "recorded", site, node, work)
        for number in range(1, self._times + 1):
            for variant in (IN_TURN, BESIDE) if number % 2 else (BESIDE, IN_TURN):
                self.document.runs.append(self._once(variant, number, site, node, work))

    def _once(self, variant: str, number: int, site: starts.Site, node: Node, work: Path) -> Run:
        for kind in ("cache", "state"):
            shutil.rmtree(work / f"{kind}-again", ignore_errors=True)
        done = starts.run(site, node, "again", starts.job_file(site), work, program=(*STARTED, variant))
        workplace.await_end(work, _SETTLE_SECONDS)
        waited = done.record.image.get("waited_seconds")
        invocation.say(f"{variant} {number}: {done.seconds:.2f} s, readers of the image waited for {waited} s")
        return Run(
            variant=variant,
            n=number,
            seconds=round(done.seconds, 3),
            bytes={"link": done.bytes_ready},
            stages=done.record.stages,
            details={"image": done.record.image, "checkpoint": done.record.checkpoint},
        )

    def _compare(self, site: starts.Site, prefix: list[str], work: Path) -> None:
        pass

    def report_figures(self, total: float) -> None:
        """The gain of each round, their median."""
        gains = [100 * (1 - ratio) for ratio in figures.paired(self.document.runs, IN_TURN, BESIDE)]
        gain = round(statistics.median(gains), 1)
        self.document.figure("gain_turn", gain, unit="%", target=">= 5", n=len(gains), of="median")


def _run(options: argparse.Namespace) -> None:
    document = new("turn")
    with tempfile.TemporaryDirectory() as results:
        Turns(document, options.rounds, Path(results)).run()
    figures.show(document)
    if options.out:
        document.write(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(invocation.main(_run, _options()))
