"""Whether an attempt takes too long, and what is to be done about it: a hedge, or another try elsewhere.

Verdicts only: they change nothing. The scheduler, which holds the lock, does what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bootseer.stripefs.engine.choose import Chooser
from bootseer.stripefs.engine.hedge import Durations
from bootseer.stripefs.engine.nodes import NodeState
from bootseer.stripefs.engine.tuning import Tuning
from bootseer.stripefs.engine.work import Attempt, Run


class Stop(NamedTuple):
    """Nothing comes: its run had better go to others."""

    why: str


class Lone(NamedTuple):
    """Nothing comes, and there are no others."""

    why: str


class Hedge(NamedTuple):
    """The request would wait for it: ``node`` should be asked for the same run."""

    node: NodeState


class Lateness:
    """``durations``: how long transfers took; the scheduler adds to them."""

    def __init__(self, durations: Durations, chooser: Chooser, tuning: Tuning) -> None:
        self._durations, self._chooser, self._tuning = durations, chooser, tuning

    def verdict(self, attempt: Attempt, run: Run, now: float) -> Stop | Lone | Hedge | None:
        """What ``attempt``, one of those at ``run``, needs; None while it is well, or nothing would help."""
        if run.lane.request.over or run.done or run.won is not None:
            return None
        late = self._durations.late(attempt.size)
        if now - attempt.started < late:
            return None
        others = self._others(attempt, run)
        if (quiet := now - attempt.progress_at) > self._stuck(attempt, late):
            if others or run.hedge is not None:
                return Stop(f"nothing came for {quiet:.2g} s")
            if not attempt.quiet:
                return Lone(f"nothing came for {quiet:.2g} s, and there is no other replica")
        if run.hedge is None and attempt.kind == "primary" and others:
            return self._hedge(attempt, run, others, late, now)
        return None

    def _others(self, attempt: Attempt, run: Run) -> list[NodeState]:
        # whoever failed with it, or is trying it now, is no help
        tried = {attempt.node} | {other.node for other in (run.primary, run.hedge) if other is not None}
        return [node for node in self._chooser.able(run.lane, run) if node not in tried and node.breaker.closed]

    def _stuck(self, attempt: Attempt, late: float) -> float:
        """Seconds without a byte after which it is stopped."""
        node = attempt.node
        if not node.breaker.closed:
            return late  # known to be in trouble
        stuck = max(self._tuning.stall, 2 * late)
        if node.rate is not None and attempt.received:
            stuck = max(stuck, 2.5 * self._tuning.batch * node.flying / node.rate)
        return stuck

    def _hedge(self, attempt: Attempt, run: Run, others: Sequence[NodeState], late: float, now: float) -> Hedge | None:
        request = run.lane.request
        free = [node for node in others if node.flying < request.slots + 1]
        if not free:
            return None
        other = min(free, key=lambda node: self._chooser.seconds(node, attempt.size))
        if attempt.received and now - attempt.progress_at < late:
            left = (attempt.size - attempt.received) * (now - attempt.started) / attempt.received
        else:
            left = float("inf")
        self._chooser.healthy(request)
        rates = request.rates - (self._chooser.rate(attempt.node) if attempt.node.breaker.closed else 0.0)
        if left <= max(request.pending / max(rates, 1.0), self._chooser.seconds(other, attempt.size)):
            return None  # the request waits for others, or it would be no sooner
        return Hedge(other)
