"""Many ranges of many files at once: near ones in one piece, those of a file in one request, the files side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bootseer.stripefs.read import ChunkFile, StripedFile

_NEAR = 64 << 10
_FILES = 8
"""Files that are read at once."""


class Wanted(NamedTuple):
    """A range as in a slice: negative counts from the end, None is an end."""

    path: str
    start: int | None
    end: int | None


class _Block(NamedTuple):
    start: int
    end: int
    members: list[tuple[int, int, int]]
    """Number, start and end of each range in it."""


def blocks(ranges: Sequence[tuple[int, int]], grain: int, gap: int) -> list[_Block]:
    """``ranges`` (start, end) merged where they overlap, share a unit of ``grain`` bytes, or are ``gap`` apart."""
    found: list[_Block] = []
    for number, (start, end) in sorted(enumerate(ranges), key=lambda item: item[1]):
        if start >= end:
            continue
        if found:
            last = found[-1]
            reach = max(last.end + gap, -(-last.end // grain) * grain - 1)
            if start <= reach:
                found[-1] = last._replace(end=max(last.end, end), members=[*last.members, (number, start, end)])
                continue
        found.append(_Block(start, end, [(number, start, end)]))
    return found


def read_ranges(file: ChunkFile, wanted: Sequence[Wanted], gap: int | None) -> list[bytes]:
    """The bytes of each range, in order, as slices have them: fewer where the file ends before.

    Raises what `ChunkFile.readinto` does.
    """
    ranges = [slice(item.start, item.end).indices(file.size)[:2] for item in wanted]
    striped = isinstance(file, StripedFile)
    found = blocks(ranges, file.unit if striped else 1, gap if gap is not None else (0 if striped else _NEAR))
    buffers = [memoryview(bytearray(block.end - block.start)) for block in found]
    file.readinto_many([(block.start, buffer) for block, buffer in zip(found, buffers, strict=True)])
    out = [b""] * len(ranges)
    for block, buffer in zip(found, buffers, strict=True):
        for number, start, end in block.members:
            out[number] = bytes(buffer[start - block.start : end - block.start])
    return out


def gather(
    open_file: Callable[[str], ChunkFile], wanted: Sequence[Wanted], *, gap: int | None = None
) -> list[bytes | BaseException]:
    """Bytes or the error of each range, in order. ``gap``: bytes between two ranges that may be read for nothing."""
    by_path: dict[str, list[int]] = {}
    for number, item in enumerate(wanted):
        by_path.setdefault(item.path, []).append(number)
    out: list[bytes | BaseException] = [b""] * len(wanted)

    def read(path: str) -> None:
        numbers = by_path[path]
        try:
            with open_file(path) as file:
                data: Sequence[bytes | BaseException] = read_ranges(file, [wanted[number] for number in numbers], gap)
        except Exception as exc:
            data = [exc] * len(numbers)
        for number, found in zip(numbers, data, strict=True):
            out[number] = found

    if len(by_path) == 1:
        read(next(iter(by_path)))
    elif by_path:
        with ThreadPoolExecutor(min(_FILES, len(by_path)), thread_name_prefix="bootseer-ranges") as pool:
            list(pool.map(read, by_path))
    return out
