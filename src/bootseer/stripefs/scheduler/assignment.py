"""Which run a DataNode reads next, of what size, and what it leaves to others.

Pure: rates and breakers are those of `NodeState`, the time is an argument, the scheduler holds the lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from bootseer.stripefs.scheduler.datanodes import UNKNOWN, NodeState
from bootseer.stripefs.scheduler.model import Request, Run, Span, Tuning


class Assignment:
    """``nodes``: all DataNodes by key; the scheduler adds to them."""

    def __init__(self, nodes: dict[str, NodeState], tuning: Tuning) -> None:
        self._nodes, self._tuning = nodes, tuning
        self.left = False
        """A DataNode has left something to others since the scheduler looked at this last."""

    def route(self, request: Request) -> None:
        """Who can read what of ``request``, now that its places are known or have changed."""
        request.spans_of = {}
        for span in request.spans:
            for key in span.place.keys:
                request.spans_of.setdefault(key, []).append(span)
        request.nodes = [self._nodes[key] for key in request.spans_of]
        self.refresh([request])

    def refresh(self, requests: Iterable[Request]) -> None:
        """Look at rates and breakers again: only of the DataNodes of ``requests``, a cluster may have thousands."""
        for request in requests:
            request.healthy = [node for node in request.nodes if node.breaker.closed]
            request.rates = sum(map(rate, request.healthy))

    def pick(self, request: Request, node: NodeState, now: float) -> Run | None:
        """The run of ``request`` that ``node`` should read now, taken out of its span.

        Of several blocks, from the one that all DataNodes with a replica of it would take longest for.
        """
        fresh: list[tuple[float, Span]] = []
        for span in request.spans_of.get(node.key, ()):
            if node.key in span.place.bad:
                continue
            if span.again and (again := self._pick_again(span, node, now)) is not None:
                return again
            if span.fresh and node in (best := self._best(span, None)):
                fresh.append((span.fresh / sum(map(rate, best)), span))
        size = self._run_size(request, node)
        for _, span in sorted(fresh, key=lambda found: found[0], reverse=True):
            if not self._leaves(request, span, node, size):
                return span.cut(size)
            self.left = True
        return None

    def _pick_again(self, span: Span, node: NodeState, now: float) -> Run | None:
        for index, run in enumerate(span.again):
            if run.not_before <= now and node in self._best(span, run):
                return span.again.pop(index)
        return None

    def _best(self, span: Span, run: Run | None) -> list[NodeState]:
        """The DataNodes that may read from ``span``: those that failed only when there are no better ones."""
        able = self.able(span, run)
        if run is None or not run.failures:
            return [node for node in able if not node.breaker.open] or able
        ranks = [(node.breaker.open, run.failures.get(node.key, 0)) for node in able]
        return [node for node, rank in zip(able, ranks, strict=True) if rank == min(ranks)]

    def able(self, span: Span, run: Run | None) -> list[NodeState]:
        """The DataNodes that may still be asked."""
        failures = run.failures if run is not None else {}
        usable = (key for key in span.place.usable if failures.get(key, 0) < self._tuning.tries)
        return [self._nodes[key] for key in usable]

    def _run_size(self, request: Request, node: NodeState) -> int:
        tuning, least, most = self._tuning, self._tuning.min_run, self._tuning.max_run
        if not node.breaker.closed:
            return least
        streams = min(max(1, tuning.slots * len(request.healthy)), tuning.total)
        if node.rate is not None:
            quick = int(node.rate * tuning.quick_seconds)
            least, most = max(least, min(quick // 4, most)), max(most, min(quick, tuning.long_run))
        return max(least, min(most, request.pending // (2 * streams)))

    def _leaves(self, request: Request, span: Span, node: NodeState, size: int) -> bool:
        """Whether ``node`` had better leave this to others, who would end all that is left sooner."""
        mine = seconds(node, size)
        if not node.breaker.closed or mine * request.rates < request.pending:
            return False  # there is more to do than one transfer takes
        others = [other for other in self.able(span, None) if other is not node and other.breaker.closed]
        if not others:
            return False
        healthy = [other for other in request.healthy if other is not node]
        everything = request.pending + sum(other.bytes for other in healthy)
        theirs = max(
            min(seconds(other, size) for other in others),
            everything / max(1.0, sum(map(rate, healthy))),
        )
        return mine > 1.2 * theirs + 0.01


def rate(node: NodeState) -> float:
    """Bytes a second, a guess while unknown."""
    return node.rate or UNKNOWN


def seconds(node: NodeState, size: int) -> float:
    """Seconds after which ``node`` would have given ``size`` bytes more."""
    return (node.bytes + size) / rate(node)
