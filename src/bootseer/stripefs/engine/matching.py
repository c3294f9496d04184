"""Which DataNode reads how much of which stripe, so that all end at the same time.

Pure arithmetic. Stripe ``i`` has ``sizes[i]`` bytes to read, any part of them from any of its replicas; DataNode ``n``
gives ``rates[n]`` bytes a second and has ``backlog[n]`` bytes to give already. Wanted are shares with the smallest time
until the last DataNode ends.

Shares of one stripe are moved from its latest DataNode to its earliest until no such move helps. Where that ends, each
stripe's DataNodes end together, except those that have nothing of it and end later: no better shares exist (moving
bytes is convex, so that a local optimum is a global one). The tests compare with the bound by Hall's theorem.
"""

from __future__ import annotations

from collections.abc import Sequence

_ROUNDS = 40
_CLOSE = 0.01
"""Rounds end when no stripe's DataNodes differ by more than this part of the time."""


def plan(
    sizes: Sequence[float],
    replicas: Sequence[Sequence[int]],
    rates: Sequence[float],
    backlog: Sequence[float],
) -> list[list[float]]:
    """Bytes that each replica of each stripe should give, in the order of ``replicas``. Every rate is above 0."""
    shares: list[list[float]] = []
    load = [count / rate for count, rate in zip(backlog, rates, strict=True)]
    for size, nodes in zip(sizes, replicas, strict=True):
        whole = sum(rates[node] for node in nodes)
        row = [size * rates[node] / whole for node in nodes]
        shares.append(row)
        for node, share in zip(nodes, row, strict=True):
            load[node] += share / rates[node]
    for _ in range(_ROUNDS):
        worst = 0.0
        for nodes, row in zip(replicas, shares, strict=True):
            if len(nodes) > 1:
                for _ in range(len(nodes) - 1):
                    worst = max(worst, _level(nodes, row, rates, load))
        if worst <= _CLOSE * max(load, default=0.0):
            break
    return shares


def _level(nodes: Sequence[int], row: list[float], rates: Sequence[float], load: list[float]) -> float:
    """Make the latest DataNode that has a share, and the earliest, end together; by how much they differed."""
    low = min(range(len(nodes)), key=lambda i: load[nodes[i]])
    high = max((i for i in range(len(nodes)) if row[i] > 0), key=lambda i: load[nodes[i]], default=low)
    late, early = nodes[high], nodes[low]
    gap = load[late] - load[early]
    if gap <= 0:
        return 0.0
    moved = min(row[high], gap / (1 / rates[late] + 1 / rates[early]))
    row[high] -= moved
    row[low] += moved
    load[late] -= moved / rates[late]
    load[early] += moved / rates[early]
    return gap


def makespan(
    shares: Sequence[Sequence[float]],
    replicas: Sequence[Sequence[int]],
    rates: Sequence[float],
    backlog: Sequence[float],
) -> float:
    """Seconds until the last DataNode has given its shares and its backlog."""
    load = [count / rate for count, rate in zip(backlog, rates, strict=True)]
    for nodes, row in zip(replicas, shares, strict=True):
        for node, share in zip(nodes, row, strict=True):
            load[node] += share / rates[node]
    return max(load, default=0.0)
