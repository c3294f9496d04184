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

import argparse
import os
import statistics
import sys
from pathlib import Path

import numpy
from safetensors.numpy import load_file, save_file

from bench.cluster.started import BESIDE, EVERYTHING, IN_TURN, NEITHER, STARTED, VARIANTS
from bench.common import figures, invocation, peers
from bootseer import stripefs
from bootseer.demo import starts, workplace
from bootseer.demo.ingredients import STATE
from bootseer.demo.light import Light, LightSite
from bootseer.demo.report import Report, Run

GAINS = {
    "gain_record": (IN_TURN, EVERYTHING, ">= 5"),
    "gain_turn": (IN_TURN, BESIDE, ">= 5"),
    "gain_turn_without_record": (EVERYTHING, NEITHER, ">= 5"),
}
"""The variant with a part of the product, the one without, and the target."""


class Start(Light):
    """The demo's recipe with a larger checkpoint: ``read`` MB more of what the job reads, ``unread`` MB of the rest."""

    checkpoint = "striped/run/step-1"

    def __init__(self, cache: Path, options: argparse.Namespace) -> None:
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
    invocation.say(f"{name} {number}: {done.seconds:.2f} s, {done.bytes_ready / 1e6:.0f} MB until the first step")
    return Run(
        variant=variant,
        n=number,
        seconds=done.seconds,
        bytes={"link": done.bytes_ready, "link_total": done.bytes_total},
        details={"checkpoint": done.record.checkpoint},
        stages=done.record.stages,
    )


def compute(document: Report) -> None:
    """Replace the figures of ``document``."""
    document.figures.clear()
    for name, (ours, other, target) in GAINS.items():
        if gains := [100 * (1 - ratio) for ratio in figures.paired(document.runs, ours, other)]:
            gain = round(statistics.median(gains), 1)
            document.figure(name, gain, unit="%", target=target, n=len(gains), of="median")


def _run(options: argparse.Namespace) -> None:
    document = invocation.document("start", options)
    cache = workplace.claim(peers.cache_dir() / "bench/start")
    recipe = Start(cache, options)
    with (
        workplace.session(cache, lambda: recipe.prepare(invocation.say)) as work,
        recipe.open(work, invocation.say) as site,
    ):
        once(site, "record", IN_TURN, 0, work / "job")
        for number in range(1, options.runs + 1):
            for variant in VARIANTS if number % 2 else reversed(VARIANTS):
                document.runs.append(once(site, variant, variant, number, work / "job"))
    compute(document)
    figures.show(document)
    if options.out:
        document.write(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--runs", type=int, help="rounds (default 5, quick 2)")
    parser.add_argument(
        "--read", type=int, default=128, help="MB of the checkpoint that the job reads beside its state"
    )
    parser.add_argument("--unread", type=int, default=96, help="MB of the checkpoint that the job does not read")
    parser.add_argument("--rate", type=float, default=300.0, help="of the link, Mbit/s")
    parser.add_argument("--append", action="store_true", help="add to the report that is there")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.runs = options.runs or (2 if options.quick else 5)
    return options


if __name__ == "__main__":
    sys.exit(invocation.main(_run, _options()))
