"""What it is worth that a checkpoint waits for the image's hot blocks: the torch job of the full demo.

    scripts/bench turn [--quick] [--runs 5] [--out report.json]

As `scripts/demo --full` (a torch image, HDFS with four DataNodes, a link of 1 Gbit/s), but only starts that are known:
after one that is recorded, in each round one in turn and one with the checkpoint beside the hot blocks, in alternating
order. ``bench/start`` measures the same for a job that is light on imports, on a folder.
"""

from __future__ import annotations

import sys

from bench.cluster.started import BESIDE, IN_TURN, STARTED
from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report
from bench.demo.full import WORKLOADS, Full
from bench.demo.reported import as_run
from bootseer.demo import starts, workplace
from support import devcache


def _run(options: Options, report: Report) -> None:
    job = "small" if options.quick else "torch"
    cache = devcache.folder("demo", job)
    cache.mkdir(parents=True, exist_ok=True)
    recipe = Full(WORKLOADS[job], cache, 1000, "10.77.0.0/24")
    with workplace.session(cache, lambda: recipe.prepare(say)) as work, recipe.open(work, say) as site:
        site.start("first", work / "job")
        for number in range(1, options.runs + 1):
            for variant in (IN_TURN, BESIDE) if number % 2 else (BESIDE, IN_TURN):
                starts.forget("again", work / "job")
                done = site.start("again", work / "job", program=(*STARTED, variant))
                report.runs.append(as_run(done, variant, number))
                waited = done.record.image.get("waited_seconds")
                say(f"{variant} {number}: {done.seconds:.2f} s, readers of the image waited for {waited} s")


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``."""
    found = Figures(report, say)
    found.gain("gain_turn", IN_TURN, BESIDE)
    return found


if __name__ == "__main__":
    parser = invocation.parser("turn", __doc__, quick="one round of the small job", runs=(5, 1))
    sys.exit(invocation.carry_out(parser, _run, compute))
