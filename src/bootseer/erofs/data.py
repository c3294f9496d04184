"""Placing file contents in the data device: one sequential stream of bytes.

A file of at least ``align`` bytes starts at a multiple of it, so that equal files give equal blocks; smaller ones at a
multiple of 4 KiB. Chunks of ``align`` bytes that are zero throughout are not written; other zeros are.

A map of extents costs its author a few bytes each, but an image 8 bytes of metadata for every unit of the file and
real zeros around every extent: 300 members of a 5 kB layer once made 157 MB of metadata. So where the extents are
known, their number says how large units are, and both costs are bounded by the content of all files together."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from bootseer.erofs import format as fmt
from bootseer.errors import DataError

Buffer = bytes | bytearray | memoryview
_ZEROS = memoryview(bytes(1 << 20))
_MAX_CHUNKS = 1 << 16  # of a file with holes: 512 KiB of indexes; larger files have larger chunks
_MAX_DATA = fmt.HOLE * fmt.BLOCK
_WEIGHT = 2048
"""Units of files whose extents are known: at sqrt(2048 * size / extents) bytes, indexes (8 bytes a unit) and the block
map of the zeros (some 50 bytes per 64 KiB) cost alike, with the time that zeros take counted in."""
_FREE_CHUNKS, _CONTENT_PER_CHUNK = 1 << 20, 4096
_FREE_ZEROS, _ZEROS_PER_CONTENT = 2 << 30, 32
"""Extents of 4 KiB, the least that file systems have, cost up to 31 times their size in units of 64 KiB."""


class DataSink(Protocol):
    """Takes the data device's bytes in order."""

    def write(self, data: Buffer, /) -> object:
        """Append ``data``. It is not changed afterwards, so the sink may keep it."""


class Hole(NamedTuple):
    """Among the chunks of a file's content: so many zero bytes, at no cost for those in whole chunks."""

    length: int


class Placed(NamedTuple):
    """Where a file's content is; the fields are those of `Node`."""

    start: int
    chunks: array[int] | None
    chunk_bits: int


class Stream:
    """Writes files to a sink one after the other."""

    def __init__(self, sink: DataSink, align: int) -> None:
        self._sink = sink
        self._align = align
        self.position = 0
        self._content = 0
        self._hole_zeros = 0
        self._chunks = 0

    def write(self, data: Buffer) -> None:
        self._sink.write(data)
        self.position += len(data)

    def pad(self, multiple: int) -> None:
        """Write zeros up to a multiple of ``multiple``."""
        self.zeros(-self.position % multiple)

    def zeros(self, count: int) -> None:
        for at in range(0, count, len(_ZEROS)):
            self.write(_ZEROS[: count - at])

    def fill(self, count: int) -> None:
        """Write zeros of a hole. `DataError` when there have been too many for the content received."""
        self._hole_zeros += count
        if self._hole_zeros > _FREE_ZEROS + _ZEROS_PER_CONTENT * self._content:
            raise DataError(
                f"sparse files spread too thin: {self._hole_zeros} zeros between {self._content} bytes of content"
            )
        self.zeros(count)

    def file(self, size: int, chunks: Iterable[Buffer | Hole], extents: int | None = None) -> Placed:
        """Place one file. `DataError` when ``chunks`` are not ``size`` bytes in all (what was written stays, unused),
        or when the device cannot become that large. ``extents``: how many pieces lie between holes, for files whose
        author is not trusted; `DataError` then also when all files are mostly holes (see above)."""
        if size > _MAX_DATA - self.position:
            raise DataError(f"a file of {size} bytes does not fit: the data device ends at {_MAX_DATA} bytes")
        placing = _Placing(self, size, self._align, extents)
        for piece in chunks:
            if isinstance(piece, Hole):
                placing.hole(piece.length)
            else:
                view = memoryview(piece)
                self._content += view.nbytes
                placing.feed(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        placed = placing.done()
        if extents is not None and placed.chunks is not None:
            self._chunks += len(placed.chunks)
            if self._chunks > _FREE_CHUNKS + self._content // _CONTENT_PER_CHUNK:
                raise DataError(
                    f"sparse files spread too thin: {self._chunks} chunk indexes for {self._content} bytes of content"
                )
        return placed


class _Placing:
    """One file on its way: cut at multiples of ``unit``; a unit is held back while it is all zeros."""

    def __init__(self, stream: Stream, size: int, align: int, extents: int | None) -> None:
        self._stream = stream
        self._fill = stream.zeros if extents is None else stream.fill
        self._size = size
        self._unit = align
        while (
            self._unit * _MAX_CHUNKS < size
            if extents is None
            else self._unit * self._unit * max(1, extents) < _WEIGHT * size
        ):
            self._unit *= 2
        self._begin = align if size >= align else fmt.BLOCK
        self._start = -1
        self._at = 0
        self._zeros = 0  # held back of this unit
        self._filled = 0  # of these, from holes
        self._open = False  # this unit is being written
        self._runs: list[tuple[int, int]] = []  # (first unit, its data byte or -1), where they change

    def _start_unit(self) -> None:
        """This unit has content."""
        if not self._runs or self._runs[-1][1] < 0:
            if self._start < 0:
                self._stream.pad(self._begin)
                self._start = self._stream.position
            self._runs.append((self._at // self._unit, self._stream.position))
        self._fill(self._filled)
        self._stream.zeros(self._zeros - self._filled)
        self._zeros = self._filled = 0

    def _end_unit(self) -> None:
        if not self._open and (not self._runs or self._runs[-1][1] >= 0):
            self._runs.append(((self._at - 1) // self._unit, -1))
        self._open = False
        self._zeros = self._filled = 0

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > self._size:
            raise DataError(f"more content than the {self._size} bytes announced")

    def hole(self, length: int) -> None:
        while length > 0:
            take = min(length, self._unit - self._at % self._unit)
            if not self._at % self._unit and length >= self._unit:
                take = length - length % self._unit  # whole units at once
                self._advance(take)
                if not self._runs or self._runs[-1][1] >= 0:
                    self._runs.append(((self._at - take) // self._unit, -1))
            else:
                self._advance(take)
                if self._open:
                    self._fill(take)
                else:
                    self._zeros += take
                    self._filled += take
                if not self._at % self._unit:
                    self._end_unit()
            length -= take

    def feed(self, view: memoryview) -> None:
        length, at, written = len(view), 0, 0
        while at < length:
            take = min(length - at, self._unit - self._at % self._unit)
            if not self._open:
                if _is_zero(view, at, at + take):
                    if written < at:
                        self._stream.write(view[written:at])
                    written = at + take
                    self._zeros += take
                else:
                    if self._zeros or not self._runs or self._runs[-1][1] < 0:
                        if written < at:
                            self._stream.write(view[written:at])
                        written = at
                        self._start_unit()
                    self._open = True
            at += take
            self._advance(take)
            if not self._at % self._unit:
                self._end_unit()
        if written < length:
            self._stream.write(view[written:])

    def done(self) -> Placed:
        if self._at != self._size:
            raise DataError(f"content ends after {self._at} of {self._size} bytes")
        if self._at % self._unit:
            self._end_unit()
        runs = self._runs
        if len(runs) <= 1:
            return Placed(self._start, None, 0)
        count = -(-self._size // self._unit)
        chunks = array("I")
        blocks = self._unit // fmt.BLOCK
        for (first, start), (after, _) in zip(runs, [*runs[1:], (count, -1)], strict=True):
            if start < 0:
                chunks.extend(array("I", [fmt.HOLE]) * (after - first))
            else:
                chunks.extend(range(start // fmt.BLOCK, start // fmt.BLOCK + blocks * (after - first), blocks))
        bits = blocks.bit_length() - 1
        while (coarser := _coarsen(chunks, blocks)) is not None:
            chunks, blocks, bits = coarser, blocks * 2, bits + 1
        return Placed(self._start, chunks, bits)


def _coarsen(chunks: array[int], blocks: int) -> array[int] | None:
    """The same map with chunks twice as large, if there is one."""
    for first, second in zip(chunks[::2], chunks[1::2], strict=False):
        if second != (fmt.HOLE if first == fmt.HOLE else first + blocks):
            return None
    return chunks[::2]


def _is_zero(view: memoryview, start: int, end: int) -> bool:
    # first and last byte decide for nearly all content, without a copy
    if view[start] or view[end - 1] or view[(start + end) // 2]:
        return False
    return view[start:end].tobytes() == bytes(end - start)
