"""The hot stream: how far the hot pack has been fetched, how fast, and when a block of it is due.

Pure bookkeeping without threads; the fetcher calls it under its lock, and its threads do the reading.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from bootseer.blocks.fetcher.queue import STREAM, Batch, Frame, Priority
from bootseer.blocks.fetcher.source import Source

_FIRST_RATE = 100e6
"""Bytes per second believed before the first range came: a reader of the first seconds rather waits a little."""
_SMALLEST = 256 << 10
_LARGEST = 4 << 20
_QUICK = 0.03
_SLOW = 0.12
"""A range should take between these many seconds: longer, and who waits for its first block waits for all of it;
shorter, and the latency of the request shows."""
_WIDEST_GAP = 128 << 10
"""Bytes of frames not wanted any more that are read anyway rather than begin another range."""
_PATIENCE = 30.0
"""Seconds without a range before the rest comes from the packs: an outage hits those, too, and ends."""


class HotStream:
    """Fetches ``blocks`` (each once) in this order. Their frames, of ``per_frame`` blocks and ``lengths`` bytes each,
    follow one another in pack 0 of ``source`` from byte ``base`` on.
    """

    def __init__(
        self, blocks: Sequence[int], lengths: Sequence[int], base: int, source: Source, per_frame: int = 1
    ) -> None:
        self.source = source
        self._blocks = blocks
        self._per_frame = per_frame
        self._starts = array("Q", [base])
        for length in lengths:
            self._starts.append(self._starts[-1] + length)
        self._frame_of = {block: entry // per_frame for entry, block in enumerate(blocks)}
        self._next = 0
        self._flying = 0
        self._segment = 1 << 20
        self._came: deque[tuple[float, int]] = deque(maxlen=8)
        self._trouble: float | None = None

    @property
    def pending(self) -> bool:
        return self._next < len(self._starts) - 1

    @property
    def flying(self) -> bool:
        """Whether ranges are asked for that have not come yet."""
        return self._flying > 0

    def take(self, missing: Callable[[int], bool]) -> Batch | None:
        """The next range with blocks that are ``missing``; None at the end."""
        starts, end = self._starts, len(self._starts) - 1
        while self._next < end and not any(map(missing, self._blocks_of(self._next))):
            self._next += 1
        first = last = at = self._next
        if first == end:
            return None
        offset = starts[first]
        wanted: list[int] = []
        frames: list[Frame] = []
        while at < end and starts[at] - offset < self._segment and starts[at] - starts[last] <= _WIDEST_GAP:
            blocks = self._blocks_of(at)
            if some := list(filter(missing, blocks)):
                wanted += some
                frames.append(Frame(starts[at] - offset, starts[at + 1] - starts[at], blocks))
                last = at + 1
            at += 1
        self._next = last
        length = starts[last] - offset
        if not self._flying and not self._came:
            self._came.append((time.monotonic(), 0))
        self._flying += length
        return Batch(Priority.HOT, wanted, offset, length, STREAM, frames)

    def _blocks_of(self, frame: int) -> Sequence[int]:
        return self._blocks[frame * self._per_frame : (frame + 1) * self._per_frame]

    def came(self, batch: Batch, seconds: float) -> None:
        """A range is in the cache, ``seconds`` after its thread took it."""
        self._flying -= batch.length
        self._trouble = None
        self._came.append((time.monotonic(), batch.length))
        if seconds < _QUICK:
            self._segment = min(2 * self._segment, _LARGEST)
        elif seconds > _SLOW:
            self._segment = max(self._segment // 2, _SMALLEST)

    def put_back(self, batch: Batch) -> bool:
        """The source did not answer. False: for so long by now that the stream is not worth another try."""
        self._flying -= batch.length
        self._came.clear()
        now = time.monotonic()
        if self._trouble is None:
            self._trouble = now
        if batch.blocks:
            self._next = min(self._next, self._frame_of[batch.blocks[0]])
        return now - self._trouble < _PATIENCE

    @property
    def rate(self) -> float:
        """Bytes per second over the last few ranges."""
        if len(self._came) < 2:
            return _FIRST_RATE
        seconds = self._came[-1][0] - self._came[0][0]
        return sum(length for _, length in list(self._came)[1:]) / max(seconds, 1e-3)

    def due(self, block: int) -> float | None:
        """Seconds until ``block`` comes by itself; None when it does not (any more)."""
        frame = self._frame_of.get(block)
        if frame is None or frame < self._next:
            return None
        return (self._starts[frame + 1] - self._starts[self._next] + self._flying) / self.rate

    @property
    def backlog(self) -> float:
        """Seconds until what is asked for by now has come."""
        return self._flying / self.rate

    @property
    def order(self) -> list[int]:
        """All its blocks."""
        return list(self._blocks)

    def abandon(self) -> None:
        """Nothing more comes from it."""
        self._next = len(self._starts) - 1
