"""The small parts of the fetcher: who waits, how many requests at once, how long one takes."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.fetch.deadlines import DEADLINE, Request, Waiting
from bootseer.blocks.fetch.flight import Concurrency, Pace
from bootseer.errors import DataError


def test_trouble_halves_and_quiet_adds_one() -> None:
    room = Concurrency(8)
    assert room.limit == 8
    room.bad(10.0)
    room.bad(10.05)
    assert room.limit == 4, "requests that fail together are one trouble"
    room.bad(11.0)
    room.bad(12.0)
    room.bad(13.0)
    assert room.limit == 1
    for _ in range(1 + 2 + 3):
        room.good()
    assert room.limit == 4
    for _ in range(1000):
        room.good()
    assert room.limit == 8


def test_the_pace_follows_what_was_measured() -> None:
    pace = Pace(0.02)
    for _ in range(30):
        pace.add(0.1)
    assert 0.09 < pace.seconds < 0.1


@given(st.data())
def test_every_request_is_settled_once(data: st.DataObject) -> None:
    waiting = Waiting()
    answers: Counter[int] = Counter()
    requests: list[Request] = []
    for number in range(data.draw(st.integers(1, 8))):
        blocks = data.draw(st.sets(st.integers(0, 9), min_size=1, max_size=5))
        requests.append(Request(blocks, lambda *_, number=number: answers.update([number]), until=float(number)))
        waiting.add(requests[-1])
    for _ in range(data.draw(st.integers(0, 30))):
        block = data.draw(st.integers(0, 9))
        how = data.draw(st.sampled_from(["ready", "data", "error", "time"]))
        settled = []
        if how == "time":
            for request, _ in waiting.alarms(data.draw(st.floats(0, 9))):
                waiting.settle(request, DataError("late"))
                settled.append(request)
        else:
            settled = waiting.came(block, b"x" if how == "data" else None, DataError("bad") if how == "error" else None)
            assert block not in waiting
        for request in settled:
            request.answer()
    open_ones = waiting.all()
    assert {id(one) for one in open_ones} == {id(one) for one in requests if not one.settled}
    assert all(one.pending <= {block for block in range(10) if block in waiting} for one in open_ones)
    for request in open_ones:
        waiting.settle(request, None)
        request.answer()
    assert answers == Counter(range(len(requests)))
    assert not any(block in waiting for block in range(10))


def test_alarms_of_the_settled_are_forgotten() -> None:
    waiting = Waiting()
    now = time.monotonic()
    request = Request({1, 2}, lambda *_: None, now + 60)
    waiting.add(request)
    waiting.alarm(now + 1, request, 2)
    assert waiting.next_alarm() == now + 1
    waiting.came(2)
    assert list(waiting.alarms(now + 2)) == [], "it came"
    assert waiting.next_alarm() == now + 60
    assert list(waiting.alarms(now + 61)) == [(request, DEADLINE)]
    waiting.came(1)
    assert request.settled
    assert waiting.next_alarm() is None


def test_an_old_request_does_not_keep_the_alarms_of_the_settled() -> None:
    waiting = Waiting()
    waiting.add(Request({-5}, lambda error, memory: None, 1.0))
    for block in range(5000):
        request = Request({block}, lambda error, memory: None, 1e9 + block)
        waiting.add(request)
        waiting.alarm(1e9, request, block)
        waiting.came(block)
    assert len(waiting._alarms) < 2100
    assert waiting.next_alarm() == 1.0
