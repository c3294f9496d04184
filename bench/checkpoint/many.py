"""The part of bench/checkpoint with many small files: a folder of them into HDFS and back, beside Hadoop's own client.

Both are programs that start, of which Hadoop's is a JVM, with 8 threads; replication is 3, on loopback without limits.
One folder is put before, for the DataNodes to warm up.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common.invocation import say
from bench.stripes.runner import Wrong
from bootseer.demo.report import Report, Run
from bootseer.errors import BootseerError
from support.hadoop import HadoopCluster

_FOLDER = 1000
_LIMIT = 600.0


def _made(root: Path, count: int) -> Path:
    """``count`` files of 1 to 10 KB, in folders of `_FOLDER`."""
    some = random.Random(count)
    for number in range(count):
        file = root / f"d{number // _FOLDER:02}/f{number:05}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(some.randbytes(some.randint(1000, 10_000)))
    return root


def run(work: Path, report: Report, *, count: int, rounds: int) -> None:
    local, back = _made(work / "many", count), work / "back"
    ours = [sys.executable, "-m", "bootseer.cli.main", "fs"]

    def timed(variant: str, n: int, argv: Sequence[str]) -> None:
        began = time.monotonic()
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT)
        seconds = time.monotonic() - began
        if done.returncode:
            raise BootseerError(f"{variant} failed: {done.stderr[-300:]}")
        say(f"many:{variant}: {seconds:.1f} s, {count / seconds:.0f} files/s")
        details = {"files": count, "files_per_s": round(count / seconds, 1)}
        report.runs.append(Run(variant=f"many:{variant}", n=n, seconds=round(seconds, 3), details=details))
        if "get" in variant:
            if subprocess.run(["diff", "-rq", back / "x", local], capture_output=True).returncode:
                raise Wrong(f"{variant} has other bytes than were written")
            shutil.rmtree(back)

    with HadoopCluster(work / "hdfs") as cluster:
        cluster.fs_shell(["-put", str(local / "d00"), "/warm"])  # DataNodes compile what they do while they do it
        for n in range(1, rounds + 1):
            for who in ("bootseer", "hadoop") if n % 2 else ("hadoop", "bootseer"):
                place = f"/{who}-{n}"
                os.makedirs(back)
                if who == "bootseer":
                    timed("put", n, [*ours, "put", str(local), f"{cluster.url}{place}/x"])
                    timed("get", n, [*ours, "get", f"{cluster.url}{place}/x", str(back / "x")])
                else:
                    cluster.fs_shell(["-mkdir", place])
                    timed("hadoop-put", n, cluster.shell_argv(["-put", "-t", "8", str(local), f"{place}/x"]))
                    timed("hadoop-get", n, cluster.shell_argv(["-get", "-t", "8", f"{place}/x", str(back / "x")]))
                cluster.fs_shell(["-rm", "-r", "-skipTrash", place])
    shutil.rmtree(local)
