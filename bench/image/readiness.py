"""Readiness of a container behind a shaped link: ours, all local, full pull, nydus; and what conversion and reads cost.

    scripts/bench image [--quick] [--runs N] [--variants A,B,...] [--append] [--plot FILE] [--out report.json]

Readiness is the time from asking for a start to the job's first useful output: ``import torch, transformers`` and a
forward pass of a tiny Llama, in an image of 7 GB (``--quick``: numpy, pandas and scikit-learn, 0.8 GB). Registry and
store are behind a link of ``--rate`` Mbit/s (network namespace, tc tbf); variants ending in ``-10ms`` reach them
through a proxy that adds ``--rtt`` seconds. Every start has an empty page cache (all but ``local-warm``, which is what
the job needs by itself) and, but for ``local`` and ``warm``, an empty node. The variants of a round run one after
another, then the next round. Ours are ``hot`` (three starts recorded before), ``on-demand`` (without a profile),
``warm`` (its hot blocks on the node already) with and without recording. ``--against DIR`` runs ours from another
checkout as well, such as a worktree of the commit before, by turns: variants ending in ``@before``.

Needs root, a docker-registry, runc or crun, ``scripts/bench-peers`` for the peers, and 40 GB of disk in the development
cache, where the image stays. A variant that cannot run is listed with its reason. ``--append`` adds runs to the report
that is there, so that a long bench can be done in parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.common import figures, invocation, plot
from bench.common.invocation import say
from bench.image import parts as image_parts
from bench.image import site as image_site
from bench.image.checkout import BEFORE, Checkout
from bench.image.rounds import OTHERS, STARTS, Bench


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small image, three runs of each, at most 5 minutes")
    parser.add_argument("--runs", type=int, help="runs of each variant (default 5, quick 3)")
    parser.add_argument("--conversions", type=int, help="runs of the conversions (default 2, quick 1)")
    parser.add_argument("--variants", help=f"comma-separated, of: {', '.join([*STARTS, *OTHERS])}; all by default."
                        " A trailing * stands for any ending")  # fmt: skip
    parser.add_argument("--without", help="variants to leave out, in the same form")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout whose starts are to be compared")
    parser.add_argument("--plot", type=Path, help="also draw the readiness of the variants, as SVG")
    image_site.options(parser)
    options = parser.parse_args()
    options.runs = options.runs or (3 if options.quick else 5)
    options.conversions = options.conversions or (1 if options.quick else 2)
    return options


def _choose(options: argparse.Namespace) -> list[str]:
    """The variants to run."""
    known = [*STARTS, *OTHERS]

    def named(text: str) -> list[str]:
        found = []
        for pattern in text.split(","):
            some = [n for n in known if n == pattern or (pattern.endswith("*") and n.startswith(pattern[:-1]))]
            if not some:
                raise SystemExit(f"error: no variant is called {pattern}; there are: {', '.join(known)}")
            found += some
        return found

    spare = ["nydus-prefetch-10ms"] if options.quick else []
    chosen = named(options.variants) if options.variants else [name for name in known if name not in spare]
    left_out = named(options.without) if options.without else []
    return [name for name in chosen if name not in left_out]


def _run(options: argparse.Namespace) -> None:
    document = invocation.document("image", options)
    variants = _choose(options)
    against = Checkout(options.against, BEFORE) if options.against else None
    parts = image_parts.Parts(image_parts.SMALL if options.quick else image_parts.TORCH, say)
    began = time.monotonic()
    nydus = any(name.startswith("nydus") for name in variants)
    with image_site.prepared(parts, options, nydus=nydus) as (work, site):
        Bench(options, work, site, parts, document, variants, against).run()
    figures.compute(document, say)
    figures.show(document)
    if options.out:
        document.write(options.out)
    if options.plot:
        options.plot.write_text(plot.readiness(document.runs, STARTS))
    say(f"took {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    sys.exit(invocation.main(_run, _options()))
