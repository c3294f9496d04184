"""When an attempt takes too long, and what is done about it: a hedge (a second attempt elsewhere), or a stop. For HDFS;
other stores have `bootseer.blocks.fetch.watch`. Pure: the caller passes times and holds a lock. `HedgePolicy` only
gives verdicts; the scheduler does what they say."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.backends.engine.assignment import Assignment
from bootseer.backends.engine.datanodes import NodeState
from bootseer.backends.engine.model import Attempt, Run, Tuning

FLOOR = 0.020
"""Seconds before which nothing is hedged."""
FACTOR = 2.0
"""A transfer is late after so many times the 95th percentile."""
SHARE = 0.05
"""Of all bytes, those that may be read twice."""
BURST = 16 << 20
"""Bytes that may be read twice before anything was earned: a process may meet a frozen DataNode at once."""

BACK = 1.0
"""Seconds for which an attempt is waited with that has nobody else to go to but a DataNode that may be back."""

_KEEP, _ENOUGH = 64, 5
_START_LATENCY, _START_RATE = 0.05, 100 << 20


class Durations:
    """How long transfers took of late, by size (in powers of two)."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = {}
        self._p95: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        bucket = size.bit_length()
        self._by_size.setdefault(bucket, deque(maxlen=_KEEP)).append(seconds)
        self._p95.pop(bucket, None)

    def p95(self, size: int) -> float:
        """Seconds within which 95 % of the transfers of ``size`` bytes end; a guess while there are too few."""
        bucket = size.bit_length()
        if (seen := self._quantile(bucket)) is not None:
            return seen
        for distance in range(1, 24):
            if (larger := self._quantile(bucket + distance)) is not None:
                return larger
            if (smaller := self._quantile(bucket - distance)) is not None:
                return smaller * (1 << distance)
        return _START_LATENCY + size / _START_RATE

    def _quantile(self, bucket: int) -> float | None:
        if (known := self._p95.get(bucket)) is not None:
            return known
        seen = self._by_size.get(bucket)
        if seen is None or len(seen) < _ENOUGH:
            return None
        self._p95[bucket] = result = sorted(seen)[int(0.95 * (len(seen) - 1) + 0.5)]
        return result

    def late(self, size: int) -> float:
        """Seconds after which a transfer of ``size`` bytes is late."""
        return max(FLOOR, FACTOR * self.p95(size))


class HedgeBudget:
    """Bytes that may be read twice: `SHARE` of what was read, and `BURST` in advance."""

    def __init__(self) -> None:
        self.left = float(BURST)
        self.spent = 0

    def earn(self, count: int) -> None:
        self.left = min(self.left + count * SHARE, float(BURST))

    def spend(self, count: int) -> bool:
        """Take ``count`` bytes; False when there are not so many."""
        if count > self.left:
            return False
        self.left -= count
        self.spent += count
        return True


class Silence(NamedTuple):
    """Nothing comes, and whether there are others to which its run can go."""

    why: str
    others: bool


class HedgePolicy:
    """``durations``: how long transfers took; the scheduler adds to them."""

    def __init__(self, durations: Durations, chooser: Assignment, tuning: Tuning) -> None:
        self._durations, self._assignment, self._tuning = durations, chooser, tuning

    def verdict(self, attempt: Attempt, run: Run, now: float) -> Silence | NodeState | None:
        """What is to be done about ``attempt``, one of those at ``run``; None while it is well, or nothing would help.
        A `NodeState` should be asked for the same run as well, because the request would wait for ``attempt``."""
        if run.span.request.over or run.done or run.won is not None:
            return None
        late = self._durations.late(attempt.size)
        if now - attempt.started < late:
            return None
        others = self._others(attempt, run, now)
        if (silence := now - attempt.progress_at) > self._stuck(attempt, late):
            if others or run.hedge is not None:
                return Silence(f"nothing came for {silence:.2g} s", others=True)
            if not attempt.silent:
                return Silence(f"nothing came for {silence:.2g} s, and there is no other replica", others=False)
        if run.hedge is None and attempt.kind == "primary" and others:
            return self._hedge(attempt, run, others, late, now)
        return None

    def _others(self, attempt: Attempt, run: Run, now: float) -> list[NodeState]:
        # whoever failed with it, or is trying it now, is no help
        tried = {attempt.node} | {other.node for other in (run.primary, run.hedge) if other is not None}
        able = [node for node in self._assignment.able(run.span, run) if node not in tried]
        if closed := [node for node in able if node.breaker.closed]:
            return closed
        # one that may be back is better than one from which nothing comes
        long = attempt.silent and now - attempt.progress_at > BACK
        return [node for node in able if long and not node.breaker.open and not node.flying]

    def _stuck(self, attempt: Attempt, late: float) -> float:
        """Seconds without a byte after which it is stopped."""
        # one that is known to be in trouble is given less time
        return max(self._tuning.stall, 2 * late) if attempt.node.breaker.closed else late

    def _hedge(
        self, attempt: Attempt, run: Run, others: Sequence[NodeState], late: float, now: float
    ) -> NodeState | None:
        request = run.span.request
        free = [node for node in others if node.flying <= self._tuning.streams]
        if not free:
            return None
        other = min(free, key=lambda node: self._assignment.seconds(node, attempt.size))
        if attempt.received and now - attempt.progress_at < late:
            left = (attempt.size - attempt.received) * (now - attempt.started) / attempt.received
        else:
            left = float("inf")
        self._assignment.healthy(request)
        rates = request.rates - (self._assignment.rate(attempt.node) if attempt.node.breaker.closed else 0.0)
        if left <= max(request.pending / max(rates, 1.0), self._assignment.seconds(other, attempt.size)):
            return None  # the request waits for others, or it would be no sooner
        return other
