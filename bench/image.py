"""Readiness of a container behind a shaped link: ours, all local, full pull, nydus; and what conversion and reads cost.

    python bench/image.py [--quick] [--runs N] [--variants A,B,...] [--append] [--plot FILE] [--out report.json]

Readiness is the time from asking for a start to the job's first useful output: ``import torch, transformers`` and a
forward pass of a tiny Llama, in an image of 7 GB (``--quick``: numpy, pandas and scikit-learn, 0.8 GB). Registry and
store are behind a link of ``--rate`` Mbit/s (network namespace, tc tbf); variants ending in ``-10ms`` reach them
through a proxy that adds ``--rtt`` seconds. Every start has an empty page cache (all but ``local-warm``, which is what
the job needs by itself) and, but for ``local`` and ``warm``, an empty node. The variants of a round run one after
another, then the next round. Ours are ``hot`` (three starts recorded before through the same driver), ``on-demand``
(without a profile), ``warm`` (its hot blocks on the node already) with and without recording.

Needs root, a docker-registry, runc or crun, ``scripts/bench-peers`` for the peers, and 40 GB of disk in the development
cache, where the image stays. A variant that cannot run is listed with its reason. ``--append`` adds runs to the report
that is there, so that a long bench can be done in parts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

import _figures
import _parts
import _plot
import _site
from _rounds import OTHERS, SPARE, Bench, say, starts
from bootseer import report
from bootseer.demo import workplace
from bootseer.errors import BootseerError, FullError, PrivilegeError
from bootseer.kernel import canary


def _document(options: argparse.Namespace) -> report.Report:
    """A new report; or the one that is there, to add to."""
    document = report.new("image-quick" if options.quick else "image")
    if options.append and options.out and options.out.exists():
        old = msgspec.json.decode(options.out.read_bytes(), type=report.Report)
        if (old.name, old.machine) != (document.name, document.machine):
            raise BootseerError(f"{options.out} is of another bench or machine", hint="leave out --append")
        document.runs = old.runs
        document.commit = " ".join(dict.fromkeys([*old.commit.split(), document.commit]))
    return document


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small image, three runs of each, at most 5 minutes")
    parser.add_argument("--runs", type=int, help="runs of each variant (default 5, quick 3)")
    parser.add_argument("--conversions", type=int, help="runs of the conversions (default 2, quick 1)")
    parser.add_argument("--variants", help=f"comma-separated, of: {', '.join([*starts(), *OTHERS])}; all by default."
                        " A trailing * stands for any ending")  # fmt: skip
    parser.add_argument("--without", help="variants to leave out, in the same form")
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s of the link")
    parser.add_argument("--rtt", type=float, default=0.01, help="seconds of the -10ms variants' round trip")
    parser.add_argument(
        "--store", choices=_site.STORES, default=_site.default_store(), help="where converted images go"
    )
    parser.add_argument("--append", action="store_true", help="add to the runs of the report that is there")
    parser.add_argument("--plot", type=Path, help="also draw the readiness of the variants, as SVG")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.runs = options.runs or (3 if options.quick else 5)
    options.conversions = options.conversions or (1 if options.quick else 2)
    return options


def _choose(options: argparse.Namespace, folder: Path) -> list[str]:
    """The variants to run; by default all but those that nothing rests on for a node cache in ``folder``."""
    known = [*starts(), *OTHERS]

    def named(text: str) -> list[str]:
        found = []
        for pattern in text.split(","):
            some = [n for n in known if n == pattern or (pattern.endswith("*") and n.startswith(pattern[:-1]))]
            if not some:
                raise SystemExit(f"error: no variant is called {pattern}; there are: {', '.join(known)}")
            found += some
        return found

    if options.variants:
        chosen = named(options.variants)
    else:
        works = canary.fanotify_works(folder, folder).works
        spare = [*(SPARE if works else []), *(["nydus-prefetch-10ms"] if options.quick else [])]
        chosen = [name for name in known if name not in spare]
    left_out = named(options.without) if options.without else []
    return [name for name in chosen if name not in left_out]


def main() -> int:
    options = _options()
    try:
        _run(options)
    except BootseerError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise PrivilegeError("the bench mounts file systems and makes network namespaces", hint="run it with sudo")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    document = _document(options)
    parts = _parts.Parts(_parts.SMALL if options.quick else _parts.TORCH, say)
    parts.folder.mkdir(parents=True, exist_ok=True)
    variants = _choose(options, parts.folder)
    began = time.monotonic()
    with workplace.only_one(parts.folder.parent):  # the network names are shared
        workplace.sweep(parts.folder)
        nydus = any(name.startswith("nydus") for name in variants)
        try:
            parts.prepare(nydus=nydus)
        except BootseerError as exc:
            if not nydus or isinstance(exc, FullError):
                raise
            say(f"no nydus: {exc}")
            parts.prepare(nydus=False)
        work = workplace.make(parts.folder)
        try:
            with _site.site(parts, work, rate_mbit=options.rate, rtt=options.rtt, store=options.store) as site:
                bench = Bench(options, work, site, parts, document, variants)
                bench.run()
        finally:
            workplace.remove(work)
    _figures.compute(document, say)
    for figure in document.figures:
        met = "met" if figure.met else "NOT MET"
        print(f"{figure.name:28} {figure.value:9.4f} {figure.unit}  n={figure.n}  target {figure.target}  {met}")
    if options.out:
        document.write(options.out)
    if options.plot:
        options.plot.write_text(_plot.readiness(document.runs, starts()))
    say(f"took {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    sys.exit(main())
