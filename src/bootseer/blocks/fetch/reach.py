"""How many blocks a miss fetches without a profile.

Pure policy without threads or clocks: the fetcher calls it under its lock and hands the times in.
"""

from __future__ import annotations

import math

MOST = 8 << 20
"""Bytes. A longest window keeps what nobody may wait for below a second of a link of 100 Mbit/s."""
_TIMES = 6
"""So many times the least time in which an answer began may be spent on what it brings."""


class Reach:
    """As many blocks as come in `_TIMES` the least time in which an answer began: ``least`` at first, and a multiple of
    it. Less would be more requests, and readers wait for the first byte of each; more would keep a slow link busy with
    what no reader waits for. The least time holds no waiting behind other answers. How fast blocks come is measured
    while answers arrive: a link is idle between them, and looks slow, when misses are few."""

    def __init__(self, block_size: int, least: int) -> None:
        self._least, self._most = least, max(least, MOST // block_size)
        self._begin = math.inf
        self._blocks = self._bytes = self._rest = 0
        self._took = 0.0

    def answered(self, begin: float, rest: int, took: float, blocks: int, length: int) -> int:
        """An answer ended: ``blocks``, in ``length`` bytes, of which the first came after ``begin`` seconds, and the
        last ``rest`` in ``took`` seconds more. The reach now."""
        self._begin = min(self._begin, begin)
        self._blocks += blocks
        self._bytes += length
        self._rest += rest
        self._took += took
        rate = self._rest / self._took if self._took else 0.0
        reach = _TIMES * self._begin * rate * self._blocks / self._bytes
        return int(min(max(reach, self._least), self._most)) // self._least * self._least
