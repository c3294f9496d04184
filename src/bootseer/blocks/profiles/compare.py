"""How two profiles differ: of two jobs, two runs, or two images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.blocks.profiles.explain import bytes_by_file, path_text, ranges_of, units_of
from bootseer.erofs import ExtentIndex


class FileDiff(msgspec.Struct, frozen=True):
    """Bytes of a file that only one side touched, or both."""

    path: str
    only_a: int
    only_b: int
    both: int


class FileMove(msgspec.Struct, frozen=True):
    """A file's place among the files both sides touch, by first touch."""

    path: str
    place_a: int
    place_b: int


class Difference(msgspec.Struct, frozen=True):
    """Two profiles. ``order`` is the rank correlation of first touches over common files: 1 the same order, -1 the
    reverse, None with fewer than two. Of two trees, files are compared by path, and ``shared_blocks`` counts bytes of
    touched blocks that both have, wherever they are."""

    same_tree: bool
    only_a: int
    only_b: int
    both: int
    shared_blocks: int
    order: float | None
    files: list[FileDiff]
    moves: list[FileMove]


class Side(msgspec.Struct, frozen=True):
    """One side of a comparison: starts of a tree."""

    traces: list[Trace]
    index: ExtentIndex
    blocks: BlockMap

    @property
    def tree(self) -> str:
        return self.traces[0].tree


def compare(a: Side, b: Side) -> Difference:
    """How two profiles differ; both have at least one trace, and what any of its traces touched counts."""
    same = a.tree == b.tree
    units_a, units_b = units_of(a.traces), units_of(b.traces)
    if same:
        rows: dict[bytes, list[int]] = {}
        totals = []
        groups = (units_a.keys() - units_b.keys(), units_b.keys() - units_a.keys(), units_a.keys() & units_b.keys())
        for place, group in enumerate(groups):
            ranges = list(ranges_of(group, a.blocks.size))
            totals.append(sum(length for _, length in ranges))
            for path, count in bytes_by_file(ranges, a.index).items():
                rows.setdefault(path, [0, 0, 0])[place] = count
        files = [FileDiff(path_text(path), *counts) for path, counts in rows.items()]
    else:
        of_a, of_b = _by_file(units_a, a), _by_file(units_b, b)
        files = []
        for path in of_a.keys() | of_b.keys():
            x, y = of_a.get(path, 0), of_b.get(path, 0)
            files.append(FileDiff(path_text(path), max(0, x - y), max(0, y - x), min(x, y)))
        totals = [sum(row.only_a for row in files), sum(row.only_b for row in files), sum(row.both for row in files)]
    order, moves = _order(_first_touches(a), _first_touches(b))
    files.sort(key=lambda row: (-(row.only_a + row.only_b), row.path))
    return Difference(same, totals[0], totals[1], totals[2], _shared(units_a, a, units_b, b), order, files, moves)


def _by_file(units: Iterable[int], side: Side) -> dict[bytes, int]:
    return bytes_by_file(ranges_of(units, side.blocks.size), side.index)


def _first_touches(side: Side) -> dict[bytes, int]:
    """File -> milliseconds of its earliest touch in any trace."""
    found: dict[bytes, int] = {}
    for trace in side.traces:
        for touch in trace.touches:
            for path, _ in side.index.files(touch.unit * UNIT, touch.count * UNIT):
                if found.get(path, touch.ms) >= touch.ms:
                    found[path] = touch.ms
    return found


def _order(a: Mapping[bytes, int], b: Mapping[bytes, int]) -> tuple[float | None, list[FileMove]]:
    """Rank correlation (Spearman's) of the first touches of common files, and who moved, the farthest first."""
    common = sorted(a.keys() & b.keys())
    place_a, place_b = (
        {path: place for place, path in enumerate(sorted(common, key=lambda path: (times[path], path)))}
        for times in (a, b)
    )
    moves = [
        FileMove(path_text(path), place_a[path], place_b[path]) for path in common if place_a[path] != place_b[path]
    ]
    moves.sort(key=lambda move: (-abs(move.place_a - move.place_b), move.path))
    count = len(common)
    if count < 2:
        return None, moves
    squares = sum((place_a[path] - place_b[path]) ** 2 for path in common)
    return 1 - 6 * squares / (count * (count**2 - 1)), moves


def _shared(units_a: Iterable[int], a: Side, units_b: Iterable[int], b: Side) -> int:
    """Bytes of touched blocks that both sides have by content."""
    found = []
    for units, side in ((units_a, a), (units_b, b)):
        touched = {unit * UNIT >> side.blocks.shift for unit in units}
        found.append({side.blocks.hash_of(block): side.blocks.length_of(block) for block in touched})
    return sum(length for digest, length in found[0].items() if digest in found[1])
