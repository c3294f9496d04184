"""Shares of stripes among DataNodes: complete, and as good as Hall's theorem allows."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends.engine.assignment import plan


def bound(sizes, replicas, rates, backlog) -> float:
    """No shares can end sooner: some DataNodes must give all stripes that only they have, besides their backlog."""
    best = 0.0
    for count in range(1, len(rates) + 1):
        for some in itertools.combinations(range(len(rates)), count):
            only = sum(size for size, nodes in zip(sizes, replicas, strict=True) if set(nodes) <= set(some))
            # of their backlogs only what makes these shares wait; a DataNode without a share may end later
            loads = sorted((backlog[node] / rates[node], rates[node]) for node in some)
            left, rate, level = float(only), 0.0, 0.0
            if only:
                for (load, speed), after in itertools.zip_longest(loads, loads[1:]):
                    rate, level = rate + speed, load
                    until = after[0] if after else float("inf")
                    if left <= (until - level) * rate:
                        best = max(best, level + left / rate)
                        break
                    left -= (until - level) * rate
    return max(best, max((backlog[n] / rates[n] for n in range(len(rates))), default=0.0))


def makespan(shares, replicas, rates, backlog) -> float:
    """Seconds until the last DataNode has given its shares and its backlog."""
    load = [count / rate for count, rate in zip(backlog, rates, strict=True)]
    for nodes, row in zip(replicas, shares, strict=True):
        for node, share in zip(nodes, row, strict=True):
            load[node] += share / rates[node]
    return max(load, default=0.0)


NODES = 5


@given(
    stripes=st.lists(
        st.tuples(st.integers(1, 100), st.sets(st.integers(0, NODES - 1), min_size=1, max_size=3)),
        min_size=1,
        max_size=8,
    ),
    rates=st.lists(st.sampled_from([1.0, 6.0, 60.0, 100.0]), min_size=NODES, max_size=NODES),
    backlog=st.lists(st.sampled_from([0.0, 0.0, 30.0, 200.0]), min_size=NODES, max_size=NODES),
)
def test_shares_are_complete_and_nearly_the_best(stripes, rates, backlog):
    sizes = [float(size) for size, _ in stripes]
    replicas = [sorted(nodes) for _, nodes in stripes]
    shares = plan(sizes, replicas, rates, backlog)
    for size, nodes, row in zip(sizes, replicas, shares, strict=True):
        assert len(row) == len(nodes)
        assert all(share >= -1e-6 for share in row)
        assert abs(sum(row) - size) < 1e-6
    assert makespan(shares, replicas, rates, backlog) <= 1.06 * bound(sizes, replicas, rates, backlog) + 1e-6


def test_four_stripes_whose_first_replicas_collide():
    replicas = [[0, 1, 2], [0, 1, 3], [0, 2, 1], [0, 2, 3]]
    shares = plan([60.0] * 4, replicas, [60.0] * 4, [0.0] * 4)
    assert makespan(shares, replicas, [60.0] * 4, [0.0] * 4) < 1.02


def test_a_datanode_with_work_is_spared():
    shares = plan([60.0], [[0, 1]], [60.0, 60.0], [60.0, 0.0])
    assert shares[0][0] < 1.0


def test_nothing_to_share():
    assert plan([], [], [], []) == []
    assert makespan([], [], [], []) == 0.0
