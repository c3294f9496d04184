"""When requests are silent, late, hung or stuck, and when a source is asked again: the policies, in virtual time."""

from __future__ import annotations

from typing import cast

import pytest

from bootseer.blocks.fetch.deadlines import BlockRequest
from bootseer.blocks.fetch.pauses import Pauses
from bootseer.blocks.fetch.queue import STREAM, Batch, Priority
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.fetch.watch import Flight, Watch
from bootseer.errors import UnavailableError

MB = 1 << 20


def flight(
    watch: Watch, *blocks: int, stream: bool = True, priority: Priority = Priority.HOT, now: float = 0
) -> Flight:
    batch = Batch(priority, list(blocks), 0, 100, STREAM if stream else 0, [])
    made = Flight(batch, cast(HotStream, object()) if stream else None, 0.0, watch.brought)
    watch.flights.add(made)
    return made


def reader(*blocks: int, began: float = 0.0) -> BlockRequest:
    return BlockRequest(set(blocks), lambda error, memory: None, began, began + 60)


@pytest.mark.parametrize(("elsewhere", "seconds"), [(0, 10), (15 * MB, 10), (16 * MB, 3)])
def test_a_range_hangs_earlier_where_others_come(elsewhere: int, seconds: float) -> None:
    watch = Watch(60)
    hung = flight(watch, 1)
    watch.brought += elsewhere
    assert watch.hung(seconds - 0.1) == []
    assert watch.hung(seconds) == [hung]
    hung.skipped = True
    assert watch.hung(seconds) == []


def test_a_range_of_which_parts_come_does_not_hang() -> None:
    watch = Watch(60)
    slow = flight(watch, 1)
    for now in range(9, 90, 9):
        watch.brought += 20 * MB  # its own
        slow.heard(now, watch.brought)
        assert watch.hung(now + 8) == []


def test_no_range_is_waited_for_longer_than_half_of_a_readers_deadline() -> None:
    watch = Watch(4)
    hung = flight(watch, 1)
    assert (watch.hung(1.9), watch.hung(2)) == ([], [hung])
    assert (watch.stuck(3.9), watch.stuck(4)) == ([], [hung])


def test_only_ranges_of_the_stream_hang() -> None:
    watch = Watch(60)
    batch = flight(watch, 1, stream=False)
    assert watch.hung(50) == []
    assert watch.stuck(60) == [batch]


def test_what_a_reader_waited_for_long_enough_is_late() -> None:
    watch, asked = Watch(60), reader(1, 2, 3, 4)
    flight(watch, 1, 9)
    flight(watch, 2, stream=False, priority=Priority.BACKGROUND)
    flight(watch, 3, stream=False, priority=Priority.DEMAND)
    assert watch.late(asked, 0.9) == set()
    assert watch.late(asked, 1.0) == {1, 2}
    flight(watch, 1, stream=False, priority=Priority.DEMAND)  # it is asked for directly now
    assert watch.late(asked, 1.0) == {2}


def test_no_reader_waits_for_a_range_that_is_silent() -> None:
    watch = Watch(60)
    silent = flight(watch, 1)
    assert watch.late(reader(1, began=2.9), 2.95) == set()
    assert watch.late(reader(1, began=3.0), 3.0) == {1}
    silent.skipped = True  # its blocks come from the packs by now
    assert watch.late(reader(1, began=3.0), 3.0) == set()


def test_pauses_double_until_an_answer() -> None:
    pauses = Pauses()
    assert [pauses.pause(now) for now in (1.0, 1.01, 1.05, 2.0)] == [0.05, 0.0, 0.1, 0.2]
    assert [pauses.pause(now) for now in range(3, 500, 31)][-1] == 30.0
    pauses.answered()
    assert pauses.pause(1000.0) == 0.05


def test_who_says_when_to_come_again_is_asked_nothing_before() -> None:
    pauses = Pauses()
    pauses.rest(UnavailableError("busy", retry_after=8), 1.0)
    assert 9 <= pauses.demand_from <= 11
    assert pauses.pause(1.0) == pytest.approx(pauses.demand_from - 1.0)
    pauses.rest(UnavailableError("busy", retry_after=10_000), 1.0)
    assert pauses.demand_from <= 1 + 1.25 * 30
    pauses.rest(UnavailableError("busy"), 1.0)
    assert pauses.demand_from > 11, "who says nothing takes nothing back"


@pytest.mark.parametrize(("waited", "more"), [(0.0, 0.05), (0.3, 0.3), (40.0, 1.0)])
def test_readers_are_served_again_after_what_they_have_waited(waited: float, more: float) -> None:
    assert Pauses.again(100.0 - waited, 100.0) == pytest.approx(100.0 + more)
