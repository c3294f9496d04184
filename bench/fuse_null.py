"""Cost of the FUSE loop itself, and of the ways to answer with bytes of a local file that is in the page cache.

    python bench/fuse_null.py [--ways memory preadv mapped splice] [--rounds 7] [--out report.json]

Needs root. Each way has a server process of its own with ``--workers`` threads; the readers run here. Every round
measures each way once, in random order, so that what else the machine does hits all alike. Prints and writes medians,
and ratios to ``preadv`` of the same round (above 1: faster).

    memory   bytes at hand, no file
    preadv   the file is read into a buffer, and that is written to the device
    mapped   a piece of a mapping of the file is written to the device
    splice   the file's pages go through a pipe to the device
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

from bootseer.kernel import _fuse_wire as wire
from bootseer.kernel import fuse

MIB = 1 << 20
WAYS = ("memory", "preadv", "mapped", "splice")
MEASURES = ("sequential", "sequential_2_readers", "pieces_16k_4_readers", "random_4k", "random_4k_4_readers")


def serve(mountpoint: str, file: str, way: str, workers: int, ready: Event, stop: Event) -> None:
    fd = os.open(file, os.O_RDONLY)
    size = os.fstat(fd).st_size
    view = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    block = memoryview(bytes(MIB))
    local = threading.local()

    def spliced(offset: int, length: int, ctx: fuse.Context) -> fuse.ReadResult:
        try:
            ends = local.ends
        except AttributeError:
            ends = local.ends = os.pipe()
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, MIB)
        length = min(length, size - offset)
        os.write(ends[1], wire.OUT_HEADER.pack(16 + length, 0, ctx.unique))
        left = length
        while left:
            left -= os.splice(fd, ends[1], left, offset_src=offset + length - left, flags=1)
        server._core._inflight.pop(ctx.unique)  # answered below, behind the server's back
        os.splice(ends[0], server._fd, 16 + length, flags=1)
        return fuse.LATER

    reads: dict[str, Callable[[int, int, fuse.Context], fuse.ReadResult]] = {
        "memory": lambda offset, length, ctx: block[:length],
        "preadv": lambda offset, length, ctx: (fd, offset),
        "mapped": lambda offset, length, ctx: view[offset : offset + length],
        "splice": spliced,
    }
    server = fuse.Server(fuse.SingleFile("data", size, reads[way]), Path(mountpoint), workers=workers)
    with server:
        ready.set()
        stop.wait(3600)


def _drop(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _timed(path: str, readers: int, read: Callable[[int, int], None]) -> float:
    """Seconds that ``readers`` threads of ``read(fd, number)`` take together, nothing of the file being cached."""
    _drop(path)

    def work(number: int) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            read(fd, number)
        finally:
            os.close(fd)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(readers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def sequential(path: str, size: int, readers: int, piece: int) -> float:
    """Bytes per second, each reader having a part of the file; buffered, so the kernel asks for 128 KiB at a time."""
    part = size // readers // piece * piece

    def read(fd: int, number: int) -> None:
        with mmap.mmap(-1, piece) as buffer:
            for offset in range(part * number, part * (number + 1), piece):
                if os.preadv(fd, [buffer], offset) != piece:
                    raise SystemExit("short read")

    return part * readers / _timed(path, readers, read)


def scattered(path: str, size: int, readers: int, count: int = 4000) -> float:
    """Reads of 4 KiB per second, over all readers."""

    def read(fd: int, number: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        chance = random.Random(number)
        for _ in range(count // readers):
            os.pread(fd, 4096, chance.randrange(size // 4096) * 4096)

    return count / _timed(path, readers, read)


def measure(path: str, size: int) -> tuple[float, ...]:
    return (
        sequential(path, size, 1, MIB),
        sequential(path, size, 2, MIB),
        sequential(path, size, 4, 16 << 10),
        scattered(path, size, 1),
        scattered(path, size, 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256 * MIB)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ways = list(dict.fromkeys(["preadv", *args.ways]))
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    servers = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        file = f"{folder}/file"
        with open(file, "wb") as out:
            for _ in range(args.size // MIB):
                out.write(os.urandom(MIB))
        try:
            for way in ways:
                os.mkdir(f"{folder}/{way}")
                ready = context.Event()
                server = context.Process(
                    target=serve, args=(f"{folder}/{way}", file, way, args.workers, ready, stop), daemon=True
                )
                server.start()
                servers.append(server)
                if not ready.wait(20):
                    raise SystemExit(f"the server of {way} did not start")
            for _ in range(args.rounds):
                for way in random.sample(ways, len(ways)):
                    found[way].append(measure(f"{folder}/{way}/data", args.size))
        finally:
            stop.set()
            for server in servers:
                server.join(20)
    rows = []
    for way in ways:
        row: dict[str, object] = {"way": way}
        for index, name in enumerate(MEASURES):
            value = statistics.median(each[index] for each in found[way])
            pairs = zip(found[way], found["preadv"], strict=True)
            ratio = statistics.median(ours[index] / theirs[index] for ours, theirs in pairs)
            row[name] = {
                "value": round(value / 1e9, 2) if index < 3 else round(1e6 / value, 1),
                "ratio": round(ratio, 2),
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    units = {name: "GB/s" if index < 3 else "us per read" for index, name in enumerate(MEASURES)}
    if args.out:
        report = {"name": "fuse_null", "size": args.size, "workers": args.workers, "units": units, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
