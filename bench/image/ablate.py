"""What single parts of a lazy start are worth: the same start with and without one of them, by turns.

    scripts/bench ablate [--quick] [--parts A,B,...] [--runs N] [--append] [--out report.json]

The starts are those that bench/image calls ``hot``: an empty node behind a shaped link, three starts recorded before,
in its image of 7 GB (``--quick``: 0.8 GB). `ablated` lists the parts. ``gain_PART`` is the percentage of the time
that the part saves: the median over rounds, in each of which a start with it and a start without it follow one another.

Needs what bench/image needs, but no peers. Five rounds of all parts take about 20 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from functools import partial

from bench.common import figures, invocation
from bench.image import parts as image_parts
from bench.image import rounds
from bench.image import site as image_site
from bench.image.ablated import PARTS, WITH, WITHOUT, Part
from bootseer.blocks.tree import ProfileKey
from bootseer.demo.report import Report, Run
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
            order = self.ours(place, "bench")
            order.environ = {**part.both, **(part.settings if how == WITHOUT else {})}
            order.server = [*SERVER, part.name, how]
            return self.outcome(f"{part.name}:{how}", number, order)


def compute(document: Report) -> None:
    """Replace the figures of ``document``."""
    document.figures.clear()
    for part in PARTS:
        if gains := gains_of(document.runs, part):
            gain = round(statistics.median(gains), 1)
            document.figure(f"gain_{part.name}", gain, unit="%", target=part.target, n=len(gains), of="median")


def gains_of(runs: list[Run], part: Part) -> list[float]:
    """The percentage of its time that a start saves by ``part``, for each round."""
    ratios = figures.paired(runs, f"{part.name}:{WITH}", f"{part.name}:{WITHOUT}")
    return [100 * (1 - ratio) for ratio in ratios]


def table(runs: list[Run]) -> Iterator[str]:
    """A line per part, in Markdown."""
    found = figures.Medians(runs)
    yield "| part | without it | seconds with | without | gain, % | least to most | MB moved with | without |"
    yield "|---|---|---|---|---|---|---|---|"
    for part in PARTS:
        if not (gains := gains_of(runs, part)):
            continue
        names = [f"{part.name}:{how}" for how in (WITH, WITHOUT)]
        seconds = " | ".join(f"{found.of(name):.2f}" for name in names)
        moved = " | ".join(f"{found.of(name, 'link') / 1e6:.0f}" for name in names)
        spread = f"{statistics.median(gains):.1f} | {min(gains):.1f} to {max(gains):.1f}"
        yield f"| {part.name} | {part.without} | {seconds} | {spread} | {moved} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--quick", action="store_true", help="a small image, two rounds, at most 5 minutes")
    parser.add_argument("--runs", type=int, help="rounds (default 5, quick 2)")
    parser.add_argument("--parts", default=",".join(names), help="comma-separated, of: %(default)s")
    image_site.options(parser)
    options = parser.parse_args()
    options.runs = options.runs or (2 if options.quick else 5)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(names):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    return options


def _run(options: argparse.Namespace) -> None:
    document = invocation.document("ablate", options)
    parts = image_parts.Parts(image_parts.SMALL if options.quick else image_parts.TORCH, invocation.say)
    with image_site.prepared(parts, options) as (work, site):
        ablation = Ablation(options, work, site, parts, document, [])
        ablation.rounds([part for part in PARTS if part.name in options.parts])
    compute(document)
    print("\n".join(table(document.runs)))
    figures.show(document)
    if options.out:
        document.write(options.out)


if __name__ == "__main__":
    sys.exit(invocation.main(_run, _options()))
