"""Which rank reads what for the others: pure functions of `bootseer.torch.shared_plan`."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import DataError
from bootseer.ranges import runs
from bootseer.torch.shared_plan import FileId, Needs, Plan, Span, batches, encode, plan

FILES = [FileId("a", 4, 41), FileId("b", 8, 80), FileId("c", 64, 70)]
UNIT = {file: file.unit for file in FILES}


def chunks_of(file: FileId) -> int:
    return -(-file.size // file.unit)


@st.composite
def needs_of_ranks(draw: st.DrawFn) -> list[Needs]:
    """What each rank needs; some need just the same."""
    one = st.fixed_dictionaries({}, optional={file: st.sets(st.integers(0, chunks_of(file) - 1)) for file in FILES})
    kinds = draw(st.lists(one, min_size=1, max_size=4))
    picks = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=6))
    return [{file: tuple(runs(found)) for file, found in kinds[pick].items() if found} for pick in picks]


def planned(needs: list[Needs], bucket: int) -> Plan:
    return plan([encode(one) for one in needs], bucket)


def expand(needs: Needs) -> set[tuple[FileId, int]]:
    return {(file, n) for file, runs in needs.items() for first, count in runs for n in range(first, first + count)}


def listed(buckets: object) -> list[tuple[FileId, int]]:
    return [
        (span.file, n)
        for bucket in buckets  # type: ignore[attr-defined]
        for span in bucket
        for n in range(span.first, span.first + span.chunks)
    ]


def read_by(made: Plan, rank: int) -> int:
    return sum(span.size for bucket in (*made.owned[rank], made.own[rank]) for span in bucket)


@pytest.mark.parametrize(
    "absurd",
    [
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode([("a", 4, 41)]),
        *(
            msgspec.msgpack.encode([(file, runs)])
            for file, runs in [
                (("a", 0, 41), ((0, 1),)),
                (("a", -4, 41), ((0, 1),)),
                (("a", 4, -41), ((0, 1),)),
                (("a", 4, 41), ((-1, 1),)),
                (("a", 4, 41), ((0, 12),)),
                (("a", 4, 41), ((0, 0),)),
                (("a", 4, 41), ((2, 1), (1, 1))),
                (("a", 4, 41), ((0, 2), (1, 1))),
            ]
        ),
    ],
)
def test_what_a_rank_cannot_need_is_no_plan(absurd: bytes) -> None:
    with pytest.raises(DataError):
        plan([encode({}), absurd], 100)


def test_a_plan_does_not_grow_with_what_ranks_say() -> None:
    """Two that both want a file of their own invention."""
    absurd = msgspec.msgpack.encode([(("x", 1, 1 << 50), ((0, 1 << 50),))])
    with pytest.raises(DataError, match="buckets"):
        plan([encode({}), absurd, b"\xdd\x00\x00\x00\x01" + absurd[1:]], 32 << 20)


@given(needs_of_ranks(), st.integers(1, 200))
def test_each_rank_gets_each_chunk_once_and_each_chunk_is_read_once(needs: list[Needs], bucket: int) -> None:
    made = planned(needs, bucket)
    ranks = range(len(needs))
    for rank in ranks:
        sent = [[span for span in bucket if span.ranks >> rank & 1] for other in ranks for bucket in made.owned[other]]
        gets = listed([made.own[rank]]) + listed(sent)
        assert sorted(gets) == sorted(expand(needs[rank]))
    reads = [chunk for rank in ranks for chunk in listed([made.own[rank]]) + listed(made.owned[rank])]
    assert sorted(reads) == sorted(set().union(*map(expand, needs)))


@given(needs_of_ranks(), st.integers(1, 200))
def test_buckets_are_bounded_and_sent_to_several(needs: list[Needs], bucket: int) -> None:
    made = planned(needs, bucket)
    for rank in range(len(needs)):
        for spans in made.owned[rank]:
            assert all(span.ranks.bit_count() > 1 and span.ranks >> rank & 1 for span in spans)
        for spans in (*made.owned[rank], *batches(made.own[rank], bucket)):
            assert sum(span.size for span in spans) <= bucket or (len(spans) == 1 and spans[0].chunks == 1)


@given(st.integers(2, 6), st.integers(1, 200))
def test_ranks_that_need_the_same_read_as_much_as_each_other(ranks: int, bucket: int) -> None:
    whole: Needs = {file: ((0, chunks_of(file)),) for file in FILES}
    made = planned([whole] * ranks, bucket)
    reads = [read_by(made, rank) for rank in range(ranks)]
    assert max(reads) - min(reads) <= max(bucket, max(UNIT.values()))


def test_who_needs_much_alone_reads_less_for_others() -> None:
    file = FileId("a", 1, 100)
    made = planned([{file: ((0, 100),)}, {file: ((60, 40),)}], 10)
    assert [read_by(made, rank) for rank in (0, 1)] == [60, 40]


@given(needs_of_ranks())
def test_equal_needs_have_equal_encodings(needs: list[Needs]) -> None:
    for one in needs:
        assert encode(dict(reversed(one.items()))) == encode(one)


def test_many_ranges_are_planned_and_encoded_compactly() -> None:
    file = FileId("a" * 32, 1 << 20, 300_000 << 20)
    needs: list[Needs] = [{file: tuple((3 * n + rank % 2, 1) for n in range(100_000))} for rank in range(4)]
    assert len(encode(needs[0])) < 7 * 100_000
    made = planned(needs, 32 << 20)
    assert len(listed(made.owned[0])) == 50_000


@given(needs_of_ranks(), st.integers(1, 200))
def test_batches_have_each_chunk_once(needs: list[Needs], size: int) -> None:
    found = batches([Span(file, *run, 1) for file, runs in needs[0].items() for run in runs], size)
    assert sorted(listed(found)) == sorted(expand(needs[0]))
    assert all(sum(span.size for span in one) <= size or one[0].chunks == len(one) == 1 for one in found)
