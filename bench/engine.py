"""What single parts of the image engine cost; the pages in docs/internals name this command beside their numbers.

Each part runs ``--rounds`` times, the parts by turns, so that what else the machine does hits all alike. Seconds of the
wall clock, medians; `decode` in CPU time.

    decode      one 64 KiB block of half random bytes: zstd frame -> bytes -> BLAKE3 compared, one call per block
    batch       the same with zstandard's multi_decompress_to_buffer, 16 frames in a call
    map         decode of a block map of 93,000 blocks, the map of 6 GB
    rows        the same entries as rows (version 1)
    place       34,000 files of 21 GB in 3,400 directories placed in an EROFS image; contents cost nothing here
    finish      the metadata of these
    index       which file each part of their data belongs to
    write       512 MiB in pieces of 256 KiB at 400 MB/s into a sparse file of /var/tmp, as the hot stream writes: what
                its writes of more than a millisecond took, all together
    write+sync  the same while the file is synced, from 0.7 s on
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from bootseer import erofs, report
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.frames import verified
from bootseer.chunks.zstd import compress
from bootseer.errors import BootseerError

BLOCK = 64 << 10
BLOCKS = 256
ENTRIES = 93_000
FILES, FOLDERS, BYTES = 34_000, 3_400, 21 * 10**9

Part = Callable[[], float]
"""Runs it; seconds per unit."""


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    action()
    return clock() - began


def blocks() -> tuple[BlockMap, list[bytes]]:
    rand = random.Random(3)
    datas = [b"".join(rand.randbytes(64) + bytes(rand.choices(range(8), k=64)) for _ in range(512)) for _ in range(256)]
    frames = [compress(data, 3) for data in datas]
    offsets = [sum(map(len, frames[:at])) for at in range(BLOCKS)]
    hashes = [hashing.digest(data) for data in datas]
    pack = ObjectRef("ab" * 32, sum(map(len, frames)))
    return BlockMap(BLOCK, BLOCKS * BLOCK, [pack], hashes, offsets, [len(frame) for frame in frames]), frames


def decoding() -> Iterator[tuple[str, Part]]:
    table, frames = blocks()

    def one_by_one() -> None:
        for block, frame in enumerate(frames):
            verified(table, block, frame)

    def batches() -> None:
        reader = zstandard.ZstdDecompressor()
        for first in range(0, BLOCKS, 16):
            some = reader.multi_decompress_to_buffer(frames[first : first + 16], threads=1)
            for index, data in enumerate(some):
                assert table.matches(first + index, bytes(data))

    yield "decode", lambda: timed(one_by_one, time.process_time) / BLOCKS
    yield "batch", lambda: timed(batches, time.process_time) / BLOCKS


def maps() -> Iterator[tuple[str, Part]]:
    rand = random.Random(4)
    lengths = [rand.randrange(1000, BLOCK) for _ in range(ENTRIES)]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    hashes = rand.randbytes(32 * ENTRIES)
    pack = ObjectRef("ab" * 32, offsets[-1])
    table = BlockMap(BLOCK, ENTRIES * BLOCK, [pack], hashes, offsets[:-1], lengths)
    encoded = table.encode()
    rows = b"".join(
        hashes[32 * at : 32 * at + 32] + offsets[at].to_bytes(8, "little") + lengths[at].to_bytes(4, "little")
        for at in range(ENTRIES)
    )
    yield "map", lambda: timed(lambda: BlockMap.decode(encoded))
    yield "rows", lambda: timed(lambda: BlockMap._decode_v1(BLOCK, ENTRIES * BLOCK, pack, memoryview(rows)))


class _Nowhere:
    """A sink that only counts."""

    def __init__(self) -> None:
        self.position = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.position += len(data)


def tree() -> Iterator[tuple[str, Part]]:
    piece = memoryview(b"x" * (BYTES // FILES))
    made: list[erofs.Writer] = []
    meta: list[bytes] = []

    def place() -> None:
        writer = erofs.Writer(_Nowhere())
        attrs = erofs.Attrs(0o644)
        for folder in range(FOLDERS):
            writer.add_dir(b"d%d" % folder, attrs)
            for number in range(FILES // FOLDERS):
                writer.add_file(b"d%d/f%d" % (folder, number), attrs, len(piece), [piece])
        made[:] = [writer]

    yield "place", lambda: timed(place)
    yield "finish", lambda: timed(lambda: meta.__setitem__(slice(None), [made[0].finish()]))
    yield "index", lambda: timed(lambda: erofs.Reader(meta[0], data_size=made[0].position).owner_index())


def writing(work: Path) -> Iterator[tuple[str, Part]]:
    piece = random.Random(5).randbytes(256 << 10)
    places = [(block << 20) + at for block in range(512) for at in range(0, 1 << 20, len(piece))]
    spread = random.Random(6).sample(range(7000), 512)

    def write(sync: bool) -> float:
        late = 0.0
        with open(work / "data", "wb", buffering=0) as file, concurrent.futures.ThreadPoolExecutor(1) as beside:
            os.ftruncate(file.fileno(), 7000 << 20)
            began = time.perf_counter()
            synced: concurrent.futures.Future[None] | None = None
            for number, place in enumerate(places):
                time.sleep(max(0.0, began + number * len(piece) / 400e6 - time.perf_counter()))
                if sync and synced is None and time.perf_counter() - began > 0.7:
                    synced = beside.submit(os.fdatasync, file.fileno())
                at = (spread[place >> 20] << 20) + place % (1 << 20)
                took = timed(lambda at=at: os.pwrite(file.fileno(), piece, at))
                late += took if took > 1e-3 else 0.0
        os.unlink(work / "data")
        return late

    yield "write", lambda: write(False)
    yield "write+sync", lambda: write(True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document = report.new("engine")
    with tempfile.TemporaryDirectory(prefix="bench-engine-", dir="/var/tmp") as work:
        parts = dict([*decoding(), *maps(), *tree(), *writing(Path(work))])
        for number in range(1, 2 if options.quick else options.rounds + 1):
            for name, part in parts.items():
                try:
                    document.runs.append(report.Run(variant=name, n=number, seconds=part()))
                except (BootseerError, OSError) as exc:
                    document.runs.append(report.Run(variant=name, n=number, failed=str(exc)))
    for name in parts:
        took = [run.seconds for run in document.runs if run.variant == name and run.seconds is not None]
        print(f"{name:10} {statistics.median(took) * 1e3:10.3f} ms" if took else f"{name:10}     failed")
    if options.out:
        document.write(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
