"""Lazy trees: the data path when the bytes are there, and the stall of a start when they are not.

    python bench/blocks.py [--quick] [--rate BYTES_PER_SECOND] [--latency SECONDS] [--out report.json]

Needs root. Part one reads a tree of present bytes through plain EROFS and through EROFS over the block server, from a
fresh mount with the backing file in the page cache (so that the path is measured and not the disk). Part two replays a
start (scattered reads with a little computing between them, 12 % of the tree) on an empty node cache behind one link
of ``--rate``: on demand without a profile, the same with background fill, and with the hot set of an earlier start.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _reading import sequential, small
from bootseer import erofs, report
from bootseer.blocks import tree
from bootseer.blocks.serving import server
from bootseer.blocks.serving.protocol import TreeStatus
from bootseer.config import Config
from bootseer.kernel import mount as mounts
from bootseer.objects import Store, open_store
from bootseer.testing import RateLimitedStore

MIB = 1 << 20
Spans = list[tuple[str, int, int]]


def build(work: Path, size: int) -> tree.TreeRef:
    """A tree of ``size`` bytes that compresses about 2:1: one large file (a quarter), the rest of 20 to 600 KiB."""
    rand = random.Random(7)
    root = work / "tree"
    root.mkdir()

    def write(path: Path, length: int) -> None:
        with open(path, "wb") as out:
            while length > 0:
                noise = rand.randbytes(min(length, 32768))
                out.write(noise)
                out.write(noise[:512] * 64)
                length -= 65536

    write(root / "large", size // 4)
    left = size - size // 4
    index = 0
    while left > 0:
        folder = root / f"d{index // 100}"
        folder.mkdir(exist_ok=True)
        length = rand.randrange(20 << 10, 600 << 10)
        write(folder / f"f{index}", length)
        left -= length
        index += 1
    erofs.build(root, work / "meta", work / "data")
    return tree.publish(open_store(str(work / "store")), work / "meta", work / "data")


def plan(root: Path, share: float) -> Spans:
    """What the start reads: spans of some files, 4 to 256 KiB each, ``share`` of all bytes together."""
    rand = random.Random(8)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    budget = int(sum(path.stat().st_size for path in files) * share)
    spans: Spans = []
    while budget > 0:
        path = rand.choice(files)
        length = min(rand.choice([4, 16, 64, 128, 256]) << 10, path.stat().st_size)
        offset = rand.randrange(0, path.stat().st_size - length + 1)
        spans.append((str(path.relative_to(root)), offset, length))
        budget -= length
    return spans


def start(target: Path, spans: Spans) -> float:
    """Seconds to read ``spans``, with 1 ms of computing after each."""
    began = time.perf_counter()
    for name, offset, length in spans:
        with open(target / name, "rb", buffering=0) as file:
            os.pread(file.fileno(), length, offset)
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass
    return time.perf_counter() - began


def await_pack(made: tree.TreeMount) -> None:
    """The start's cache goes with its mount here, and an unmount does not wait for the hot pack made of it."""
    made.ready()
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        status = made.status()
        if status.recording not in ("recording", "publishing") and status.hot_pack not in ("", "being made"):
            return
        if status.recording == "off":
            return
        time.sleep(0.05)


class Bench:
    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work = work
        self.options = options
        self.document = report.new("blocks")
        self.ref = build(work, (96 if options.quick else 384) * MIB)
        self.spans = plan(work / "tree", 0.12)
        shutil.rmtree(work / "tree")

    def mount(self, cache: str, *, limited: bool, **settings: Any) -> tree.TreeMount:
        command = [sys.executable, __file__, "--serve", str(self.options.rate), str(self.options.latency)]
        return tree.mount(
            str(self.work / "store"),
            self.ref.digest,
            self.work / "mnt",
            cache_dir=self.work / cache,
            state_dir=self.work / "state",
            profile=tree.ProfileKey("bench"),
            config=Config(**settings),
            server=command if limited else tree.SERVER,
        )

    def note(self, variant: str, number: int, seconds: float, **more: Any) -> None:
        moved = more.pop("bytes", {})
        self.document.runs.append(report.Run(variant=variant, n=number, seconds=seconds, bytes=moved, details=more))
        extra = " ".join(f"{key}={value}" for key, value in more.items())
        print(f"{variant:28} {number}  {seconds:8.3f} s  {extra}", flush=True)

    def plain(self, measure: Callable[[Path], float]) -> float:
        mounts.mount_erofs(self.work / "meta", self.work / "data", self.work / "mnt")
        try:
            return measure(self.work / "mnt")
        finally:
            mounts.unmount(self.work / "mnt")

    def present(self, measure: Callable[[Path], float]) -> float:
        made = self.mount("full", limited=False, background_fill=False)
        try:
            return measure(made.target)
        finally:
            made.unmount()

    def lazy(self, **settings: Any) -> tuple[float, float, TreeStatus]:
        """Seconds to the end of the start, seconds of the mount alone, and the counters, on an empty cache."""
        began = time.perf_counter()
        made = self.mount("cold", limited=True, **settings)
        try:
            mounted = time.perf_counter() - began
            start(made.target, self.spans)
            took, status = time.perf_counter() - began, made.status()
            await_pack(made)
            return took, mounted, status
        finally:
            made.unmount()
            shutil.rmtree(self.work / "cold")

    def run(self) -> None:
        (self.work / "mnt").mkdir()
        tree.prefetch(str(self.work / "store"), self.ref.digest, cache_dir=self.work / "full")
        for number in range(1, 3 if self.options.quick else 6):
            for variant, path in (("plain", self.plain), ("fuse", self.present)):
                rate = path(lambda target: sequential(target / "large"))
                each = path(lambda target: small(target / "large"))
                self.note(f"present-{variant}", number, each / 1e6, mb_per_s=round(rate), us_per_4k=round(each, 1))
            self.note("start-local", number, self.plain(lambda target: start(target, self.spans)))
            self.note("start-present", number, self.present(lambda target: start(target, self.spans)))
        self._forget_profile()
        for number in range(1, 2 if self.options.quick else 4):
            for variant in ("on-demand", "on-demand-fill", "hot"):
                if variant != "hot":
                    self._forget_profile()
                seconds, mounted, status = self.lazy(background_fill=variant.endswith("fill"))
                self.note(
                    f"start-{variant}",
                    number,
                    seconds,
                    mount_s=round(mounted, 3),
                    stall_s=round(status.stall_seconds, 3),
                    slow_faults=status.slow_faults,
                    bytes={
                        "demand": status.bytes_demand,
                        "hot": status.bytes_hot,
                        "background": status.bytes_background,
                    },
                )

    def _forget_profile(self) -> None:
        shutil.rmtree(self.work / "store" / "profiles", ignore_errors=True)

    def median(self, variant: str, field: str = "") -> float:
        runs = [run for run in self.document.runs if run.variant == variant]
        return statistics.median(float(run.details[field] if field else run.seconds or 0) for run in runs)

    def add_figures(self) -> None:
        """The figures of the report, from its runs."""
        n = sum(run.variant == "start-hot" for run in self.document.runs)
        stall = self.median("start-hot", "stall_s") / self.median("start-on-demand", "stall_s")
        ready = self.median("start-hot") / self.median("start-local")
        read = self.median("present-fuse", "mb_per_s") / self.median("present-plain", "mb_per_s")
        for name, value, target in (
            ("stall_hot_vs_on_demand", stall, "<= 0.02"),
            ("readiness_hot_vs_local", ready, "<= 1.3"),
            ("sequential_read_fuse_vs_plain", read, ">= 0"),
        ):
            self.document.figure(name, value, unit="ratio", target=target, n=n, of="median")


def serve(rate: float, latency: float) -> int:
    def limited(url: str) -> Store:
        return RateLimitedStore(open_store(url), rate=rate, latency=latency)

    return server.main(store_for=limited)


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(float(sys.argv[2]), float(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller tree, fewer runs")
    parser.add_argument("--rate", type=float, default=125e6, help="bytes per second of the link")
    parser.add_argument("--latency", type=float, default=0.001, help="seconds per request")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), help="folder for about 2 GB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-blocks-", dir=options.work) as work:
        bench = Bench(Path(work), options)
        bench.run()
        document = bench.document
        bench.add_figures()
    for figure in document.figures:
        print(f"{figure.name:32} {figure.value:8.3f} {figure.unit}  target {figure.target}")
    if options.out:
        document.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
