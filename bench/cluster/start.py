"""What the order of a start's bytes is worth: its checkpoint recorded or whole, after the image's hot blocks or beside.

    scripts/bench start [--quick] [--runs N] [--unread MB] [--rate MBIT] [--out report.json]

The starts are those of ``bootseer demo`` on a cold node: a container image, an environment and a checkpoint come over
one link (300 Mbit/s). What the job reads of the checkpoint is made larger (``--read``, 128 MB more). Beside it the
checkpoint has a file that it does not read, as the optimizer's moments are for who evaluates or fine-tunes
(``--unread``, 96 MB). One start goes before and is recorded.
Then, in each round and alternating order, one start of each kind that `started` names. A gain is the percentage of the
time to the first step that a part saves, the median over the rounds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy
from safetensors.numpy import load_file, save_file

from bench.cluster.started import BESIDE, EVERYTHING, IN_TURN, NEITHER, STARTED, VARIANTS
from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bench.demo.reported import as_run
from bootseer import stripefs
from bootseer.demo import starts, workplace
from bootseer.demo.ingredients import STATE
from bootseer.demo.light import Light, LightSite
from support import devcache

GAINS = {
    "gain_record": (IN_TURN, EVERYTHING),
    "gain_turn": (IN_TURN, BESIDE),
    "gain_turn_without_record": (EVERYTHING, NEITHER),
}
"""The variant with a part of the product and the one without."""


class Start(Light):
    """The demo's recipe with a larger checkpoint: ``read`` MB more of what the job reads, ``unread`` MB of the rest."""

    checkpoint = "striped/run/step-1"

    def __init__(self, cache: Path, options: Options) -> None:
        super().__init__(cache, options.rate)
        self._read, self._unread = options.read, options.unread

    def lay_out(self, site: Path) -> None:
        super().lay_out(site)
        fs = stripefs.open_fs(str(site / "striped"))
        state = load_file(self.ingredients.checkpoint / STATE)
        state["more"] = numpy.frombuffer(os.urandom(self._read * 1_000_000), numpy.uint8)
        save_file(state, site / STATE)
        fs.put(site / STATE, f"run/step-1/{STATE}")
        with fs.create("run/step-1/optimizer.bin") as out:
            for _ in range(self._unread):
                out.write(os.urandom(1_000_000))
        fs.commit("run/step-1")


def once(site: LightSite, name: str, variant: str, number: int, work: Path) -> Run:
    """One start, on a cold node. One name of the job: its starts share what they record."""
    starts.forget("start", work)
    done = site.start("start", work, program=(*STARTED, variant))
    say(f"{name} {number}: {done.seconds:.2f} s, {done.bytes_ready / 1e6:.0f} MB until the first step")
    return as_run(done, variant, number)


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``."""
    found = Figures(report, say)
    for name, (ours, other) in GAINS.items():
        found.gain(name, ours, other)
    return found


def _run(options: Options, report: Report) -> None:
    cache = workplace.claim(devcache.folder("bench/start"))
    recipe = Start(cache, options)
    with workplace.session(cache, lambda: recipe.prepare(say)) as work, recipe.open(work, say) as site:
        once(site, "record", IN_TURN, 0, work / "job")
        for number in range(1, options.runs + 1):
            for variant in VARIANTS if number % 2 else reversed(VARIANTS):
                report.runs.append(once(site, variant, variant, number, work / "job"))


if __name__ == "__main__":
    parser = invocation.parser("start", __doc__, quick="two rounds", runs=(5, 2), append=True)
    parser.add_argument(
        "--read", type=int, default=128, help="MB that the job reads of the checkpoint beside its state"
    )
    parser.add_argument("--unread", type=int, default=96, help="MB of the checkpoint that the job does not read")
    parser.add_argument("--rate", type=float, default=300.0, help="of the link, Mbit/s")
    sys.exit(invocation.carry_out(parser, _run, compute))
