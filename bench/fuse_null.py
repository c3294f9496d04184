"""Cost of the FUSE loop itself: a file whose bytes are always at hand, read in large and in small pieces.

    python bench/fuse_null.py [--size BYTES] [--out report.json]

Needs root. The server runs in a process of its own, the readers in this one. Prints, and writes as JSON, sequential
GB/s (direct and buffered, 1 MiB reads) and microseconds per random 4 KiB read (direct, one and four readers).
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import tempfile
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path

from bootseer.kernel import fuse

MIB = 1 << 20


def serve(mountpoint: str, size: int, workers: int, direct: bool, ready: Event, stop: Event) -> None:
    block = memoryview(bytes(range(256)) * (MIB // 256))
    operations = fuse.SingleFile("data", size, lambda offset, length, ctx: block[:length])
    options = fuse.Options(direct_io=direct, keep_cache=False, max_readahead=MIB)
    with fuse.Server(operations, Path(mountpoint), workers=workers, options=options):
        ready.set()
        stop.wait(120)


def sequential(path: str, size: int, piece: int = MIB) -> float:
    """Bytes per second of one reader; the buffer is page-aligned, as large readers' are."""
    buffer = mmap.mmap(-1, piece)
    fd = os.open(path, os.O_RDONLY)
    started = time.perf_counter()
    for offset in range(0, size, piece):
        if os.preadv(fd, [buffer], offset) != piece:
            raise SystemExit("short read")
    seconds = time.perf_counter() - started
    os.close(fd)
    buffer.close()
    return size / seconds


def scattered(path: str, size: int, readers: int, count: int = 8000) -> float:
    """Seconds per read of 4 KiB, wall time over all readers."""

    def read(seed: int) -> None:
        chance, fd = random.Random(seed), os.open(path, os.O_RDONLY)
        for _ in range(count // readers):
            os.pread(fd, 4096, chance.randrange(size // 4096) * 4096)
        os.close(fd)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(readers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 30)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    for workers in args.workers:
        row: dict[str, float] = {"workers": workers}
        for direct in (True, False):
            with tempfile.TemporaryDirectory(dir="/var/tmp") as mountpoint:
                ready, stop = context.Event(), context.Event()
                server = context.Process(target=serve, args=(mountpoint, args.size, workers, direct, ready, stop))
                server.start()
                try:
                    if not ready.wait(20):
                        raise SystemExit("server did not start")
                    path = f"{mountpoint}/data"
                    kind = "direct" if direct else "buffered"
                    row[f"sequential_{kind}_gb_per_s"] = round(
                        max(sequential(path, args.size) for _ in range(3)) / 1e9, 2
                    )
                    if direct:
                        for readers in (1, 4):
                            row[f"random_4k_{readers}_readers_us"] = round(scattered(path, args.size, readers) * 1e6, 1)
                finally:
                    stop.set()
                    server.join(20)
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.out:
        args.out.write_text(json.dumps({"name": "fuse_null", "size": args.size, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
