"""Striped files on HDFS against one HDFS file: reads, writes, with slow, frozen and dead DataNodes, and without limits.

    scripts/bench stripefs [--quick] [--runs N] [--work DIR] [--out report.json] [--parts LIST]

Needs root and Hadoop's jars. NameNode and DataNodes are a JVM each; each DataNode is in a network namespace whose link
carries 60 MiB/s in each direction (``capped``), then the same on loopback without limits (``free``), and with Kerberos
(``secured``). Every run is a process of its own (``client``); variants take turns, so that a slow minute hits all of
them; every byte that is read is compared with what was written, after the clock has stopped.
``docs/internals/benchmarks.md`` says the rest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.common import invocation
from bench.common.invocation import Options, chosen
from bench.common.report import Report
from bench.stripes import free, secured
from bench.stripes.capped import PARTS, Capped
from bench.stripes.figures import compute

KiB, MiB = 1 << 10, 1 << 20
ALL = (*PARTS, "free", "secured", "secured-frozen")


def _content(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        for _ in range(size // MiB):
            file.write(os.urandom(MiB))
    return path


def _run(options: Options, report: Report) -> None:
    content = _content(options.work / "content", (96 if options.quick else 320) * MiB)
    small = _content(options.work / "small", (64 if options.quick else 256) * MiB)
    large = _content(options.work / "large", (320 if options.quick else 768) * MiB)
    widths, units, reads = [1, 2, 4, 8, 16], [256 * KiB, MiB, 4 * MiB, 16 * MiB], 3
    if options.quick:
        widths, units, reads = [1, 4, 16], [MiB, 16 * MiB], 1
    parts = chosen(options.parts, ALL)
    if set(parts) & set(PARTS):
        scan = (widths, units, reads)
        files = (content, small, large)
        Capped(options.work, report, *files, rounds=options.runs, scan=scan, brief=options.quick).run(parts)
    if "free" in parts:
        free.run(options.work, report, content, rounds=options.runs)
    if "secured" in parts:
        secured.run(options.work, report, content, rounds=options.runs)
    if "secured-frozen" in parts:
        largest = _content(options.work / "largest", (320 if options.quick else 1024) * MiB)
        secured.frozen(options.work, report, largest, rounds=options.runs)


if __name__ == "__main__":
    quick = "96 MiB instead of 320 (with faults 320 instead of 768 and 1,024), 3 runs instead of 5, small scan"
    parser = invocation.parser("stripefs", __doc__, quick=quick, runs=(5, 3), work=True)
    parser.add_argument("--parts", default="", help=f"of: {','.join(ALL)}")
    sys.exit(invocation.carry_out(parser, _run, compute))
