"""When a transfer has taken so long that another replica should be asked too, and how often that may be done.

Pure: the caller passes durations and holds a lock.
"""

from __future__ import annotations

from collections import deque

FLOOR = 0.020
"""Seconds before which nothing is hedged."""
FACTOR = 2.0
"""A transfer is late after so many times the 95th percentile."""
SHARE = 0.05
"""Of all bytes, those that may be read twice."""
BURST = 16 << 20
"""Bytes that may be read twice before anything was earned: a process may meet a frozen DataNode at once."""

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

    def __init__(self, share: float = SHARE, burst: int = BURST) -> None:
        self._share, self._burst = share, burst
        self.left = float(burst)
        self.spent = 0
        """In all, for `explain`."""

    def earn(self, count: int) -> None:
        self.left = min(self.left + count * self._share, float(self._burst))

    def spend(self, count: int) -> bool:
        """Take ``count`` bytes; False when there are not so many."""
        if count > self.left:
            return False
        self.left -= count
        self.spent += count
        return True
