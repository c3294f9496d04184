"""What the frames of a hot pack save and cost: blocks per frame and zstd level, on the bytes of a real library.

    python bench/hotpack.py [FILE] [--quick] [--sample MIB] [--rounds N] [--out report.json]

Spread over FILE (default: torch's library of CPU code), ``--sample`` MiB in pieces of 1 MiB are compressed as blocks of
64 KiB, some to a frame, and decompressed frame by frame, as a fetcher does. Prints a table in Markdown: MB of frames
for 100 MB of blocks, CPU seconds of one core to make and to read them, medians of the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path

from bootseer import report
from bootseer.chunks.zstd import compress, decompress
from bootseer.errors import NotFoundError

BLOCK = 64 << 10
MIB = 1 << 20
CHOICES = [(1, 3), (1, 12), (4, 12), (16, 3), (16, 12), (16, 15), (16, 19), (64, 12)]
"""Blocks per frame, level. The first is version 1, (16, 12) is version 2."""


def default() -> Path:
    """A library that every start of torch reads. Raises `NotFoundError`."""
    found = importlib.util.find_spec("torch")
    library = Path(found.origin).parent / "lib/libtorch_cpu.so" if found and found.origin else None
    if library is None or not library.exists():
        raise NotFoundError("torch is not installed here", hint="name a file")
    return library


def sample(path: Path, size: int) -> list[bytes]:
    """``size`` bytes of the file in pieces of 4 MiB, spread evenly: a frame may have as many neighbours."""
    whole = path.stat().st_size // (4 * MIB)
    count = min(max(size // (4 * MIB), 1), whole)
    pieces = []
    with open(path, "rb") as file:
        for index in range(count):
            file.seek(index * whole // count * 4 * MIB)
            pieces.append(file.read(4 * MIB))
    return pieces


def measure(pieces: list[bytes], blocks: int, level: int) -> tuple[int, float, float]:
    """Bytes of all frames, CPU seconds to compress and to decompress them."""
    step = blocks * BLOCK
    parts = [piece[at : at + step] for piece in pieces for at in range(0, len(piece), step)]
    began = time.process_time()
    frames = [compress(part, level) for part in parts]
    made = time.process_time()
    for frame, part in zip(frames, parts, strict=True):
        decompress(frame, len(part))
    return sum(map(len, frames)), made - began, time.process_time() - made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="16 MiB, one round")
    parser.add_argument("--sample", type=int, default=64, help="MiB (default 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.sample, options.rounds = 16, 1
    try:
        pieces = sample(options.file or default(), options.sample * MIB)
    except (OSError, NotFoundError) as exc:
        parser.error(str(exc))
    if not pieces:
        parser.error(f"{options.file} has less than 4 MiB")
    total = sum(map(len, pieces))
    document = report.new("hotpack")
    seen: dict[tuple[int, int], list[tuple[int, float, float]]] = {choice: [] for choice in CHOICES}
    for number in range(1, options.rounds + 1):
        for choice in CHOICES:
            size, making, reading = measure(pieces, *choice)
            seen[choice].append((size, making, reading))
            document.runs.append(
                report.Run(
                    variant=f"{choice[0]}-blocks-level-{choice[1]}",
                    n=number,
                    seconds=round(making + reading, 3),
                    details={"bytes": total, "frames": size, "compress_cpu": making, "decompress_cpu": reading},
                )
            )
    print("| blocks per frame | level | MB | compress | decompress |\n|---|---|---|---|---|")
    for (blocks, level), found in seen.items():
        size, making, reading = (statistics.median(column) * 1e8 / total for column in zip(*found, strict=True))
        print(f"| {blocks} | {level} | {size / 1e6:.1f} | {making:.2f} | {reading:.3f} |")
    old, new = (seen[choice][0][0] for choice in ((1, 3), (16, 12)))
    document.figure("version_2_vs_1", new / old, unit="ratio", target="<= 1", n=1, of="single")
    print(f"version 2 / version 1: {new / old:.3f}")
    if options.out:
        document.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
