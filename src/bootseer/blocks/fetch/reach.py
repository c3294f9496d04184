"""How many blocks a miss fetches without a profile.

Pure policy without threads or clocks: the fetcher calls it under its lock and hands the times in.
"""

from __future__ import annotations

LEAST, MOST = 256 << 10, 8 << 20
"""Bytes. A longest window keeps what nobody may wait for below a second of a link of 100 Mbit/s."""
_TIMES = 2
"""So much longer than for its first byte an answer may take for the rest."""
_FORGET = 0.75
"""What an earlier answer still counts when the next one comes."""


class Reach:
    """As many blocks as come in `_TIMES` the time that an answer takes to begin. Less would be more requests, whose
    answers readers wait for one after the other: a registry takes milliseconds for the first byte. More would keep a
    slow link busy with what no reader waits for."""

    def __init__(self, block_size: int) -> None:
        self._least, self._most = max(1, LEAST // block_size), max(1, MOST // block_size)
        self._answers = self._waited = self._blocks = self._seconds = 0.0

    def answered(self, begin: float, blocks: int, seconds: float) -> int:
        """An answer began after ``begin`` seconds, and its ``blocks`` were here ``seconds`` later. The reach now."""
        sums = self._answers, self._waited, self._blocks, self._seconds
        kept = (_FORGET * one + new for one, new in zip(sums, (1, begin, blocks, seconds), strict=True))
        self._answers, self._waited, self._blocks, self._seconds = kept
        reach = _TIMES * self._waited / self._answers * self._blocks / max(self._seconds, 1e-9)
        return int(min(max(reach, self._least), self._most))
