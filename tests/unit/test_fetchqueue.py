"""What is fetched next: priorities, merging of neighbours, promotion."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.fetch import queue
from bootseer.blocks.fetch.queue import Batch, FetchQueue, Frame, Priority
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef

BLOCK = 4096
FRAME = 100


def plain_map(count: int, *, zeros: tuple[int, ...] = (), elsewhere: tuple[int, ...] = ()) -> BlockMap:
    """``count`` blocks whose frames of 100 bytes lie one after another; ``zeros`` have none, those of ``elsewhere`` lie
    in a second pack."""
    offsets, lengths, hashes, packs = [], [], [], []
    ends = [0, 0]
    for block in range(count):
        zero = block in zeros
        pack = int(block in elsewhere and not zero)
        offsets.append(0 if zero else ends[pack])
        lengths.append(0 if zero else FRAME)
        packs.append(pack)
        hashes.append(hashing.digest(bytes(BLOCK)) if zero else bytes([block % 256]) * 32)
        ends[pack] += lengths[-1]
    refs = [ObjectRef("ab" * 32, ends[0]), ObjectRef("cd" * 32, ends[1])]
    return BlockMap(BLOCK, count * BLOCK, refs, hashes, offsets, lengths, packs)


@pytest.fixture(autouse=True, scope="module")
def _small_requests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "_HOT_BYTES", 400)
        patch.setattr(queue, "_FILL_BYTES", 800)
        yield


class Rig:
    def __init__(
        self,
        count: int = 32,
        *,
        zeros: tuple[int, ...] = (),
        elsewhere: tuple[int, ...] = (),
        window: int = 1,
    ) -> None:
        self.map = plain_map(count, zeros=zeros, elsewhere=elsewhere)
        self.ready = bytearray(count)
        for block in zeros:
            self.ready[block] = 1
        self.queue = FetchQueue(self.map, self.ready, window=window)

    def finish(self, batch: Batch) -> None:
        for block in batch.blocks:
            self.ready[block] = 1
        self.queue.done(batch.blocks)


def blocks(batch: Batch | None) -> list[int]:
    return [] if batch is None else batch.blocks


def take(queue: FetchQueue) -> Batch | None:
    return queue.take_demand(0.0) or queue.take_hot() or queue.take_background()


def test_demand_takes_its_aligned_window() -> None:
    rig = Rig(window=4)
    rig.queue.demand(6)
    batch = rig.queue.take_demand(0.0)
    assert blocks(batch) == [4, 5, 6, 7]
    assert batch is not None
    assert (batch.priority, batch.offset, batch.length) == (Priority.DEMAND, 400, 400)
    assert rig.queue.take_demand(0.0) is None


def test_the_window_stops_at_ready_and_flying_blocks() -> None:
    rig = Rig(window=8)
    rig.ready[2] = 1
    rig.queue.demand(7)
    assert blocks(rig.queue.take_demand(0.0)) == [3, 4, 5, 6, 7]
    rig.queue.demand(0)
    assert blocks(rig.queue.take_demand(0.0)) == [0, 1]


@pytest.mark.parametrize(
    ("begin", "took", "window"),
    [(0.01, 0.67, 16), (0.01, 0.36, 32), (0.01, 0.48, 24), (0.01, 10.0, 8), (0.0, 1.0, 8), (1.0, 1.0, 64), (1.0, 0, 8)],
)
def test_a_window_is_what_comes_in_six_times_the_least_time_until_an_answer_begins(
    monkeypatch: pytest.MonkeyPatch, begin: float, took: float, window: int
) -> None:
    monkeypatch.setattr("bootseer.blocks.fetch.reach.MOST", 64 * BLOCK)
    rig, known = Rig(count=100, window=8), Rig(count=100, window=1)
    for one in (rig, known):
        one.queue.answered(begin + 1, 50 * FRAME, took / 4, 200, 200 * FRAME)
        one.queue.answered(begin, 150 * FRAME, 3 * took / 4, 200, 200 * FRAME)
        one.queue.demand(11)
    assert blocks(rig.queue.take_demand(0.0)) == list(range(8, 8 + window)), "from the aligned 8 on"
    assert blocks(known.queue.take_demand(0.0)) == [11], "with a profile a miss brings its block alone"


def test_neither_a_full_link_nor_a_burst_makes_longer_windows() -> None:
    """Answers then wait behind others, or come at once out of what waited on their way."""
    rig = Rig(window=4)
    for _ in range(40):
        for took, begin in ((0.001, 0.01), (0.002, 0.5), (0.45, 0.4)):
            rig.queue.answered(begin, 12 * FRAME, took, 16, 16 * FRAME)
    assert rig.queue.window == 4


def test_single_flight() -> None:
    rig = Rig()
    rig.queue.demand(3)
    first = rig.queue.take_demand(0.0)
    assert first is not None
    rig.queue.demand(3)
    assert rig.queue.take_demand(0.0) is None
    rig.finish(first)
    rig.queue.demand(3)
    assert rig.queue.take_demand(0.0) is None


def test_what_did_not_come_is_asked_for_again_after_a_while_and_holds_up_no_other() -> None:
    rig = Rig()
    rig.queue.demand(3)
    batch = rig.queue.take_demand(0.0)
    assert batch is not None
    rig.queue.put_back(batch.blocks, batch.priority, [3], 10.0)
    rig.queue.demand(9)
    assert blocks(rig.queue.take_demand(9.9)) == [9]
    assert rig.queue.take_demand(9.9) is None
    assert blocks(rig.queue.take_demand(10.0)) == [3]


def test_demanded_neighbours_go_together() -> None:
    rig = Rig(window=1)
    for block in (3, 5, 4, 9):
        rig.queue.demand(block)
    assert blocks(rig.queue.take_demand(0.0)) == [3, 4, 5]
    assert blocks(rig.queue.take_demand(0.0)) == [9]


def test_hot_keeps_first_touch_order_and_merges_neighbours() -> None:
    rig = Rig()
    rig.queue.hot([20, 3, 4, 21, 9])
    assert [blocks(rig.queue.take_hot()) for _ in range(3)] == [[20, 21], [3, 4], [9]]
    assert rig.queue.take_hot() is None
    assert rig.queue.idle


def test_hot_requests_are_bounded() -> None:
    rig = Rig()
    rig.queue.hot(list(range(10)))
    assert [blocks(rig.queue.take_hot()) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    rig.queue.waited = False
    rig.queue.hot(list(range(10, 20)))
    assert [blocks(rig.queue.take_hot()) for _ in range(2)] == [[*range(10, 18)], [18, 19]]


def test_a_reader_promotes_a_queued_hot_block() -> None:
    rig = Rig()
    rig.queue.hot([1, 2, 3, 10, 11, 12])
    rig.queue.demand(11)
    assert blocks(rig.queue.take_demand(0.0)) == [11]
    assert blocks(rig.queue.take_hot()) == [1, 2, 3]
    assert blocks(rig.queue.take_hot()) == [10]
    assert blocks(rig.queue.take_hot()) == [12]


def test_zero_blocks_do_not_break_a_run() -> None:
    rig = Rig(zeros=(2, 3))
    rig.queue.hot([1, 4, 5])
    batch = rig.queue.take_hot()
    assert blocks(batch) == [1, 4, 5]
    assert batch is not None
    assert (batch.offset, batch.length) == (100, 300)


def test_a_range_reaches_over_blocks_stored_elsewhere_and_leaves_them_wanted() -> None:
    rig = Rig(12, elsewhere=(2, 3, 7))
    rig.queue.background()
    batches = []
    while batch := rig.queue.take_background():
        batches.append((batch.pack, batch.blocks))
    assert batches == [(0, [0, 1, 4, 5, 6, 8, 9, 10]), (1, [2, 3, 7]), (0, [11])]


def test_hot_ignores_what_has_no_frame_or_is_ready() -> None:
    rig = Rig(zeros=(2,))
    rig.ready[5] = 1
    rig.queue.hot([2, 5])
    assert rig.queue.take_hot() is None


def test_background_walks_everything_once() -> None:
    rig = Rig(20, zeros=(3,))
    assert rig.queue.take_background() is None
    rig.queue.background()
    rig.ready[10] = 1
    found = []
    while batch := rig.queue.take_background():
        assert batch.length <= 800
        found += batch.blocks
        rig.finish(batch)
    assert found == [block for block in range(20) if block not in (3, 10)]
    assert rig.queue.idle


def test_background_leaves_what_is_damaged() -> None:
    rig = Rig(4)
    rig.queue.background()
    rig.queue.give_up(2)
    assert blocks(rig.queue.take_background()) == [0, 1]
    assert blocks(rig.queue.take_background()) == [3]
    rig.queue.demand(2)
    assert blocks(rig.queue.take_demand(0.0)) == [2]


@pytest.mark.parametrize("priority", [Priority.HOT, Priority.BACKGROUND])
def test_put_back_turns_waited_for_blocks_into_demand(priority: Priority) -> None:
    rig = Rig()
    if priority is Priority.HOT:
        rig.queue.hot([4, 5, 6])
        batch = rig.queue.take_hot()
    else:
        rig.queue.background()
        for block in range(4):
            rig.ready[block] = 1
        batch = rig.queue.take_background()
    assert batch is not None
    rig.queue.put_back(batch.blocks, batch.priority, [5])
    assert blocks(rig.queue.take_demand(0.0)) == [5]
    take = rig.queue.take_hot if priority is Priority.HOT else rig.queue.take_background
    again = take()
    assert again is not None
    assert again.blocks == [4], "what is left has a gap, and one request must not span it"


def test_a_full_cache_stops_prefetch() -> None:
    rig = Rig()
    rig.queue.hot([1])
    rig.queue.background()
    rig.queue.stop_prefetch()
    assert rig.queue.take_hot() is None
    assert rig.queue.take_background() is None


@given(st.data())
def test_every_batch_is_one_gapless_range_and_nothing_is_lost(data: st.DataObject) -> None:
    zeros = tuple(data.draw(st.sets(st.integers(0, 31), max_size=10)))
    elsewhere = tuple(data.draw(st.sets(st.integers(0, 31), max_size=16)))
    window = data.draw(st.sampled_from([1, 2, 4]))
    rig = Rig(zeros=zeros, elsewhere=elsewhere, window=window)
    rig.queue.hot(data.draw(st.permutations(range(32))))
    rig.queue.background()
    flying: list[Batch] = []
    taken: set[int] = set()
    for _ in range(400):
        what = data.draw(st.sampled_from(["demand", "take", "take", "finish", "back"]))
        if what == "demand":
            rig.queue.demand(data.draw(st.integers(0, 31)))
        elif what == "take":
            batch = take(rig.queue)
            if batch is None:
                if not flying:
                    break
                continue
            assert not taken & set(batch.blocks), "in flight twice"
            assert all(not rig.ready[block] for block in batch.blocks)
            assert batch.length == FRAME * len(batch.blocks)
            assert batch.offset == rig.map.offsets[batch.blocks[0]]
            assert batch.frames == [Frame(FRAME * at, FRAME, (block,)) for at, block in enumerate(batch.blocks)]
            assert {rig.map.pack_of[block] for block in batch.blocks} == {batch.pack}
            taken |= set(batch.blocks)
            flying.append(batch)
        elif flying:
            batch = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            taken -= set(batch.blocks)
            if what == "finish":
                rig.finish(batch)
            else:
                rig.queue.put_back(batch.blocks, batch.priority, data.draw(st.sets(st.sampled_from(batch.blocks))))
    for batch in flying:
        rig.finish(batch)
    while batch := take(rig.queue):
        rig.finish(batch)
    assert all(rig.ready), "the end of the queue is a complete file"
