"""Discrete events of one start on many nodes: who waits for which link, and when each node is ready.

Pure and deterministic: the same way, site and seed give the same outcome. What it assumes: `sweep.ASSUMED`.
A link serves pieces in the order in which they were asked for, at its rate; a node asks for a few at a time. What a
stage waits for has the link of its node first: what is fetched ahead holds nothing up but the end, for which all must
be there. (If it did, servers that are busier, and hold back what is fetched ahead, would make a start faster.) What
lies in HDFS has its replicas on DataNodes that the seed draws, whatever the number of nodes."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from bootseer.errors import extra

if TYPE_CHECKING:
    import simpy

_MBIT = 1e6 / 8
_SLICE = 0.02
"""Seconds that a process has a shared core before the next one gets it."""
_LEAST = 0.1
"""Of the shared cores at least this share is left beside the nodes' upkeep."""
_BLOCK = 128 << 20
"""Bytes of a block of HDFS, whose replicas are on DataNodes of their own."""
_FINEST, _EVENTS = 1 << 20, 60_000
"""Bytes of a piece at least, and about how many pieces the nodes have in one stream."""
_LOOKED_AT = 3
"""DataNodes of a block that a node compares, where it has more: it knows those that it read from."""
Source = Literal["", "registry", "index", "hot", "stripes", "file"]
"""``hot``: a file of HDFS with replicas of its own number; ``file``: one that a client reads from one DataNode."""
_HOT, _STRIPES = 4, 8
"""In so many parts a node asks for a piece of a hot pack, or at most of a checkpoint: each comes from a server of its
own, so that pieces are as coarse as many nodes make them and load all servers alike."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage on one node: ``size`` bytes from ``source``, then ``seconds`` of work. Each byte takes ``pace`` seconds
    of a processor. ``later``: the bytes come behind the stage, and the last stage waits for them. ``cpu``: processor
    seconds of that work (not of the last stage), which count where nodes share cores: with fewer than ``seconds`` the
    rest is waiting, more ran on several cores at once. None: as many."""

    name: str
    seconds: float = 0.0
    size: float = 0.0
    source: Source = ""
    pace: float = 0.0
    later: bool = False
    cpu: float | None = None


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How one node starts. ``before``: seconds before the first stage; ``beside``: of the job's own work in the last
    stage while bytes come. ``turn``: the last stage's bytes wait so long for those of the first one that come later."""

    name: str
    stages: tuple[Stage, ...]
    before: float = 0.0
    beside: float = 0.0
    turn: float = 0.0


_MOST = 100_000
"""Servers and pieces of one kind: each is an object."""


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it starts. Rates of links are Mbit/s, of each node or server; ``rack`` 0: no cache there."""

    node_mbit: float = 25_000.0
    registry_mbit: float = 25_000.0
    index_mbit: float = 25_000.0
    datanodes: int = 200
    datanode_mbit: float = 25_000.0
    replicas: int = 3
    stripes: int = 4
    """Of a checkpoint."""
    hot_replicas: int = 10
    rack: int = 0
    rack_mbit: float = 25_000.0
    shared_cores: int = 0
    """Cores that all nodes share, as on a machine that emulates them; 0: each node has enough of its own."""
    upkeep: float = 0.0
    """Share of one of those cores that each node has in use beside its work, until it is ready."""
    repeats: float = 0.0
    """Share of the bytes of HDFS that come beyond those that are needed, where the links of all nodes together are more
    than those of all DataNodes: what is asked for twice, and what others fetch in the background meanwhile."""
    seed: int = 0

    def __post_init__(self) -> None:
        rates = (self.node_mbit, self.registry_mbit, self.index_mbit, self.datanode_mbit, self.rack_mbit)
        shares = (self.rack, self.shared_cores, self.repeats, self.upkeep)
        counts = (self.datanodes, self.replicas, self.hot_replicas, self.stripes)
        if not all(0 < rate < 1e12 for rate in rates) or not all(0 <= one < 1e9 for one in shares):
            raise ValueError("rates are above 0 and below 1e12; rack, shared_cores, upkeep and repeats are 0 to 1e9")
        if not all(1 <= count <= _MOST for count in counts):
            raise ValueError(f"datanodes, stripes and replicas are 1 to {_MOST:,}")


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of each node; of each stage on each node; bytes that left each kind of server; ``busy``: the share of the
    time to the last node in which the busiest link of a kind carried bytes."""

    ready: list[float]
    stages: dict[str, list[float]]
    moved: dict[str, float]
    busy: dict[str, float]


class _Link:
    __slots__ = ("free", "moved", "rate")

    def __init__(self, mbit: float) -> None:
        self.rate, self.free, self.moved = mbit * _MBIT, 0.0, 0.0

    def carry(self, now: float, size: float) -> float:
        """When ``size`` bytes that are asked for now have passed."""
        self.free = max(self.free, now) + size / self.rate
        self.moved += size
        return self.free


class _Servers:
    """All links but the nodes' own."""

    def __init__(self, site: Site, nodes: int, rng: random.Random) -> None:
        self._site, self._rng = site, rng
        scarce = nodes * site.node_mbit > site.datanodes * site.datanode_mbit
        self._sent = 1.0 + site.repeats if scarce else 1.0
        self.kinds = {
            "registry": [_Link(site.registry_mbit)],
            "index": [_Link(site.index_mbit)],
            "datanodes": [_Link(site.datanode_mbit) for _ in range(site.datanodes)],
            "racks": list[_Link](),
        }
        self._replicas: dict[tuple[str, int], dict[int, list[_Link]]] = {}
        """Of each block of a file those of each stripe."""
        self._in_rack: dict[tuple[int, str, int], float] = {}

    def give(self, now: float, node: int, stage: Stage, number: int, size: float) -> float:
        """When a piece has left its servers for ``node``."""
        if stage.source == "index":
            return self.kinds["index"][0].carry(now, size)
        if stage.source == "registry":
            return self._pull(now, node, stage, number, size)
        stripes = self._site.stripes if stage.source == "stripes" else 1
        parts = {"hot": _HOT, "stripes": min(_STRIPES, stripes)}.get(stage.source, 1)
        block, last, each = int(number * size // (stripes * _BLOCK)), 0.0, size * self._sent / parts
        compared, draw = 1 if stage.source == "file" else _LOOKED_AT, self._rng.random
        replicas = self._replicas.setdefault((stage.name, block), {})
        for part in range(number * parts + node, (number + 1) * parts + node):  # most of the model's time passes here
            links = replicas.get(part % stripes) or self._place(stage, part % stripes, block)
            best = links[0]
            if (count := len(links)) <= compared:
                for link in links:
                    if link.free < best.free:
                        best = link
            else:
                best = links[int(draw() * count)]
                for _ in range(1, compared):
                    link = links[int(draw() * count)]
                    if link.free < best.free:
                        best = link
            free = (best.free if best.free > now else now) + each / best.rate  # `carry`, without a call
            best.free = free
            best.moved += each
            if free > last:
                last = free
        return last

    def _place(self, stage: Stage, stripe: int, number: int) -> list[_Link]:
        """The DataNodes of a block."""
        count = self._site.hot_replicas if stage.source == "hot" else self._site.replicas
        every = self.kinds["datanodes"]
        placed = random.Random(f"{self._site.seed} {(stage.name, stripe, number)}")
        links = self._replicas[stage.name, number][stripe] = placed.sample(every, min(count, len(every)))
        return links

    def _pull(self, now: float, node: int, stage: Stage, number: int, size: float) -> float:
        registry, racks = self.kinds["registry"][0], self.kinds["racks"]
        if not self._site.rack:
            return registry.carry(now, size)
        rack, piece = node // self._site.rack, (node // self._site.rack, stage.name, number)
        while len(racks) <= rack:
            racks.append(_Link(self._site.rack_mbit))
        if piece not in self._in_rack:
            self._in_rack[piece] = registry.carry(now, size)
        return max(self._in_rack[piece], racks[rack].carry(now, size))


def simulate(way: Way, site: Site, nodes: int, *, spread: Sequence[float] = (1.0,)) -> Outcome:
    """One start on ``nodes`` empty nodes, all at once. ``spread``: by how much the work of a node takes longer than
    usual; each node draws one."""
    with extra("sim", "the model of starts"):
        import simpy
    collects = gc.isenabled()
    gc.disable()  # it would go through millions of objects, none of them garbage
    try:
        return _Start(way, site, nodes, spread, simpy.Environment()).run()
    finally:
        if collects:
            gc.enable()


Events = Generator["simpy.Event", object, None]


class _Start:
    def __init__(self, way: Way, site: Site, nodes: int, spread: Sequence[float], env: simpy.Environment) -> None:
        import simpy

        rng = random.Random(site.seed)
        self._way, self._site, self._env = way, site, env
        self._slow = [rng.choice(spread) for _ in range(nodes)]
        self._links = [_Link(site.node_mbit) for _ in range(nodes)]
        self._servers = _Servers(site, nodes, rng)
        self._cores = simpy.Resource(env, site.shared_cores) if site.shared_cores else None
        self._ready, self._waiting = [0.0] * nodes, nodes
        self._took = {stage.name: [0.0] * nodes for stage in way.stages}
        self._pieces = max(6, _EVENTS // nodes)

    def run(self) -> Outcome:
        for node in range(len(self._ready)):
            self._env.process(self._node(node))
        self._env.run()
        last = max(self._ready) or 1.0
        kinds = {**self._servers.kinds, "nodes": self._links}
        return Outcome(
            ready=self._ready,
            stages=self._took,
            moved={kind: sum(link.moved for link in links) for kind, links in kinds.items()},
            busy={k: max((one.moved / one.rate for one in links), default=0.0) / last for k, links in kinds.items()},
        )

    def _node(self, node: int) -> Events:
        slow, later = self._slow[node], list["simpy.Process"]()
        yield from self._work(self._way.before * slow)
        *first, last = self._way.stages
        fetched: simpy.Process | None = None
        for stage in first:
            began = self._env.now
            if stage.later:
                yield from self._done(stage, slow)
                later.append(self._env.process(self._stream(node, stage)))
                if fetched is None and self._way.turn:
                    fetched = self._env.process(self._in_turn(node, last, later[0]))
            else:
                yield from self._stream(node, stage)
                yield from self._done(stage, slow)
            self._took[stage.name][node] = self._env.now - began
        began = self._env.now
        beside = self._env.process(self._work(self._way.beside * slow)) if self._cores else None
        if fetched:
            yield fetched
        else:
            yield from self._stream(node, last)
        yield from later
        if (rest := self._links[node].free - self._env.now) > 0:
            yield self._env.timeout(rest)
        if beside:
            yield beside
        rest = 0.0 if beside else max(0.0, began + self._way.beside * slow - self._env.now)
        yield from self._work(rest + last.seconds * slow)
        self._took[last.name][node] = self._env.now - began
        self._ready[node] = self._env.now
        self._waiting -= 1

    def _in_turn(self, node: int, stage: Stage, first: simpy.Process) -> Events:
        yield first | self._env.timeout(self._way.turn)
        yield from self._stream(node, stage)

    def _stream(self, node: int, stage: Stage) -> Events:
        if not stage.size or not stage.source:
            return
        count = max(1, min(self._pieces, int(stage.size / _FINEST)))
        size, link = stage.size / count, _Link(self._site.node_mbit)

        def ask(number: int) -> float:
            now = self._env.now
            self._links[node].carry(now, size)
            return max(self._servers.give(now, node, stage, number, size), link.carry(now, size))

        work, coming = size * stage.pace * self._slow[node], ask(0)
        for number in range(1, count + 1):  # the next piece comes while one is worked on
            done, coming = coming, ask(number) if number < count else 0.0
            now = self._env.now
            if self._cores is None:
                done = max(done, now) + work
            if done > now:
                yield self._env.timeout(done - now)
            if self._cores is not None:
                yield from self._work(work)

    def _done(self, stage: Stage, slow: float) -> Events:
        """The work of a stage: what it waits for, then what it does, on as many cores as it had alone."""
        if self._cores is None or stage.cpu is None or not stage.seconds:
            yield from self._work(stage.seconds * slow)
            return
        side = max(1, math.ceil(stage.cpu / stage.seconds))
        yield self._env.timeout(max(0.0, stage.seconds - stage.cpu / side) * slow)
        yield self._env.all_of([self._env.process(self._work(stage.cpu / side * slow)) for _ in range(side)])

    def _work(self, seconds: float) -> Events:
        if seconds <= 0:
            return
        if self._cores is None:
            yield self._env.timeout(seconds)
            return
        while seconds > 1e-9:
            with self._cores.request() as core:
                yield core
                part = min(_SLICE, seconds)
                free = self._cores.capacity - self._waiting * self._site.upkeep
                share = max(_LEAST, free / self._cores.capacity) if self._cores.count == self._cores.capacity else 1.0
                yield self._env.timeout(part / share)
                seconds -= part
