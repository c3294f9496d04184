"""Which file each part of a tree's data is of, in units of 4 KiB: what profiles ask of a tree's metadata."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bootseer.blocks.formats.pagelist import is_plain
from bootseer.blocks.formats.trace import UNIT, Touch


class Part(NamedTuple):
    """``units`` units from ``unit`` of the data on are those from ``offset`` on of the file ``path``."""

    unit: int
    units: int
    path: bytes
    offset: int


def layout(meta: bytes | mmap.mmap) -> list[Part]:
    """The parts of all files of the EROFS image ``meta``, ascending. A file of several names has its first one."""
    from bootseer.erofs import Reader  # here, as a block server that starts would wait for 70 modules more

    reader = Reader(meta)
    found: list[Part] = []
    seen: set[int] = set()
    for path, inode in reader.walk():
        if inode.is_file and inode.nid not in seen and is_plain(path):
            seen.add(inode.nid)
            for offset, data, size in reader.extents(inode):
                if offset % UNIT == 0 and data % UNIT == 0:
                    found.append(Part(data // UNIT, -(-size // UNIT), path, offset // UNIT))
    return sorted(found)


def layout_of(path: Path) -> list[Part]:
    """The same of the file ``path``."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        return layout(mapped)


def files_of(touches: Iterable[Touch], parts: Sequence[Part], starts: Sequence[int]) -> set[bytes]:
    """The files that ``touches`` are in; ``starts``: the first unit of each part."""
    found: set[bytes] = set()
    for touch in touches:
        for at in range(max(0, bisect_right(starts, touch.unit) - 1), len(parts)):
            part = parts[at]
            if part.unit >= touch.unit + touch.count:
                break
            if part.unit + part.units > touch.unit:
                found.add(part.path)
    return found
