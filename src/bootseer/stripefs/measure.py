"""A short measurement of the user's own store: what a width and a unit bring there."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec

from bootseer.backends.interface import clean, join
from bootseer.errors import ConfigError, NotFoundError
from bootseer.stripefs import layout
from bootseer.stripefs.files.writer import StripeWriter
from bootseer.stripefs.store import StripeFS

SIZE = 128 << 20
SHAPES = ((1, 1 << 20), (2, 1 << 20), (4, 1 << 20), (8, 1 << 20), (4, 4 << 20))
ROUNDS = 3
_PIECE = 16 << 20
_SAMPLE = 8 << 20  # random, so that no storage can compress or share it


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One shape: bytes per second, median over the rounds, and the slowest and fastest round."""

    width: int
    unit: int
    write: float
    read: float
    write_range: tuple[float, float]
    read_range: tuple[float, float]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    size: int
    rounds: int
    rows: tuple[Row, ...]


def measure(
    fs: StripeFS,
    folder: str = "",
    *,
    size: int = SIZE,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rounds: int = ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Write and read a file of ``size`` bytes for each (width, unit) of ``shapes``, in ``rounds`` that take turns.

    The files are temporary ones below ``folder`` and are removed, also after an error. Every chunk read is checked.
    """
    folder = clean(folder)
    if size < 1 or rounds < 1 or not shapes:
        raise ConfigError("a measurement needs a size, a round and a shape")
    for width, unit in shapes:
        layout.check_shape(width, unit)
    if not fs.stat(folder).is_dir:
        raise NotFoundError(f"{folder} is a file, a measurement needs a folder")
    place = join(folder, f"{layout.TEMPORARY}bench-{uuid.uuid4().hex}")
    sample = os.urandom(min(_SAMPLE, size))
    writes: list[list[float]] = [[] for _ in shapes]
    reads: list[list[float]] = [[] for _ in shapes]
    total, done = len(shapes) * rounds * 2, 0
    try:
        for _ in range(rounds):
            for index, (width, unit) in enumerate(shapes):
                writes[index].append(size / _write(fs, f"{place}/file", sample, size, width, unit))
                reads[index].append(size / _read(fs, f"{place}/file", size))
                fs.remove(f"{place}/file", force=True)
                done += 2
                if progress:
                    progress(done * size, total * size)
    finally:
        fs.backend.remove_folder(place)
    rows = (
        Row(
            width=width,
            unit=unit,
            write=statistics.median(writes[index]),
            read=statistics.median(reads[index]),
            write_range=(min(writes[index]), max(writes[index])),
            read_range=(min(reads[index]), max(reads[index])),
        )
        for index, (width, unit) in enumerate(shapes)
    )
    return Measured(url=join(fs.url.rstrip("/"), folder), size=size, rounds=rounds, rows=tuple(rows))


def _write(fs: StripeFS, path: str, sample: bytes, size: int, width: int, unit: int) -> float:
    began = time.perf_counter()
    with StripeWriter(fs.backend, path, width=width, unit=unit, striped=True) as out:
        for offset in range(0, size, len(sample)):
            out.write(memoryview(sample)[: min(len(sample), size - offset)])
        out.finish()
    return time.perf_counter() - began


def _read(fs: StripeFS, path: str, size: int) -> float:
    buffer = memoryview(bytearray(min(_PIECE, size)))
    buffer[:] = bytes(len(buffer))  # its pages exist before the clock runs
    began = time.perf_counter()
    with fs.open(path) as file:
        for offset in range(0, size, _PIECE):
            file.readinto(offset, buffer[: min(_PIECE, size - offset)])
    return time.perf_counter() - began
