"""What it is worth that a checkpoint waits for the image's hot blocks: the torch job of the full demo.

    scripts/bench turn [--rounds 5] [--out report.json]

As `scripts/demo --full` (a torch image, HDFS with four DataNodes, a link of 1 Gbit/s), but only starts that are known:
after one that is recorded, in each round one in turn and one with the checkpoint beside the hot blocks, in alternating
order. ``bench/start`` measures the same for a job that is light on imports, on a folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.cluster.started import BESIDE, IN_TURN, STARTED
from bench.common import figures, invocation, peers
from bench.demo.full import WORKLOADS, Full
from bootseer.demo import starts, workplace
from bootseer.demo.report import Run, new


def _run(options: argparse.Namespace) -> None:
    document = new("turn")
    cache = peers.cache_dir() / "demo" / options.job
    cache.mkdir(parents=True, exist_ok=True)
    recipe = Full(WORKLOADS[options.job], cache, 1000, "10.77.0.0/24")
    with (
        workplace.session(cache, lambda: recipe.prepare(invocation.say)) as work,
        recipe.open(work, invocation.say) as site,
    ):
        site.start("first", work / "job")
        for number in range(1, options.rounds + 1):
            for variant in (IN_TURN, BESIDE) if number % 2 else (BESIDE, IN_TURN):
                starts.forget("again", work / "job")
                done = site.start("again", work / "job", program=(*STARTED, variant))
                made = Run(
                    variant=variant,
                    n=number,
                    seconds=round(done.seconds, 3),
                    bytes={"link": done.bytes_ready},
                    stages=done.record.stages,
                    details={"image": done.record.image, "checkpoint": done.record.checkpoint},
                )
                document.runs.append(made)
                waited = done.record.image.get("waited_seconds")
                invocation.say(f"{variant} {number}: {done.seconds:.2f} s, readers of the image waited for {waited} s")
    gains = [100 * (1 - ratio) for ratio in figures.paired(document.runs, IN_TURN, BESIDE)]
    gain = round(statistics.median(gains), 1)
    document.figure("gain_turn", gain, unit="%", target=">= 5", n=len(gains), of="median")
    figures.show(document)
    if options.out:
        document.write(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", choices=WORKLOADS, default="torch", help="as of scripts/demo --full")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(invocation.main(_run, _options()))
