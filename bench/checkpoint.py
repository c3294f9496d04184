"""Resuming from and saving checkpoints on HDFS: through the mount, with torch, again on the same node; against vanilla.

    python bench/checkpoint.py [--quick] [--rounds N] [--work DIR] [--out report.json] [--parts LIST]

Needs root, Hadoop's jars, and ``scripts/bench-peers fuse``. NameNode and DataNodes are a JVM each; the link of each
DataNode carries 60 MiB/s in each direction (``capped``); ``free`` is loopback without limits, ``local`` has no HDFS.
Every run is a process of its own (``_checkpoint_client``); variants take turns; all bytes are compared with what was
written, after the clock has stopped. ``docs/howto/bench-checkpoint.md`` says the rest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import _checkpoint_capped
import _checkpoint_figures
import _checkpoint_local
import _checkpoint_state
import _stripes_free
from _rounds import main as guarded
from _stripes_run import arguments, session
from bootseer.errors import FullError

GiB = 1 << 30
PARTS = ("local", *_checkpoint_capped.PARTS, "free")
CLIENT = Path(__file__).with_name("_checkpoint_client.py")
_DISK = 7
"""Free disk that is needed, as a multiple of the checkpoint: HDFS has it twice with 2 replicas, a node cache once."""


def run(options: argparse.Namespace) -> None:
    with session("checkpoint", options, _checkpoint_figures.compute) as (work, out, parts, rounds):
        size = GiB // 4 if options.quick else 2 * GiB
        if (free := shutil.disk_usage(work).free) < _DISK * size:
            raise FullError(f"only {free / GiB:.0f} GiB free at {work}, {_DISK * size / GiB:.0f} are needed")
        os.environ |= {
            "TMPDIR": str(work), "BOOTSEER_CACHE_DIR": f"{work}/cache", "BOOTSEER_STATE_DIR": f"{work}/state"
        }  # fmt: skip
        large = _checkpoint_state.make(work / "large.pt", size)
        small = _checkpoint_state.make(work / "small.pt", size // 2)
        few = _checkpoint_state.make(work / "few.pt", GiB // 8 if options.quick else 3 * GiB // 8)
        if "local" in parts:
            _checkpoint_local.run(work, out, large.path, rounds=rounds)
        if set(parts) & set(_checkpoint_capped.PARTS):
            _checkpoint_capped.Capped(work, out, large, small, few, CLIENT, rounds=rounds).run(parts)
        if "free" in parts:
            _stripes_free.run(work, out, small.path, rounds=rounds)


def main() -> int:
    parser = arguments("checkpoint", __doc__ or "", PARTS, "256 MiB instead of 2 GiB, 3 rounds instead of 5")
    options = parser.parse_args()
    if wrong := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"no part named {', '.join(sorted(wrong))}")
    return guarded(run, options)


if __name__ == "__main__":
    sys.exit(main())
