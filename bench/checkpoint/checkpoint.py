"""Resuming from and saving checkpoints on HDFS: through the mount, with torch, again on the same node; against vanilla.

    scripts/bench checkpoint [--quick] [--rounds N] [--work DIR] [--out report.json] [--parts LIST]

Needs root, Hadoop's jars, and ``scripts/bench-peers fuse``. NameNode and DataNodes are a JVM each; the link of each
DataNode carries 60 MiB/s in each direction (``capped``); ``free`` is loopback without limits, ``local`` has no HDFS.
Every run is a process of its own (``client``); variants take turns; all bytes are compared with what was
written, after the clock has stopped. ``docs/howto/bench-checkpoint.md`` says the rest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from bench.checkpoint import capped, local, state
from bench.checkpoint import figures as checkpoint_figures
from bench.common.invocation import main as guarded
from bench.stripes import free
from bench.stripes.runner import arguments, session
from bootseer.errors import FullError

GiB = 1 << 30
PARTS = ("local", *capped.PARTS, "free")
CLIENT = "bench.checkpoint.client"
_DISK = 7
"""Free disk that is needed, as a multiple of the checkpoint: HDFS has it twice with 2 replicas, a node cache once."""


def run(options: argparse.Namespace) -> None:
    with session("checkpoint", options, checkpoint_figures.compute) as (work, out, parts, rounds):
        size = GiB // 4 if options.quick else 2 * GiB
        if (spare := shutil.disk_usage(work).free) < _DISK * size:
            raise FullError(f"only {spare / GiB:.0f} GiB free at {work}, {_DISK * size / GiB:.0f} are needed")
        os.environ |= {
            "TMPDIR": str(work), "BOOTSEER_CACHE_DIR": f"{work}/cache", "BOOTSEER_STATE_DIR": f"{work}/state"
        }  # fmt: skip
        large = state.make(work / "large.pt", size)
        small = state.make(work / "small.pt", size // 2)
        few = state.make(work / "few.pt", GiB // 8 if options.quick else 3 * GiB // 8)
        if "local" in parts:
            local.run(work, out, large.path, rounds=rounds)
        if set(parts) & set(capped.PARTS):
            capped.Capped(work, out, large, small, few, CLIENT, rounds=rounds).run(parts)
        if "free" in parts:
            free.run(work, out, small.path, rounds=rounds)


def main() -> int:
    parser = arguments("checkpoint", __doc__ or "", PARTS, "256 MiB instead of 2 GiB, 3 rounds instead of 5")
    options = parser.parse_args()
    if wrong := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"no part named {', '.join(sorted(wrong))}")
    return guarded(run, options)


if __name__ == "__main__":
    sys.exit(main())
