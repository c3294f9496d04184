"""The reader of blocks against ``hdfs-native`` on the same files in the same run, and what checksums cost.

    python bench/datanode.py [--quick] [--size MIB] [--rounds N] [--url hdfs://host:port] [--out report.json]
    python bench/datanode.py checksums

A file for each number of bytes per checksum, of one block with a replica on each of four DataNodes, in the page cache.
One stream reads it from one DataNode, four streams from four, in ranges of 8 MiB, in threads as the engine does; with
HDFS's checksums verified and without. hdfs-native always verifies. Rounds are interleaved; figures are ratios of
medians, of rates and of the reader's CPU time (which other work on the machine disturbs less). ``checksums`` prints
the speed of checking packets of 64 KiB, chunk by chunk and together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bootseer import report
from bootseer.hdfs import checksum, datanode
from bootseer.hdfs import client as hdfs
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.records import Located
from support.hadoop import HadoopCluster

MIB = 1 << 20
RANGE = 8 * MIB
STEPS = (512, 64 << 10, 1 << 20)
STREAMS = (1, 4)


def checksums() -> None:
    """GiB/s of one core over packets of 64 KiB in chunks of 512 bytes."""
    data = memoryview(os.urandom(64 << 10))
    for name, kind in (("CRC32", checksum.CRC32), ("CRC32C", checksum.CRC32C)):
        crc, chunks = checksum.function(kind), checksum.Chunks(kind, 512)
        sums = memoryview(b"".join(crc(data[at : at + 512], 0).to_bytes(4, "big") for at in range(0, len(data), 512)))
        ways: dict[str, Callable[[], object]] = {
            "the CRC alone": lambda crc=crc: crc(data, 0),  # type: ignore[misc]
            "together": lambda chunks=chunks, sums=sums: chunks.first_wrong(sums, [data]),  # type: ignore[misc]
            "chunk by chunk": lambda chunks=chunks, sums=sums: chunks.one_by_one(sums, [data]),  # type: ignore[misc]
        }
        for way, function in ways.items():
            best = min(_timed(function, 300) for _ in range(5))
            print(f"{name:7} {way:15} {len(data) / best / (1 << 30):6.2f} GiB/s")


def _timed(function: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - began) / times


def in_threads(work: Callable[[int], None], count: int) -> tuple[float, float]:
    """Seconds until ``work(0)`` to ``work(count - 1)`` have ended, each in a thread; and of CPU that they took."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    began, before = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began, time.process_time() - before
    if failed:
        raise failed[0]
    return took


class Bench:
    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.options, self.url = options, url
        self.document = report.new("datanode")
        self.size = options.size * MIB
        self.folder = f"/bench-{uuid.uuid4().hex[:8]}"
        self.located: dict[int, Located] = {}
        self.buffers = [memoryview(bytearray(self.size)) for _ in range(max(STREAMS))]
        self.content = os.urandom(MIB) * options.size

    def write(self) -> None:
        namenode = NameNode.connect(self.url)
        for step in STEPS:
            path = f"{self.folder}/{step}"
            with FileOutput(
                namenode, path, replication=max(STREAMS), block_size=self.size, bytes_per_checksum=step
            ) as out:
                out.write(self.content)
            (self.located[step],) = namenode.blocks(path).blocks

    def ours(self, step: int, streams: int, verify: bool) -> tuple[float, float]:
        located = self.located[step]

        def work(number: int) -> None:
            node = located.nodes[number % len(located.nodes)]
            for at in range(0, self.size, RANGE):
                part = self.buffers[number][at : at + RANGE]
                datanode.read(node, located, at, [part], deadline=60, verify=verify)

        took = in_threads(work, streams)
        if any(bytes(self.buffers[number]) != self.content for number in range(streams)):
            raise RuntimeError("wrong bytes")
        return took

    def native(self, step: int, streams: int) -> tuple[float, float]:
        client = hdfs.connect(self.url)
        readers = [client.open(f"{self.folder}/{step}") for _ in range(streams)]

        def work(number: int) -> None:
            for at in range(0, self.size, RANGE):
                readers[number].read(at, min(RANGE, self.size - at), deadline=60)

        return in_threads(work, streams)

    def run(self) -> None:
        self.write()
        for number in range(self.options.rounds + 1):
            for step in STEPS:
                for streams in STREAMS:
                    self.note(f"native-{step}-{streams}", number, streams, partial(self.native, step, streams))
                    for name, verify in (("verified", True), ("unverified", False)):
                        run = partial(self.ours, step, streams, verify)
                        self.note(f"{name}-{step}-{streams}", number, streams, run)

    def note(self, variant: str, number: int, streams: int, run: Callable[[], tuple[float, float]]) -> None:
        seconds, cpu = run()
        moved = self.size * streams
        each = f"{moved / seconds / MIB:8.0f} MiB/s  {cpu / moved * (1 << 30):6.2f} s of CPU per GiB"
        print(f"{variant:24} {number}  {each}{'' if number else '   (first, not counted)'}", flush=True)
        if number:
            self.document.runs.append(
                report.Run(variant=variant, n=number, seconds=seconds, bytes={"read": moved}, details={"cpu": cpu})
            )

    def median(self, variant: str, *, cpu: bool = False) -> float:
        runs = [run for run in self.document.runs if run.variant == variant]
        return statistics.median(run.details["cpu"] if cpu else run.seconds or 0.0 for run in runs)

    def add_figures(self) -> None:
        """Our rate and our CPU time, each divided by hdfs-native's."""
        add = partial(self.document.figure, unit="ratio", n=self.options.rounds, of="median")
        for name in ("verified", "unverified"):
            for step in STEPS:
                for streams in STREAMS:
                    ours, native = f"{name}-{step}-{streams}", f"native-{step}-{streams}"
                    add(f"{name}_{step}_{streams}_vs_native", self.median(native) / self.median(ours), target=">= 1")
                    used = self.median(ours, cpu=True) / self.median(native, cpu=True)
                    add(f"cpu_{name}_{step}_{streams}_vs_native", used, target="<= 1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["read", "checksums"], default="read")
    parser.add_argument("--quick", action="store_true", help="smaller files, fewer rounds")
    parser.add_argument("--size", type=int, default=0, help="MiB of each file")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--url", default="", help="a running HDFS with four DataNodes; else one is started")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "checksums":
        checksums()
        return 0
    options.size = options.size or (32 if options.quick else 128)
    options.rounds = options.rounds or (2 if options.quick else 7)
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-", dir="/var/tmp") as work:
        cluster = None if options.url else HadoopCluster(Path(work) / "hdfs")
        try:
            if cluster:
                cluster.start()
            bench = Bench(options.url or cluster.url, options)  # type: ignore[union-attr]
            try:
                bench.run()
            finally:
                hdfs.connect(bench.url).delete(bench.folder, recursive=True)
        finally:
            if cluster:
                cluster.stop()
    bench.add_figures()
    for figure in bench.document.figures:
        print(f"{figure.name:36} {figure.value:.2f}")
    if options.out:
        bench.document.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
