"""What single parts of a lazy start are worth: the same start with and without one of them, by turns.

    scripts/bench ablate [--quick] [--parts A,B,...] [--runs N] [--append] [--out report.json]

The starts are those that bench/image calls ``hot``: an empty node behind a shaped link, three starts recorded before,
in its image of 7 GB (``--quick``: 0.8 GB); those of ``reach`` know nothing of the job. `ablated` lists the parts.
``gain_PART`` is the percentage of the time that the part saves: the median over rounds, in each of which a start with
it and a start without it follow one another.

Needs what bench/image needs, but no peers. Five rounds of all parts take about 20 minutes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from functools import partial

from bench.common import invocation
from bench.common.figures import Figures, Say, gains
from bench.common.invocation import Options, chosen, say
from bench.common.report import Report, Run
from bench.image import rounds
from bench.image import site as image_site
from bench.image.ablated import PARTS, WITH, WITHOUT, Part
from bench.image.parts import SMALL, TORCH, Parts
from bootseer.blocks.tree import ProfileKey
from bootseer.objects import Store, open_store

SERVER = (sys.executable, "-m", "bench.image.ablated")


class Ablation(rounds.Bench):
    """The rounds of ``parts``."""

    def rounds(self, parts: list[Part]) -> None:
        """Convert, record, then the starts."""
        self.convert()
        self.record()
        store = open_store(self.site.store())
        known = self._profile(store)
        for number in range(1, self.options.runs + 1):
            for part in parts:
                for how in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                    self.guarded(f"{part.name}:{how}", number, partial(self._with, part, how, number))
                    # Every start is to find the profile that the first one found.
                    for key in self._profile(store) - known:
                        store.delete(key)

    def _profile(self, store: Store) -> set[str]:
        return {info.key for info in store.list(ProfileKey("bench").prefix(self.digest))}

    def _with(self, part: Part, how: str, number: int) -> Run:
        with self.place() as place:
            order = self.ours(place, None if part.first else "bench", far=part.far)
            order.environ = dict(part.settings) if how == WITHOUT else {}
            order.server = [*SERVER, part.name, how]
            return self.outcome(f"{part.name}:{how}", number, order)


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``."""
    found = Figures(report, say)
    for part in PARTS:
        found.gain(f"gain_{part.name}", *_names(part), part.target)
    return found


def _names(part: Part) -> tuple[str, str]:
    """Of the variants with it and without."""
    return f"{part.name}:{WITH}", f"{part.name}:{WITHOUT}"


def table(runs: list[Run]) -> Iterator[str]:
    """A line per part, in Markdown."""
    found = Figures(Report(name="", runs=runs), lambda line: None)
    yield "| part | without it | seconds with | without | gain, % | least to most | MB moved with | without |"
    yield "|---|---|---|---|---|---|---|---|"
    for part in PARTS:
        if not (saved := gains(runs, *_names(part))):
            continue
        names = _names(part)
        seconds = " | ".join(f"{statistics.median(found.values(name)):.2f}" for name in names)
        moved = " | ".join(f"{statistics.median(found.values(name, 'link')) / 1e6:.0f}" for name in names)
        spread = f"{statistics.median(saved):.1f} | {min(saved):.1f} to {max(saved):.1f}"
        yield f"| {part.name} | {part.without} | {seconds} | {spread} | {moved} |"


def _run(options: Options, report: Report) -> None:
    names = chosen(options.parts, [part.name for part in PARTS])
    parts = Parts(SMALL if options.quick else TORCH, say)
    with image_site.prepared(parts, options) as (work, site):
        Ablation(options, work, site, parts, report, []).rounds([part for part in PARTS if part.name in names])
    print("\n".join(table(report.runs)))


if __name__ == "__main__":
    parser = invocation.parser("ablate", __doc__, quick="a small image, at most 5 minutes", runs=(5, 2), append=True)
    parser.add_argument("--parts", default="", help=f"of: {','.join(part.name for part in PARTS)}")
    image_site.options(parser)
    sys.exit(invocation.carry_out(parser, _run, compute))
