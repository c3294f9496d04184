"""The hot stream: how far the hot pack has been fetched, how fast, and when a block of it is due.

Pure bookkeeping without threads; the fetcher calls it under its lock, and its threads do the reading.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from bootseer.blocks.fetch.lanes import MOST, Lanes
from bootseer.blocks.fetch.queue import STREAM, Batch, Frame, Priority

log = logging.getLogger(__name__)

_FIRST_RATE = 100e6
"""Bytes per second believed before the first bytes came: a reader of the first seconds rather waits a little."""
_ALONE = 16 << 20
_BESIDE = 4 << 20
"""Bytes of a range that comes alone, in its order; and of one beside others, which share the way with it and so keep
the blocks at its head waiting."""
_FIRST = 1 << 20
_SPAN = 0.5
"""Bytes of the first range, whose time nobody knows; and seconds that another one may take by the rate of late."""
_LEAD = 0.02
"""Seconds before the end of a range when the next one is asked for, half of it at most: what a request takes until its
answer begins."""
_STUCK = 1.0
_STUCK_FIRST = 5.0
"""Seconds without news after which a range keeps the next one waiting no more, at least; while no rate is known."""
_PART = 256 << 10
"""Bytes that are landed at once, at least: no reader waits for more than the frames that came with its own."""
_WIDEST_GAP = 128 << 10
"""Bytes of frames not wanted any more that are read anyway rather than begin another range."""
_PATIENCE = 30.0
"""Seconds without a range before the rest comes from the packs: an outage hits those, too, and ends."""
_RECENT = 64


class Pieces(Protocol):
    """Where a hot pack is read: `bootseer.blocks.fetch.source.StoreSource`."""

    name: str

    def pieces(self, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]: ...

    def close(self) -> None: ...


class HotStream:
    """Fetches ``blocks`` (each once) in this order. Their frames, of ``per_frame`` blocks and ``lengths`` bytes each,
    follow one another in pack 0 of ``source`` from byte ``base`` on. Those before byte ``head`` have been asked for
    already: they are one range, and what waits of them says nothing of the rate.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        lengths: Sequence[int],
        base: int,
        source: Pieces,
        per_frame: int = 1,
        *,
        head: int = 0,
    ) -> None:
        self.source = source
        self._head = head
        self._blocks = blocks
        self._per_frame = per_frame
        self._starts = array("Q", [base])
        for length in lengths:
            self._starts.append(self._starts[-1] + length)
        self._part = _PART + max(lengths, default=0)  # bytes at most
        self._frame_of = {block: entry // per_frame for entry, block in enumerate(blocks)}
        self._next = 0
        self._flying: dict[int, tuple[int, float]] = {}
        """Ranges under way, by their ends: from where on they have not come, and when they last got on."""
        self._came: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._trouble: float | None = None
        self.lanes = Lanes()

    @property
    def pending(self) -> bool:
        return self._next < len(self._starts) - 1

    @property
    def flying(self) -> bool:
        """Whether ranges are asked for that have not come yet."""
        return bool(self._flying)

    @property
    def room(self) -> bool:
        """Whether another range may be asked for."""
        lead = 0.0
        if self._known and self._flying:
            lead = min(_LEAD * self.rate / len(self._flying), self._size / 2)
        return len(self._flying) <= MOST and self._busy(time.monotonic(), lead) < self.lanes.count

    def _busy(self, now: float, lead: float = 0.0) -> int:
        """Ranges under way with more than ``lead`` bytes to come, but for those that are stuck."""
        stuck = _STUCK_FIRST
        if self._known:
            # On a slow link a part takes longer than a second, and others beside it longer still.
            stuck = max(_STUCK, 3 * self._part * len(self._flying) / self.rate)
        return sum(
            end - at > lead and now - since < stuck and (self._known or end > self._head)
            for end, (at, since) in self._flying.items()
        )

    @property
    def _size(self) -> int:
        """Bytes of the next range."""
        if not self._known:
            return _FIRST
        size = _ALONE if self.lanes.settled and self.lanes.count == 1 else _BESIDE
        return max(min(size, int(_SPAN * self.rate)), _PART)

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
        size = self._size
        if begun := starts[at + 1] <= self._head:
            size = starts[bisect.bisect_right(starts, self._head) - 1] - offset
        while at < end and starts[at] - offset < size and starts[at] - starts[last] <= _WIDEST_GAP:
            blocks = self._blocks_of(at)
            if some := list(filter(missing, blocks)):
                wanted += some
                frames.append(Frame(starts[at] - offset, starts[at + 1] - starts[at], blocks))
                last = at + 1
            at += 1
        self._next = last
        if begun:
            self._head = starts[last]  # the rest of it is not taken
        length = starts[last] - offset
        now = time.monotonic()
        if not self._flying and not self._came:
            self._came.append((now, 0))
        self._flying[offset + length] = offset, now
        return Batch(Priority.HOT, wanted, offset, length, STREAM, frames)

    def _blocks_of(self, frame: int) -> Sequence[int]:
        return self._blocks[frame * self._per_frame : (frame + 1) * self._per_frame]

    def parts(self, batch: Batch) -> Generator[tuple[Batch, bytes], None, None]:
        """Read the range: its parts with their bytes, as they come. Raises as `Pieces.pieces`. Not under a lock."""
        parts: list[Batch | None] = []
        lengths: list[int] = []
        at = batch.offset
        for part in batch.parts(_PART):
            if part.offset > at:
                parts.append(None)
                lengths.append(part.offset - at)
            parts.append(part)
            lengths.append(part.length)
            at = part.offset + part.length
        with contextlib.closing(self.source.pieces(batch.offset, lengths)) as pieces:
            for this, raw in zip(parts, pieces, strict=True):
                if this is not None:
                    yield this, raw

    def came(self, batch: Batch, part: Batch) -> None:
        """``part`` of a range is in the cache."""
        now, end, upto = time.monotonic(), batch.offset + batch.length, part.offset + part.length
        at, _ = self._flying.pop(end, (upto, now))
        if upto < end:
            self._flying[end] = upto, now
        self._trouble = None
        if upto > self._head:
            self._came.append((now, upto - at))
            if self.lanes.came(now, upto - at, self._busy(now)):
                log.info("hot pack: ranges at once from now on: %d (%.0f MB/s)", self.lanes.count, self.rate / 1e6)
        elif not self._known:
            self._came.clear()
            self._came.append((now, 0))

    def put_back(self, batch: Batch) -> bool:
        """The source did not answer. False: for so long by now that the stream is not worth another try."""
        self._flying.pop(batch.offset + batch.length, None)
        self._came.clear()
        self._head = 0
        self.lanes.interrupted()
        now = time.monotonic()
        if self._trouble is None:
            self._trouble = now
        if batch.blocks:
            self._next = min(self._next, self._frame_of[batch.blocks[0]])
        return now - self._trouble < _PATIENCE

    @property
    def _known(self) -> bool:
        return len(self._came) > 1

    @property
    def rate(self) -> float:
        """Bytes per second of late."""
        if not self._known:
            return _FIRST_RATE
        seconds = self._came[-1][0] - self._came[0][0]
        return max(sum(length for _, length in list(self._came)[1:]) / max(seconds, 1e-3), 1.0)

    def due(self, block: int) -> float | None:
        """Seconds until ``block`` comes by itself; None when it does not (any more)."""
        frame = self._frame_of.get(block)
        if frame is None:
            return None
        upto = self._starts[frame + 1]
        if frame >= self._next:
            ahead = upto - self._starts[self._next] + sum(end - at for end, (at, _) in self._flying.items())
            return ahead / self.rate
        for end, (at, _) in self._flying.items():
            if at < upto <= end:
                return (upto - at) * len(self._flying) / self.rate
        return None

    @property
    def order(self) -> list[int]:
        """All its blocks."""
        return list(self._blocks)

    def abandon(self) -> None:
        """Nothing more comes from it."""
        self._next = len(self._starts) - 1
