"""Resuming from and saving checkpoints on HDFS: through the mount, with torch, again on the same node; against vanilla.

    scripts/bench checkpoint [--quick] [--runs N] [--work DIR] [--out report.json] [--parts LIST]

Needs root, Hadoop's jars, and ``scripts/bench-peers fuse``. NameNode and DataNodes are a JVM each; the link of each
DataNode carries 60 MiB/s in each direction (``capped``); ``free`` is loopback without limits, ``local`` has no HDFS.
Every run is a process of its own (``client``); variants take turns; all bytes are compared with what was
written, after the clock has stopped. ``docs/internals/benchmarks.md`` says the rest.
"""

from __future__ import annotations

import os
import shutil
import sys

from bench.checkpoint import capped, local, many, state
from bench.checkpoint.figures import compute
from bench.common import invocation
from bench.common.invocation import Options, chosen
from bench.common.report import Report
from bench.stripes import free
from bootseer.errors import FullError

GiB = 1 << 30
PARTS = ("local", "small", *capped.PARTS, "free", *many.PARTS)
CLIENT = "bench.checkpoint.client"
_DISK = 7
"""Free disk that is needed, as a multiple of the checkpoint: HDFS has it twice with 2 replicas, a node cache once."""


def _run(options: Options, report: Report) -> None:
    size, work = GiB // 4 if options.quick else 2 * GiB, options.work
    parts = chosen(options.parts, PARTS)
    if set(parts) & set(many.PARTS):
        many.run(work, report, parts, count=2_000 if options.quick else 10_000, rounds=options.runs)
    if set(parts) <= set(many.PARTS):
        return
    if (spare := shutil.disk_usage(work).free) < _DISK * size:
        raise FullError(f"only {spare / GiB:.0f} GiB free at {work}, {_DISK * size / GiB:.0f} are needed")
    os.environ |= {
        "TMPDIR": str(work), "BOOTSEER_CACHE_DIR": f"{work}/cache", "BOOTSEER_STATE_DIR": f"{work}/state"
    }  # fmt: skip
    large = state.make(work / "large.pt", size)
    small = state.make(work / "small.pt", size // 2)
    few = state.make(work / "few.pt", GiB // 8 if options.quick else 3 * GiB // 8)
    if "local" in parts:
        local.run(work, report, large.path, rounds=options.runs)
    if "small" in parts:
        local.small_tensors(work, report, rounds=options.runs)
    if set(parts) & set(capped.PARTS):
        capped.Capped(work, report, large, small, few, CLIENT, rounds=options.runs).run(parts)
    if "free" in parts:
        free.run(work, report, small.path, rounds=options.runs)


if __name__ == "__main__":
    quick = "256 MiB instead of 2 GiB, 3 runs instead of 5"
    parser = invocation.parser("checkpoint", __doc__, quick=quick, runs=(5, 3), work=True)
    parser.add_argument("--parts", default="", help=f"of: {','.join(PARTS)}")
    sys.exit(invocation.carry_out(parser, _run, compute))
