"""Frames of several blocks: what is taken of them, as runs, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.chunks.frames import opened
from bootseer.chunks.zstd import compress
from support import lazy

COUNT = 12
SHORT = 100
"""Bytes of the last block."""


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> lazy.LazyBlob:
    return lazy.make(tmp_path_factory.mktemp("blob"), lazy.content((COUNT - 1) * 4096 + SHORT, zeros=0.0))


def bytes_of(blob: lazy.LazyBlob, block: int) -> bytes:
    return blob.content[block * 4096 : (block + 1) * 4096]


@given(data=st.data())
def test_exactly_the_good_wanted_blocks_are_taken(blob: lazy.LazyBlob, data: st.DataObject) -> None:
    inside = data.draw(st.permutations(range(COUNT)))[: data.draw(st.integers(1, COUNT))]
    wanted = data.draw(st.sets(st.sampled_from(inside)))
    damaged = data.draw(st.sets(st.sampled_from(inside)))
    content = [
        bytes_of(blob, block) if block not in damaged else bytes_of(blob, block)[:-1] + b"\xff" for block in inside
    ]
    damaged = {block for block, part in zip(inside, content, strict=True) if part != bytes_of(blob, block)}
    runs, bad = opened(blob.map, inside, wanted, compress(b"".join(content), 3))
    assert [block for block, _ in bad] == [block for block in inside if block in wanted & damaged]
    taken: list[int] = []
    for first, count, part in runs:
        taken += range(first, first + count)
        assert bytes(part) == b"".join(bytes_of(blob, block) for block in range(first, first + count))
    assert taken == [block for block in inside if block in wanted - damaged]
    assert len(runs) == len({(first, count) for first, count, _ in runs})


def test_neighbours_come_as_one_run(blob: lazy.LazyBlob) -> None:
    inside = [3, 4, 5, 9, 11, 6, 7]
    frame = compress(b"".join(bytes_of(blob, block) for block in inside), 3)
    runs, bad = opened(blob.map, inside, inside, frame)
    assert not bad
    assert [(first, count) for first, count, _ in runs] == [(3, 3), (9, 1), (11, 1), (6, 2)]
    runs, _ = opened(blob.map, inside, [3, 5, 6, 7], frame)
    assert [(first, count) for first, count, _ in runs] == [(3, 1), (5, 1), (6, 2)]


@pytest.mark.parametrize("how", ["empty", "cut", "noise", "another size", "flipped"])
def test_a_bad_frame_has_no_block(blob: lazy.LazyBlob, how: str) -> None:
    inside = [2, 3, 11]
    content = b"".join(bytes_of(blob, block) for block in inside)
    frame = compress(content, 3)
    frames = {
        "empty": b"",
        "cut": frame[:-20],
        "noise": b"x" * 500,
        "another size": compress(content + b"x", 3),
        "flipped": bytes([frame[0] ^ 1]) + frame[1:],
    }
    runs, bad = opened(blob.map, inside, [2, 11], frames[how])
    assert (runs, [block for block, _ in bad]) == ([], [2, 11])
