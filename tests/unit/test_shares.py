"""Who has bytes in a range of the data: compared with going through all extents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.extract.extents import Shares

COUNT, SHIFT = 8, 4
SIZE = COUNT << SHIFT
ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(lambda r: (r[0], min(r[1], SIZE - r[0])))


@given(st.lists(ranges, max_size=20), ranges)
def test_overlaps_are_all_and_once(extents: list[tuple[int, int]], wanted: tuple[int, int]) -> None:
    shares = Shares(SHIFT, [(start, number, 1000, length) for number, (start, length) in enumerate(extents)])
    begin, end = wanted[0], sum(wanted)
    cut = [(n, start, max(start, begin), min(start + size, end)) for n, (start, size) in enumerate(extents)]
    assert sorted(shares.overlaps(begin, end)) == [
        (n, 1000 + low - start, low, high) for n, start, low, high in cut if low < high
    ]
    assert shares.needed() == [
        block
        for block in range(COUNT)
        if any(start < block + 1 << SHIFT and start + size > block << SHIFT for start, size in extents)
    ]
