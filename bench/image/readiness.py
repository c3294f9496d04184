"""Readiness of a container behind a shaped link: ours, all local, full pull, nydus; and what conversion and reads cost.

    scripts/bench image [--quick] [--runs N] [--variants A,B,...] [--append] [--out report.json]

Readiness is the time from asking for a start to the job's first useful output: ``import torch, transformers`` and a
forward pass of a tiny Llama, in an image of 7 GB (``--quick``: numpy, pandas and scikit-learn, 0.8 GB). Registry and
store are behind a link of ``--rate`` Mbit/s (network namespace, tc tbf); variants ending in ``-10ms`` reach them
through a proxy that adds ``--rtt`` seconds. Every start has an empty page cache (all but ``local-warm``, which is what
the job needs by itself) and, but for ``local`` and ``warm``, an empty node. The variants of a round run one after
another, then the next round. Ours are ``hot`` (three starts recorded before), ``on-demand`` (without a profile),
``warm`` (its hot blocks on the node already) with and without recording, and ``hdfs``: as ``hot``, with the store in
HDFS, also with one of four DataNodes frozen or slow. ``--against DIR`` runs ours from another
checkout as well, such as a worktree of the commit before, by turns: variants ending in ``@before``.

Needs root, a docker-registry, runc or crun, ``scripts/bench-peers`` for the peers, and 40 GB of disk in the development
cache, where the image stays. A variant that cannot run is listed with its reason. ``--append`` adds runs to the report
that is there, so that a long bench can be done in parts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.common import invocation
from bench.common.invocation import Options, chosen, say
from bench.common.report import Report
from bench.image import site as image_site
from bench.image.checkout import BEFORE, Checkout
from bench.image.figures import compute
from bench.image.hdfs import STARTS as HDFS_STARTS
from bench.image.parts import SMALL, TORCH, Parts
from bench.image.rounds import OTHERS, STARTS, Bench, brought


def _variants(options: Options) -> list[str]:
    """Those to run."""
    known = [*STARTS, *OTHERS]
    left_out = chosen(options.without, known) if options.without else []
    return [name for name in chosen(options.variants, known) if name not in left_out]


def _run(options: Options, report: Report) -> None:
    variants = _variants(options)
    peers = brought(options.peer)
    options.conversions = options.conversions or (1 if options.quick else 2)
    against = Checkout(options.against, BEFORE) if options.against else None
    parts = Parts(SMALL if options.quick else TORCH, say)
    nydus = any(name.startswith("nydus") for name in variants)
    hdfs = any(name in HDFS_STARTS for name in variants)
    with image_site.prepared(parts, options, nydus=nydus, hdfs=hdfs) as (work, site):
        Bench(options, work, site, parts, report, variants, against, peers).run()


if __name__ == "__main__":
    quick = "a small image, three runs of each, at most 5 minutes"
    parser = invocation.parser("image", __doc__, quick=quick, runs=(5, 3), append=True)
    parser.add_argument("--conversions", type=int, help="runs of the conversions (default 2, quick 1)")
    parser.add_argument("--variants", default="", help=f"comma-separated, of: {', '.join([*STARTS, *OTHERS])}; all by"
                        " default. A trailing * stands for any ending")  # fmt: skip
    parser.add_argument("--without", help="variants to leave out, in the same form")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PROGRAM",
        help="the variant peer:NAME: PROGRAM REF FOLDER COMMAND... runs the job and passes on what it says",
    )  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout whose starts are to be compared")
    image_site.options(parser)
    sys.exit(invocation.carry_out(parser, _run, compute))
