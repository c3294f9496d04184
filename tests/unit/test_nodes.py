"""What the read scheduler knows of DataNodes: rates, breakers, how late is late, how much may be read twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends.engine import datanodes, hedging, memory
from bootseer.backends.engine.datanodes import BULK, WINDOW, Breaker, NodeState
from bootseer.backends.engine.hedging import Durations, HedgeBudget
from bootseer.backends.engine.memory import ByteBudget

MB = 1 << 20


# -- breaker ----------------------------------------------------------------------------------------------------------


def test_a_breaker_opens_at_the_second_failure_in_a_row_or_a_hard_one():
    one = Breaker()
    assert not one.failed(0.0)
    one.succeeded()
    assert not one.failed(1.0)
    assert one.closed
    assert one.failed(1.1)
    assert not one.closed
    assert Breaker().failed(0.0, hard=True)


def test_one_transfer_decides_and_each_failed_one_doubles_the_wait():
    one, now, waits = Breaker(), 0.0, []
    one.failed(now, hard=True)
    for _ in range(9):
        assert not one.half_open(one.until - 0.01)
        waits.append(one.until - now)
        now = one.until
        assert one.half_open(now)
        assert not one.half_open(now)  # one at a time
        assert one.failed(now)
    assert waits[:4] == pytest.approx([datanodes.FIRST * 2**i for i in range(4)])
    assert waits[-1] == pytest.approx(datanodes.LONGEST)
    assert one.half_open(one.until)
    assert one.succeeded()
    assert one.closed
    assert one.failed(now, hard=True)
    assert one.until == pytest.approx(now + datanodes.FIRST)


# -- rates ------------------------------------------------------------------------------------------------------------


def transfer(node: NodeState, size: int, begin: float, end: float, steps: int = 4) -> None:
    node.begin(size, begin)
    for step in range(1, steps + 1):
        node.credit(size // steps, size, begin + (end - begin) * step / steps)
    node.end(size, size - size // steps * steps, end)


def test_a_rate_is_of_the_time_with_transfers_under_way():
    node = NodeState("a", "a:1")
    assert node.rate is None
    transfer(node, 4 * MB, 0.0, 0.1)
    transfer(node, 4 * MB, 50.0, 50.1)
    assert node.rate == pytest.approx(40 * MB, rel=0.01)
    assert (node.flying, node.bulk, node.bytes) == (0, 0, 0)
    assert node.served == 8 * MB


def test_transfers_at_the_same_time_add_up():
    node = NodeState("a", "a:1")
    node.begin(4 * MB, 0.0)
    node.begin(4 * MB, 0.0)
    for _ in range(2):
        node.credit(4 * MB, 4 * MB, 0.1)
        node.end(4 * MB, 0, 0.1)
    assert node.rate == pytest.approx(80 * MB, rel=0.01)


def test_a_rate_follows_what_changes_and_falls_while_nothing_comes():
    node = NodeState("a", "a:1")
    for i in range(20):
        transfer(node, 10 * MB, i * 0.1, (i + 1) * 0.1)
    assert node.rate == pytest.approx(100 * MB, rel=0.01)
    for i in range(20):
        transfer(node, MB, 2 + i * 0.1, 2.1 + i * 0.1)
    assert node.rate < 100 * MB / 2
    node.begin(MB, 4.0)
    before = node.rate
    node.credit(0, MB, 4.0 + WINDOW)
    assert node.rate < before / 1.5
    node.renew(7.0)
    assert node.rate is None


def test_small_transfers_tell_of_latency_not_of_the_rate():
    node = NodeState("a", "a:1")
    transfer(node, BULK - 1, 0.0, 1.0)
    assert node.rate is None
    node.took(1000, 0.01)
    node.took(1000, 0.02)
    assert 0.01 < node.latency < 0.02
    node.took(4 * MB, 5.0)
    assert node.latency < 0.02


# -- hedging ----------------------------------------------------------------------------------------------------------


def test_late_is_twice_what_nearly_all_take():
    seen = Durations()
    assert seen.late(4 * MB) > 0.1  # a guess
    for _ in range(99):
        seen.add(4 * MB, 0.05)
    assert seen.late(4 * MB) == pytest.approx(0.1)
    assert seen.p95(MB) == pytest.approx(0.05)  # a larger one's, while there are too few
    assert seen.p95(32 * MB) == pytest.approx(0.4)
    for _ in range(10):
        seen.add(100, 0.0001)
    assert seen.late(100) == hedging.FLOOR


@given(st.lists(st.tuples(st.integers(1, 64 * MB), st.floats(0.0, 10.0)), max_size=60), st.integers(1, 64 * MB))
def test_late_is_always_some_time(seen, size):
    durations = Durations()
    for bytes_, seconds in seen:
        durations.add(bytes_, seconds)
    assert hedging.FLOOR <= durations.late(size) < float("inf")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 64 * MB)), max_size=100))
def test_no_more_is_read_twice_than_was_earned(steps):
    budget_, earned, spent = HedgeBudget(), 0, 0
    for earns, count in steps:
        if earns:
            budget_.earn(count)
            earned += count
        elif budget_.spend(count):
            spent += count
        assert spent <= hedging.BURST + hedging.SHARE * earned + 1
        assert 0 <= budget_.left <= hedging.BURST
    assert budget_.spent == spent


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_part_counts_in_the_whole():
    whole = ByteBudget(100)
    one, two = ByteBudget(80, whole), ByteBudget(80, whole)
    assert one.try_take(70)
    assert not two.try_take(40)
    assert two.try_take(30)
    assert not one.try_take(20)
    two.take(50)  # somebody waits for them
    assert (one.used, two.used, whole.used) == (70, 80, 150)
    one.give(70)
    two.give(80)
    assert (one.used, two.used, whole.used) == (0, 0, 0)


def test_there_is_one_budget_for_the_process():
    assert memory.process() is memory.process()
    assert memory.process().limit == memory.LIMIT
