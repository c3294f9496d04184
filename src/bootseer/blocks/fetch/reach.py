"""How many blocks a miss fetches without a profile.

Pure policy without threads or clocks: the fetcher calls it under its lock and hands the times in.
"""

from __future__ import annotations

import math

MOST = 8 << 20
"""Bytes. A longest window keeps what nobody may wait for below a second of a link of 100 Mbit/s."""
_TIMES = 6
"""So many times the least time in which an answer began the link may be busy with one."""
_SPAN = 0.25
"""Seconds over which the rate of the link is measured: the first bytes after a pause come faster than it carries."""


class Reach:
    """As many blocks as the link carries in `_TIMES` the least time in which an answer began: ``least`` at first, and a
    multiple of it. Less would be more requests, and readers wait for the first byte of each; more would keep a slow
    link busy with what no reader waits for. The least time holds no waiting behind other answers, and the link is as
    fast as it ever was for a while."""

    def __init__(self, block_size: int, least: int) -> None:
        self._least, self._most = least, max(least, MOST // block_size)
        self._begin = math.inf
        self._rate = 0.0
        self._blocks = self._bytes = 0
        self._since, self._lately = -math.inf, 0

    def answered(self, now: float, begin: float, blocks: int, length: int) -> int:
        """An answer that began after ``begin`` seconds ended: ``blocks``, in ``length`` bytes. The reach now."""
        self._begin = min(self._begin, begin)
        self._blocks += blocks
        self._bytes += length
        self._lately += length
        if (took := now - self._since) >= _SPAN:
            self._rate = max(self._rate, self._lately / took)
            self._since, self._lately = now, 0
        reach = _TIMES * self._begin * self._rate * self._blocks / self._bytes
        return int(min(max(reach, self._least), self._most)) // self._least * self._least
