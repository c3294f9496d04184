"""How two profiles differ: of two jobs, two runs, or two images."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

import msgspec

from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.blocks.profiles.explain import bytes_by_file, path_text, ranges_of
from bootseer.blocks.profiles.merge import units_of
from bootseer.chunks.blockmap import BlockMap
from bootseer.erofs import ExtentIndex


class FileDiff(msgspec.Struct, frozen=True):
    """Bytes of a file that only one side touched, or both."""

    path: str
    only_a: int
    only_b: int
    both: int


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


class Side(msgspec.Struct, frozen=True):
    """One side of a comparison: starts of a tree."""

    traces: list[Trace]
    index: ExtentIndex
    blocks: BlockMap

    @property
    def tree(self) -> str:
        return self.traces[0].tree

    def units(self) -> set[int]:
        """What any of the starts touched, in units of 4 KiB."""
        return {unit for trace in self.traces for unit in units_of(trace)}

    def hashes(self, units: Iterable[int]) -> dict[bytes, int]:
        """The blocks of ``units``: hash -> bytes."""
        touched = {unit * UNIT >> self.blocks.shift for unit in units}
        return {self.blocks.hash_of(block): self.blocks.length_of(block) for block in touched}

    def first_touches(self) -> dict[bytes, int]:
        """File -> milliseconds of its earliest touch in any trace."""
        found: dict[bytes, int] = {}
        for trace in self.traces:
            for touch in trace.touches:
                for path, _ in self.index.files(touch.unit * UNIT, touch.count * UNIT):
                    found[path] = min(touch.ms, found.get(path, touch.ms))
        return found


def compare(a: Side, b: Side) -> Difference:
    """How two profiles differ; both have at least one trace, and what any of its traces touched counts."""
    same = a.tree == b.tree
    units_a, units_b = a.units(), b.units()
    if same:
        groups = [
            list(ranges_of(units, a.blocks.size)) for units in (units_a - units_b, units_b - units_a, units_a & units_b)
        ]
        only_a, only_b, both = (bytes_by_file(ranges, a.index) for ranges in groups)
        totals = [sum(length for _, length in ranges) for ranges in groups]
    else:
        of_a = bytes_by_file(ranges_of(units_a, a.blocks.size), a.index)
        of_b = bytes_by_file(ranges_of(units_b, b.blocks.size), b.index)
        only_a, only_b, both = of_a - of_b, of_b - of_a, of_a & of_b
        totals = [group.total() for group in (only_a, only_b, both)]
    files = [
        FileDiff(path_text(path), only_a[path], only_b[path], both[path])
        for path in only_a.keys() | only_b.keys() | both.keys()
    ]
    files.sort(key=lambda row: (-(row.only_a + row.only_b), row.path))
    hashes = b.hashes(units_b)
    shared = sum(length for digest, length in a.hashes(units_a).items() if digest in hashes)
    order = _order(a.first_touches(), b.first_touches())
    return Difference(same, totals[0], totals[1], totals[2], shared, order, files)


def _order(a: Mapping[bytes, int], b: Mapping[bytes, int]) -> float | None:
    """Rank correlation (Spearman's) of the first touches of common files."""
    common = a.keys() & b.keys()
    if len(common) < 2:
        return None
    ranks = [sorted(common, key=lambda path: (times[path], path)) for times in (a, b)]
    place = {path: at for at, path in enumerate(ranks[1])}
    return statistics.correlation(range(len(common)), [place[path] for path in ranks[0]])
