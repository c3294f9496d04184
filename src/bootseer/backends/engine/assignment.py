"""Which run a DataNode reads next, of what size, and what it leaves to others. Pure: rates and breakers are those of
`NodeState`, the time is an argument, the scheduler holds the lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bootseer.backends.engine.datanodes import UNKNOWN, NodeState
from bootseer.backends.engine.model import BlockRange, ReadRequest, Run, Tuning

_ROUNDS = 40
_CLOSE = 0.01
"""Rounds end when no stripe's DataNodes differ by more than this part of the time."""


def plan(
    sizes: Sequence[float],
    replicas: Sequence[Sequence[int]],
    rates: Sequence[float],
    backlog: Sequence[float],
) -> list[list[float]]:
    """Bytes that each replica of each stripe should give, in the order of ``replicas``. Every rate is above 0.

    Stripe ``i`` has ``sizes[i]`` bytes to read, any part of them from any of its replicas. DataNode ``n`` gives
    ``rates[n]`` bytes a second and has ``backlog[n]`` bytes to give already. So that the last DataNode ends as early as
    possible, shares of one stripe are moved from its latest DataNode to its earliest until no such move helps: a local
    optimum of this convex problem is the global one. The tests compare with the bound by Hall's theorem."""
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


_SETTLED = 0.05
"""Seconds for which a plan is kept in any case."""
_WRONG = 1.5
"""A rate that is so many times what was planned with makes a new plan."""


class Assignment:
    """``nodes``: all DataNodes by key; the scheduler adds to them."""

    def __init__(self, nodes: dict[str, NodeState], tuning: Tuning) -> None:
        self._nodes, self._tuning = nodes, tuning
        self._version = 0
        self._usual = float(UNKNOWN)
        """What a DataNode that was not measured yet is believed to give: as much as the best."""

    def route(self, request: ReadRequest, now: float) -> None:
        """Who can read what of ``request``, now that its places are known or have changed."""
        request.spans_of = {}
        for span in request.spans:
            for key in span.place.keys:
                request.spans_of.setdefault(key, []).append(span)
        request.nodes, request.seen = [self._nodes[key] for key in request.spans_of], -1
        self._plan(request, now)

    def rates_changed(self, requests: Sequence[ReadRequest], now: float) -> None:
        """Look at the rates again: of the DataNodes of ``requests``, a cluster may have thousands of others."""
        nodes: set[NodeState] = set()
        for request in requests:
            nodes.update(request.nodes)
            request.seen = -1
        known = [rate for node in nodes if (rate := node.rate) is not None and node.breaker.closed]
        self._usual = max(known, default=self._usual)
        for request in requests:
            if self._settled(request, now) and self._outdated(request):
                self._plan(request, now)

    def _settled(self, request: ReadRequest, now: float) -> bool:
        """Whether it has a plan that may be replaced."""
        return request.planned_at is not None and now - request.planned_at > _SETTLED

    def _outdated(self, request: ReadRequest) -> bool:
        """Whether its plan was made with rates that have proved wrong."""
        return any(
            not 1 / _WRONG < self.rate(node) / request.planned_with.get(node.key, self.rate(node)) < _WRONG
            for node in self.healthy(request)
        )

    def breakers_changed(self, requests: Iterable[ReadRequest], now: float) -> None:
        """A DataNode is out, or back."""
        self._version += 1
        for request in requests:
            if request.planned_at is not None:
                self._plan(request, now)

    def pick(self, request: ReadRequest, node: NodeState, now: float) -> Run | None:
        """The run of ``request`` that ``node`` should read now, taken out of its span."""
        fresh: list[tuple[float, int, BlockRange]] = []
        for span in request.spans_of.get(node.key, ()):
            if node.key in span.place.bad:
                continue
            if span.again and (again := self._pick_again(span, node, now)) is not None:
                return again
            if span.fresh and self._allowed(span, None, node):
                fresh.append((max(span.quota.get(node.key, 0.0), 0.0), span.fresh, span))
        fresh.sort(key=lambda found: found[:2], reverse=True)
        if fresh and not fresh[0][0] and self._settled(request, now):
            self._plan(request, now)  # its share is used up: it is faster than was planned, or others are slower
        size = self._run_size(request, node)
        for _, _, span in fresh:
            if not self._leaves(request, span, node, size):
                run = span.cut(size)
                span.quota[node.key] = span.quota.get(node.key, 0.0) - run.size
                return run
        return None

    def _pick_again(self, span: BlockRange, node: NodeState, now: float) -> Run | None:
        for index, run in enumerate(span.again):
            if run.not_before <= now and self._allowed(span, run, node):
                return span.again.pop(index)
        return None

    def _allowed(self, span: BlockRange, run: Run | None, node: NodeState) -> bool:
        """Whether ``node`` may read from ``span``: a DataNode that failed only when there is no better one."""
        able = self.able(span, run)
        if node not in able:
            return False
        best = min(self._rank(run, other) for other in able)
        return self._rank(run, node) == best

    def _rank(self, run: Run | None, node: NodeState) -> tuple[bool, int]:
        # one that has still to prove that it is back gets nothing more until then
        proving = not node.breaker.closed and bool(node.flying)
        return (node.breaker.open or proving, run.failures.get(node.key, 0) if run is not None else 0)

    def able(self, span: BlockRange, run: Run | None) -> list[NodeState]:
        """The DataNodes that may still be asked."""
        failures = run.failures if run is not None else {}
        usable = (key for key in span.place.usable if failures.get(key, 0) < self._tuning.tries)
        return [self._nodes[key] for key in usable]

    def _run_size(self, request: ReadRequest, node: NodeState) -> int:
        tuning, least, most = self._tuning, self._tuning.min_run, self._tuning.max_run
        if not node.breaker.closed:
            return least
        streams = max(1, tuning.streams * len(self.healthy(request)))
        size = request.pending // (2 * min(streams, tuning.total))
        if node.rate is not None:
            quick = int(node.rate * tuning.quick_seconds)
            least, most = max(least, min(quick // 4, most)), max(most, min(quick, tuning.long_run))
        return max(least, min(most, size))

    def _leaves(self, request: ReadRequest, span: BlockRange, node: NodeState, size: int) -> bool:
        """Whether ``node`` had better leave this to others, who would end all that is left sooner."""
        mine = self.seconds(node, size)
        if not node.breaker.closed or mine * request.rates < request.pending:
            return False  # there is more to do than one transfer takes
        others = [other for other in self.able(span, None) if other is not node and other.breaker.closed]
        if not others:
            return False
        healthy = [other for other in self.healthy(request) if other is not node]
        everything = request.pending + sum(other.bytes for other in healthy)
        theirs = max(
            min(self.seconds(other, size) for other in others),
            everything / max(1.0, sum(self.rate(other) for other in healthy)),
        )
        return mine > 1.2 * theirs + 0.01

    def healthy(self, request: ReadRequest) -> list[NodeState]:
        """Its DataNodes with a closed breaker; also brings ``request.rates``, the sum of their rates, up to date."""
        if request.seen != self._version:
            request.seen = self._version
            request.healthy = [node for node in request.nodes if node.breaker.closed]
            request.rates = sum(self.rate(node) for node in request.healthy)
        return request.healthy

    def rate(self, node: NodeState) -> float:
        return node.rate or self._usual

    def seconds(self, node: NodeState, size: int) -> float:
        """Seconds after which ``node`` would have given ``size`` bytes more."""
        return (node.bytes + size) / self.rate(node)

    def _plan(self, request: ReadRequest, now: float) -> None:
        request.planned_at = None
        if request.size >= self._tuning.plan_from and len(request.nodes) >= 2 and len(request.spans) >= 2:
            request.planned_at = now
            self._share(request)

    def _share(self, request: ReadRequest) -> None:
        able = self.healthy(request) or request.nodes
        index = {node.key: number for number, node in enumerate(able)}
        spans = [(span, [key for key in span.place.usable if key in index]) for span in request.spans if span.fresh]
        spans = [(span, keys) for span, keys in spans if keys]
        shares = plan(
            [span.fresh for span, _ in spans],
            [[index[key] for key in keys] for _, keys in spans],
            [self.rate(node) for node in able],
            [float(node.bytes) for node in able],
        )
        request.planned_with = {node.key: self.rate(node) for node in able}
        for (span, keys), row in zip(spans, shares, strict=True):
            span.quota = dict(zip(keys, row, strict=True))
