"""Reading one file from HDFS: striped, in parallel ranges, through one hdfs-native read, and with Hadoop's own client.

    python bench/stripefs.py [--quick] [--repeats N] [--work DIR] [--out report.json]

Needs root. NameNode and 4 DataNodes, a JVM each; each DataNode in a network namespace whose link is limited to 60 MiB/s
both ways (``capped``), then the same on loopback without limits (``free``). Every variant reads the same bytes into
memory (the stock client: into a file in /dev/shm; the seconds of a listing, its JVM's start, are subtracted) and every
read is compared with what was written. Variants take turns, so that a slow moment hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bootseer import hdfs, report
from bootseer.stripefs import StripeFS, open_fs
from bootseer.testing.hadoop import HadoopCluster
from bootseer.testing.netns import ShapedNetwork

CAP = 60 * 2**20
VARIANTS = ("hadoop-client", "hdfs-native", "plain-parallel", "striped")


class Reader:
    """The variants over one cluster; each returns the digest of what it read."""

    def __init__(self, cluster: HadoopCluster, content: Path) -> None:
        self.cluster, self.size = cluster, content.stat().st_size
        self.fs: StripeFS = open_fs(f"{cluster.url}/bench")
        self.buffer = memoryview(bytearray(self.size))
        began = time.monotonic()
        self.fs.put(content, "striped")
        self.write_striped = time.monotonic() - began
        began = time.monotonic()
        with hdfs.connect(cluster.url).create("/bench/plain") as out, open(content, "rb") as src:
            while piece := src.read(4 << 20):
                out.write(piece)
        self.write_plain = time.monotonic() - began

    def digest(self, data: memoryview | bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def run(self, variant: str) -> tuple[float, str]:
        """Seconds and digest of one read."""
        if variant == "hadoop-client":
            return self._stock()
        began = time.monotonic()
        if variant == "hdfs-native":
            client = hdfs.connect(self.cluster.url)
            data = client.call(lambda native: native.read("/bench/plain").read(), "read", deadline=600)
            return time.monotonic() - began, self.digest(data)
        with self.fs.open("striped" if variant == "striped" else "plain") as file:
            file.readinto(0, self.buffer)
        return time.monotonic() - began, self.digest(self.buffer)

    def _stock(self) -> tuple[float, str]:
        target = Path("/dev/shm") / f"bootseer-bench-{os.getpid()}"
        try:
            began = time.monotonic()
            self.cluster.fs_shell(["-ls", "/bench/plain"])
            start = time.monotonic() - began
            began = time.monotonic()
            self.cluster.fs_shell(["-get", "/bench/plain", str(target)])
            seconds = time.monotonic() - began - start
            return max(seconds, 0.001), self.digest(target.read_bytes())
        finally:
            target.unlink(missing_ok=True)


def measure(where: str, reader: Reader, expected: str, repeats: int, out: report.Report) -> dict[str, float]:
    """Median MiB/s of each variant; every run goes into ``out``."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for n in range(1, repeats + 1):
        for variant in VARIANTS:
            took, digest = reader.run(variant)
            if digest != expected:
                raise SystemExit(f"{variant} read other bytes than were written")
            seconds[variant].append(took)
            details = {"links": where, "mib_per_s": round(reader.size / took / 2**20, 1)}
            run = report.Run(variant=f"{where}:{variant}", n=n, seconds=round(took, 4), details=details)
            out.runs.append(run)
            print(f"{where} {variant}: {details['mib_per_s']} MiB/s", flush=True)
    for name, took in (("write-striped", reader.write_striped), ("write-hdfs-native", reader.write_plain)):
        out.runs.append(report.Run(variant=f"{where}:{name}", n=1, seconds=round(took, 4), details={"links": where}))
    return {variant: reader.size / statistics.median(took) / 2**20 for variant, took in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="striped reads from HDFS against the ordinary ways")
    parser.add_argument("--quick", action="store_true", help="128 MiB instead of 512")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    size = (128 if options.quick else 512) << 20
    out = report.new("stripefs")
    work = Path(tempfile.mkdtemp(prefix="bench-stripefs-", dir=options.work))
    try:
        content = work / "content"
        with open(content, "wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        expected = hashlib.sha256(content.read_bytes()).hexdigest()
        speeds: dict[str, dict[str, float]] = {}
        settings = {"dfs.replication": "2"}
        with contextlib.ExitStack() as stack:
            network = ShapedNetwork("bsfs", nodes=4, rate_mbit=CAP * 8 / 1e6, subnet="10.78.0.0/24")
            nodes = stack.enter_context(network).nodes
            wrap: Callable[[int], list[str]] = lambda i: nodes[i].argv([])  # noqa: E731
            cluster = HadoopCluster(
                work / "hdfs",
                bind=network.host,
                datanode_hosts=[node.address for node in nodes],
                wrap=wrap,
                settings=settings,
            )
            reader = Reader(stack.enter_context(cluster), content)
            speeds["capped"] = measure("capped", reader, expected, options.repeats, out)
        with HadoopCluster(work / "hdfs", settings=settings) as cluster:
            speeds["free"] = measure("free", Reader(cluster, content), expected, options.repeats, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    capped, free, n = speeds["capped"], speeds["free"], options.repeats

    def figure(name: str, value: float, target: str) -> None:
        out.figure(name, value, unit="ratio", target=target, n=n, of="median")

    figure("read_vs_vanilla", capped["striped"] / max(capped["hdfs-native"], capped["hadoop-client"]), ">= 3.5")
    figure("read_vs_caps", capped["striped"] * 2**20 / (4 * CAP), ">= 0.85")
    figure("uncapped_vs_hdfs_native", free["striped"] / free["hdfs-native"], ">= 2")
    writes = {run.variant: run.seconds or 0.0 for run in out.runs if ":write" in run.variant}
    ratio = writes["capped:write-hdfs-native"] / writes["capped:write-striped"]
    out.figure("write_vs_vanilla", ratio, unit="ratio", target=">= 2.5", n=1, of="single")
    for made in out.figures:
        print(f"{made.name}: {made.value} (target {made.target}){'' if made.met else ', not met'}")
    if options.out:
        out.write(options.out)


if __name__ == "__main__":
    main()
