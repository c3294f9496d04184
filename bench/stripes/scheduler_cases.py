"""Reads of simulated clusters, for bench/scheduler: what each reader waits for, in simulated seconds.

A cluster has DataNodes of 60 MiB/s, give or take 10 %; blocks are of 128 MiB with three replicas at random, and chunks
of 1 MiB, where a case says nothing else. A case is made from a seed alone, so that a scheduler without a part meets the
same cluster and the same reads.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bootseer.backends.engine.model import Attempt, BlockRange, Outcome, Place, ReadRequest
from bootseer.backends.engine.policy import Scheduler
from support.readsim import Cluster, SimNode

MIB = 1 << 20
RATE = 60 * MIB
BLOCK = 128 * MIB
SMALL = 64 << 10
FOREVER = 1e9


class Case(NamedTuple):
    """``seconds``: from a seed to the figure of the case."""

    name: str
    what: str
    seconds: Callable[[random.Random], float]


def cluster(rand: random.Random, count: int, rate: float = RATE, **more: Any) -> Cluster:
    nodes = {f"n{index}": SimNode(rate * rand.uniform(0.9, 1.1)) for index in range(count)}
    return Cluster(nodes, **more)


def request(rand: random.Random, nodes: Sequence[str], size: int, *, unit: int = MIB, replicas: int = 3) -> ReadRequest:
    """A read of ``size`` bytes: whole blocks, but the last."""
    spans = []
    for start in range(0, size, BLOCK):
        count = -(-min(BLOCK, size - start) // unit)
        keys = rand.sample(list(nodes), min(replicas, len(nodes)))
        spans.append(BlockRange(Place(object(), keys), [index * unit for index in range(count + 1)]))
    return ReadRequest(spans)


def read(simulated: Cluster, *requests: ReadRequest, scheduler: Scheduler | None = None) -> list[float]:
    """Seconds of each; all begin now. One that fails has taken ten minutes."""
    took = simulated.run(
        scheduler or Scheduler(), [(simulated.now, one) for one in requests], limit=simulated.now + 900
    )
    return [600.0 if one.error is not None else took[one] for one in requests]


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def one_file(**bad: object) -> Callable[[random.Random], float]:
    """512 MiB from eight DataNodes; one of them is ``bad``. The third read counts: then rates are known."""

    def seconds(rand: random.Random) -> float:
        simulated, scheduler = cluster(rand, 8), Scheduler()
        for _ in range(2):
            read(simulated, request(rand, list(simulated.nodes), 256 * MIB), scheduler=scheduler)
        wanted = request(rand, list(simulated.nodes), 512 * MIB)
        node = simulated.nodes[rand.choice(wanted.spans[0].place.keys)]
        for name, value in bad.items():
            setattr(node, name, value(simulated.now, node.rate) if callable(value) else value)
        return read(simulated, wanted, scheduler=scheduler)[0]

    return seconds


def whole(
    count: int,
    size: int,
    *,
    reads: int = 2,
    replicas: int = 3,
    latency: float = 0.0,
    unlike: bool = False,
    slow: bool = False,
    **more: Any,
) -> Callable[[random.Random], float]:
    """The last of ``reads`` of ``size`` MiB from ``count`` DataNodes; with two of them the rates are known."""

    def seconds(rand: random.Random) -> float:
        simulated, scheduler = cluster(rand, count, **more), Scheduler()
        for node in simulated.nodes.values():
            node.latency = latency
            if unlike:
                node.rate = rand.choice([20, 60, 100]) * MIB
        if slow:
            simulated.nodes["n0"].rate /= 4
        for _ in range(reads):
            wanted = request(rand, list(simulated.nodes), size * MIB, replicas=replicas)
            took = read(simulated, wanted, scheduler=scheduler)
        return took[0]

    return seconds  # fmt: skip


def colliding(rand: random.Random) -> float:
    """Four DataNodes; one of them has only one of the stripes, or all have the same first replica."""
    simulated, scheduler = cluster(rand, 4), Scheduler()
    a, b, c, d = simulated.nodes
    spread, crowded = [(a, b, c), (a, b, d), (a, c, b), (a, c, d)], [(a, b, c)] * 3 + [(a, b, d)]
    layouts = (spread, crowded, [(a,), (b,), (b, a), (c, d)])
    starts = [at * MIB for at in range(65)]
    for _ in range(2):
        spans = [BlockRange(Place(object(), keys), starts) for keys in layouts[rand.randrange(3)]]
        took = read(simulated, ReadRequest(spans), scheduler=scheduler)
    return took[0]


def flapping(rand: random.Random) -> float:
    """20 reads while a DataNode of eight is frozen in every other half second."""
    simulated, scheduler = cluster(rand, 8), Scheduler()
    keys, total = list(simulated.nodes), 0.0
    for _ in range(20):
        at = simulated.now // 1
        simulated.nodes["n0"].frozen = (at + 0.5, at + 1.0)
        total += read(simulated, request(rand, keys, 256 * MIB), scheduler=scheduler)[0]
    return total


def slow_in_pieces(rand: random.Random) -> float:
    """A reader of 16 MiB at a time, two at once as the read-ahead has, with a slow DataNode."""
    simulated, scheduler = cluster(rand, 8), Scheduler()
    simulated.nodes["n0"].rate /= 4
    began = simulated.now
    keys = list(simulated.nodes)
    for _ in range(24):
        two = [request(rand, keys, 16 * MIB) for _ in range(2)]
        read(simulated, *two, scheduler=scheduler)
    return simulated.now - began


def files(rand: random.Random) -> float:
    """Until the last of four has come."""
    simulated = cluster(rand, 8)
    return max(read(simulated, *(request(rand, list(simulated.nodes), 256 * MIB) for _ in range(4))))


def two(rand: random.Random) -> float:
    """The smaller one's seconds."""
    simulated = cluster(rand, 8)
    keys = list(simulated.nodes)
    return read(simulated, request(rand, keys, 1024 * MIB), request(rand, keys, 64 * MIB))[1]


def small(rand: random.Random, *, beside: int = 0, late: float = 0.0) -> float:
    """The 99th percentile of 2,000 reads of 64 KiB, at 500 a second; ``late``: a DataNode's latency from 2 s on."""
    simulated, scheduler = cluster(rand, 8), Scheduler()
    keys = list(simulated.nodes)
    reads = [(at / 500, request(rand, keys, SMALL, unit=SMALL)) for at in range(2000)]
    large = [(0.0, request(rand, keys, 512 * MIB)) for _ in range(beside)]
    if late:
        simulated.nodes["n0"].latency = late
    took = simulated.run(scheduler, [*large, *reads])
    return p99([600.0 if one.error is not None else took[one] for _, one in reads])


def frozen_small(rand: random.Random) -> float:
    """The slowest of 1,000 small reads while a DataNode freezes for two seconds."""
    simulated, scheduler = cluster(rand, 8), Scheduler()
    simulated.nodes["n0"].frozen = (0.5, 2.5)
    keys = list(simulated.nodes)
    reads = [(at / 300, request(rand, keys, SMALL, unit=SMALL)) for at in range(1000)]
    took = simulated.run(scheduler, reads)
    return max(600.0 if one.error is not None else took[one] for _, one in reads)


def back(rand: random.Random) -> float:
    """Ten reads after a DataNode of four was frozen for three seconds."""
    simulated, scheduler = cluster(rand, 4), Scheduler()
    simulated.nodes["n0"].frozen = (0.2, 3.0)
    keys = list(simulated.nodes)
    while simulated.now < 3.0:
        read(simulated, request(rand, keys, 128 * MIB), scheduler=scheduler)
    return sum(read(simulated, request(rand, keys, 256 * MIB), scheduler=scheduler)[0] for _ in range(10))


def out(rand: random.Random) -> float:
    """Ten reads while a DataNode is frozen for long."""
    simulated, scheduler = cluster(rand, 8), Scheduler()
    simulated.nodes["n0"].frozen = (0.2, FOREVER)
    keys = list(simulated.nodes)
    return sum(read(simulated, request(rand, keys, 256 * MIB), scheduler=scheduler)[0] for _ in range(10))


def only_replicas(rand: random.Random) -> float:
    """A read of 64 MiB beside forty whose only replicas are on frozen DataNodes."""
    simulated = cluster(rand, 8)
    keys = list(simulated.nodes)
    frozen = [f"f{index}" for index in range(10)]
    simulated.nodes |= {key: SimNode(RATE, frozen=(0.0, FOREVER)) for key in frozen}
    stuck = [request(rand, [key], 4 * MIB) for key in frozen for _ in range(4)]
    well = [request(rand, keys, 64 * MIB) for _ in range(5)]
    took = simulated.run(Scheduler(), [(0.0, one) for one in stuck] + [(1.0 + at, one) for at, one in enumerate(well)])
    return statistics.median(took[one] for one in well)


def cpu(rand: random.Random) -> float:
    """CPU seconds of the decisions for 10,000 small reads of 32 readers, without a simulator."""
    scheduler, now = Scheduler(), 0.0
    keys = [f"n{index}" for index in range(16)]
    for key in keys:
        scheduler.node(key, key)
    wanted = deque(request(rand, keys, SMALL, unit=SMALL) for _ in range(10_000))
    flying: deque[Attempt] = deque()
    live = 0
    began = time.process_time()
    while wanted or flying:
        while wanted and live < 32:
            scheduler.submit(wanted.popleft(), now)
            live += 1
        while (doing := scheduler.take(now)) is not None:
            assert isinstance(doing, Attempt)
            flying.append(doing)
        scheduler.ended(flying.popleft(), Outcome.DONE, None, now)
        live -= 1
        now += 0.0003
    return time.process_time() - began


CASES = [
    Case("equal", "512 MiB from 8 equal DataNodes", one_file()),
    Case("slow", "one of 8 gives a quarter", one_file(rate=lambda now, rate: rate / 4)),
    Case("frozen", "one of 8 freezes half-way", one_file(frozen=lambda now, rate: (now + 0.5, FOREVER))),
    Case("dies", "one of 8 dies half-way", one_file(dead_from=lambda now, rate: now + 0.5)),
    Case("change", "one of 8 gives a tenth from half-way on",
         one_file(changed=lambda now, rate: (now + 0.5, rate / 10))),
    Case("unlike", "8 DataNodes of 20 to 100 MiB/s, known", whole(8, 512, unlike=True)),
    Case("unknown", "8 DataNodes of 20 to 100 MiB/s, not yet known", whole(8, 512, reads=1, unlike=True)),
    Case("two-replicas", "1 GiB from 6 DataNodes, two replicas each", whole(6, 1024, replicas=2)),
    Case("collide", "256 MiB from 4 DataNodes whose replicas collide", colliding),
    Case("link", "8 DataNodes behind a link of half their sum", whole(8, 512, link=4.0 * RATE)),
    Case("pieces", "768 MiB in pieces of 16 MiB, one of 8 DataNodes slow", slow_in_pieces),
    Case("files", "four files of 256 MiB at once", files),
    Case("two", "64 MiB beside 1 GiB", two),
    Case("small", "p99 of small reads", small),
    Case("small-beside", "p99 of small reads beside four large ones", lambda rand: small(rand, beside=4)),
    Case("small-late", "p99 of small reads, one of 8 answers after 0.3 s", lambda rand: small(rand, late=0.3)),
    Case("small-frozen", "slowest small read, one of 8 frozen for 2 s", frozen_small),
    Case("back", "10 reads after one of 4 was frozen", back),
    Case("out", "10 reads while one of 8 is frozen", out),
    Case("flapping", "20 reads while one of 8 freezes again and again", flapping),
    Case("quick", "1 GiB from 8 DataNodes of 250 MiB/s", whole(8, 1024, rate=250 * MIB, latency=0.005)),
    Case("slow-links", "128 MiB from 8 DataNodes of 4 MiB/s, one of 1", whole(8, 128, rate=4 * MIB, slow=True)),
    Case("only-replicas", "64 MiB beside reads that wait for frozen DataNodes", only_replicas),
    Case("cpu", "CPU seconds of 10,000 small reads", cpu),
]  # fmt: skip
