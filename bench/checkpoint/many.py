"""The parts of bench/checkpoint with many small requests. ``many``: a folder of small files into HDFS and back, beside
Hadoop's own client; ``names``: `ls -l` of many names on a mount; ``random``: what small reads at random fetch.

Both are programs that start, of which Hadoop's is a JVM, with 8 threads; replication is 3, on loopback without limits.
A round before the first is not counted: the daemons' JVMs compile in it what they do afterwards.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.checkpoint import mounts
from bench.common.invocation import say
from bench.common.report import Report, Run
from bench.stripes.runner import Wrong
from bootseer.errors import BootseerError
from bootseer.hdfs.namenode import NameNode
from bootseer.stripefs import open_fs
from support.hadoop import HadoopCluster

PARTS = ("many", "names", "random")
_ASKED, _READS, _SIZE = 4096, 100, 256 << 20
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


def run(work: Path, report: Report, parts: Collection[str], *, count: int, rounds: int) -> None:
    with HadoopCluster(work / "hdfs") as cluster:
        if "many" in parts:
            _files(cluster, work, report, count, rounds)
        if "names" in parts:
            _names(cluster, work, report, 10 * count, rounds)
        if "random" in parts:
            _random(cluster, work, report, rounds)


def _names(cluster: HadoopCluster, work: Path, report: Report, count: int, rounds: int) -> None:
    """Of empty files, each time through a new mount."""
    namenode = NameNode.connect(cluster.url)

    def make(number: int) -> None:
        path = f"/names/f{number:06}"
        namenode.complete(path, namenode.create(path).file_id, None)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(make, range(count)))
    for n in range(1, rounds + 1):
        with mounts.ours(f"{cluster.url}/names", work / "names") as root:
            began = time.monotonic()
            listed = subprocess.run(["ls", "-l", root], stdout=subprocess.PIPE, check=True, timeout=_LIMIT).stdout
            seconds = time.monotonic() - began
        if listed.count(b"\n") != count + 1:
            raise Wrong("ls shows other names than there are")
        report.runs.append(Run(variant="many:ls", n=n, seconds=round(seconds, 3), details={"names": count}))
        say(f"many:ls: {seconds:.2f} s")


def _random(cluster: HadoopCluster, work: Path, report: Report, rounds: int) -> None:
    """Of a plain file, and of striped ones by their units, each time through a new mount."""
    content, place = work / "random", work / "random-mount"
    content.write_bytes(os.urandom(_SIZE))
    cluster.fs_shell(["-mkdir", "/random"])
    cluster.fs_shell(["-put", str(content), "/random/plain"])
    for name, unit in (("striped", 1 << 20), ("striped-64KiB", 64 << 10)):
        open_fs(f"{cluster.url}/random").put(content, name, unit=unit)
    for n in range(1, rounds + 1):
        places = random.Random(n).sample(range(0, _SIZE, _ASKED), _READS)
        for name in ("plain", "striped", "striped-64KiB"):
            with mounts.ours(f"{cluster.url}/random", place) as root, open(root / name, "rb", buffering=0) as file:
                for at in places:
                    os.preadv(file.fileno(), [bytearray(_ASKED)], at)
                ratio = mounts.fetched(root, place) / (_ASKED * _READS)
            details = {"fetched_of_asked": round(ratio, 2)}
            report.runs.append(Run(variant=f"many:random-{name}", n=n, details=details))
            say(f"many:random-{name}: {ratio:.1f} times what is asked")
    content.unlink()


def _files(cluster: HadoopCluster, work: Path, report: Report, count: int, rounds: int) -> None:
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
        if n:
            report.runs.append(Run(variant=f"many:{variant}", n=n, seconds=round(seconds, 3), details=details))
        if "get" in variant:
            if subprocess.run(["diff", "-rq", back / "x", local], capture_output=True).returncode:
                raise Wrong(f"{variant} has other bytes than were written")
            shutil.rmtree(back)

    for n in range(rounds + 1):
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
