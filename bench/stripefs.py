"""Striped files on HDFS against one HDFS file: reads, writes, with slow, frozen and dead DataNodes, and without limits.

    python bench/stripefs.py [--quick] [--rounds N] [--work DIR] [--out report.json] [--plot FILE.svg] [--parts LIST]

Needs root and Hadoop's jars. NameNode and DataNodes are a JVM each; each DataNode is in a network namespace whose link
carries 60 MiB/s in each direction (``capped``), then the same on loopback without limits (``free``). Every run is a
process of its own (``_stripes_client``); variants take turns, so that a slow minute hits all of them; every byte that
is read is compared with what was written, after the clock has stopped. ``docs/howto/bench-stripefs.md`` says the rest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import _stripes_figures
import _stripes_free
import _stripes_plot
from _stripes_capped import CAP, PARTS, Capped
from _stripes_run import say
from bootseer import report

KiB, MiB = 1 << 10, 1 << 20


def _content(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        for _ in range(size // MiB):
            file.write(os.urandom(MiB))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench stripefs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="96 MiB instead of 320, 3 rounds instead of 5, small scan")
    parser.add_argument("--rounds", type=int, default=0, help="runs of each variant")
    parser.add_argument("--parts", default=",".join((*PARTS, "free")), help="of: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--plot", type=Path, help="draw the scan of widths and units as SVG")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    rounds = options.rounds or (3 if options.quick else 5)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out = report.new("stripefs")
    work = Path(tempfile.mkdtemp(prefix="bench-stripefs-", dir=options.work))
    began = time.monotonic()
    try:
        content = _content(work / "content", (96 if options.quick else 320) * MiB)
        small = _content(work / "small", (64 if options.quick else 256) * MiB)
        widths, units, reads = [1, 2, 4, 8, 16], [256 * KiB, MiB, 4 * MiB, 16 * MiB], 3
        if options.quick:
            widths, units, reads = [1, 4, 16], [MiB, 16 * MiB], 1
        if set(parts) & set(PARTS):
            Capped(work, out, content, small, rounds=rounds, scan=(widths, units, reads), brief=options.quick).run(
                parts
            )
        if "free" in parts:
            _stripes_free.run(work, out, content, rounds=rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _stripes_figures.compute(out, say)
        for made in out.figures:
            print(f"{made.name}: {made.value} (target {made.target}){'' if made.met else ', not met'}", flush=True)
        say(f"{time.monotonic() - began:.0f} s in all")
        if options.out:
            out.write(options.out)
        if options.plot:
            options.plot.write_text(_stripes_plot.scan(out.runs, 4 * CAP))
    return 0


if __name__ == "__main__":
    sys.exit(main())
