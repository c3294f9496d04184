"""What a prefetch brought in vain, and what it did not bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.trace import UNIT, Trace
from bootseer.blocks.profiles import profiles
from bootseer.blocks.profiles.explain import bytes_by_file, path_text, ranges_of, units_of
from bootseer.erofs import ExtentIndex


class FileShare(msgspec.Struct, frozen=True):
    """``bytes`` of a file, ``share`` of all bytes of the list it is in."""

    path: str
    bytes: int
    share: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefetch was good for in one run. Waste is what it brought and the run did not touch, a miss what the run
    touched and it did not bring. ``*_stored`` are bytes as they come over the network."""

    runs: int
    """Earlier starts that the prefetch goes by; 0: there was none."""
    hot: int
    hot_stored: int
    touched: int
    """By the run, in whole blocks."""
    waste: int
    waste_stored: int
    waste_share: float
    misses: int
    misses_stored: int
    misses_share: float
    """Of the blocks that the run touched."""
    wasted_files: list[FileShare]
    missed_files: list[FileShare]


def explain(run: Trace, before: Sequence[Trace], blocks: BlockMap, index: ExtentIndex) -> Explanation:
    """What a prefetch by the starts ``before`` was good for in ``run``, a mount through the same driver.

    Judged is the hot list that these traces merge to. A hot pack that the mount streamed was made of traces that were
    there when it was built: what has been recorded since is not in it.
    """
    used = profiles.select(before, run.driver)
    hot = [block for block in profiles.merge(before, blocks, run.driver) if not blocks.is_zero(block)]
    touched = [block for block in profiles.blocks_of(run, blocks) if not blocks.is_zero(block)]
    wasted, missed = sorted(set(hot) - set(touched)), sorted(set(touched) - set(hot))

    def size(some: Iterable[int]) -> int:
        return sum(map(blocks.length_of, some))

    def stored(some: Iterable[int]) -> int:
        return sum(blocks.lengths[block] for block in some)

    units = units_of([run])
    shift = blocks.shift
    missing = set(missed)
    return Explanation(
        runs=len(used),
        hot=size(hot),
        hot_stored=stored(hot),
        touched=size(touched),
        waste=size(wasted),
        waste_stored=stored(wasted),
        waste_share=size(wasted) / size(hot) if hot else 0.0,
        misses=size(missed),
        misses_stored=stored(missed),
        misses_share=size(missed) / size(touched) if touched else 0.0,
        wasted_files=_shares(((block << shift, blocks.length_of(block)) for block in wasted), index),
        # Of a missed block only what was touched: the rest of it is nobody's wish.
        missed_files=_shares(
            ranges_of((unit for unit in units if unit * UNIT >> shift in missing), blocks.size), index
        ),
    )


def _shares(ranges: Iterable[tuple[int, int]], index: ExtentIndex) -> list[FileShare]:
    found = bytes_by_file(ranges, index)
    total = sum(found.values())
    rows = [FileShare(path_text(path), count, count / total) for path, count in found.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.path))
