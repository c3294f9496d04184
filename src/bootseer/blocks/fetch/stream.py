"""The hot pack as a stream: which of its ranges is read next, and how far each has come. Bookkeeping without threads or
locks: the fetcher calls it under its lock."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from bootseer.blocks.fetch.queue import STREAM, Batch, Frame, Priority
from bootseer.blocks.fetch.source import StoreSource
from bootseer.chunks.bitmap import Ready

_RANGE = 8 << 20
_LEAD = 2 << 20
"""Bytes of a range; and what is left of one when the next is asked for, so that the link is busy while its answer
begins. Two ranges at once all the time bring the blocks that a job needs first at half the speed: 8 % of the readiness
over 1 Gbit/s."""
_WIDEST_GAP = 128 << 10
"""Bytes of frames not wanted any more that are read anyway rather than begin another range."""
_PATIENCE = 30.0
"""Seconds without a range before the rest comes from the packs: an outage hits those, too, and ends."""


class HotStream:
    """Fetches ``blocks`` (each once) in this order. Their frames, of ``per_frame`` blocks and ``lengths`` bytes each,
    follow one another in pack 0 of ``source`` from byte ``base`` on."""

    def __init__(
        self, blocks: Sequence[int], lengths: Sequence[int], base: int, source: StoreSource, per_frame: int = 1
    ) -> None:
        self.source = source
        self.order = blocks
        """All its blocks."""
        self._per_frame = per_frame
        self._starts = array("Q", [base])
        for length in lengths:
            self._starts.append(self._starts[-1] + length)
        self._frame_of = {block: entry // per_frame for entry, block in enumerate(blocks)}
        self._next = 0
        self._left: set[int] = set()
        self._flying: dict[int, int] = {}
        """Ranges that are asked for, by their end: bytes that have not come."""
        self._trouble: float | None = None
        """Since when ranges have failed, and none has brought anything."""
        self.abandoned = False
        self.skipped: list[int] = []
        """Blocks of ranges that it went on without."""

    @property
    def pending(self) -> bool:
        """Whether ranges are left to be asked for."""
        return not self.abandoned and self._next < len(self._starts) - 1

    @property
    def under_way(self) -> bool:
        """Whether ranges are left, or asked for and not at their end."""
        return self.pending or (not self.abandoned and bool(self._flying))

    @property
    def free(self) -> bool:
        """Whether another range may be asked for."""
        return self.pending and len(self._flying) < 2 and sum(self._flying.values()) <= _LEAD

    def take(self, missing: Callable[[int], bool]) -> Batch | None:
        """The next range with blocks that are ``missing``; None at the end. `ended` or `put_back` must follow."""
        starts, end = self._starts, len(self._starts) - 1
        while self._next < end and not any(map(missing, self._blocks_of(self._next))):
            self._next += 1
        first = last = at = self._next
        if first == end:
            return None
        offset = starts[first]
        wanted: list[int] = []
        frames: list[Frame] = []
        while at < end and starts[at] - offset < _RANGE and starts[at] - starts[last] <= _WIDEST_GAP:
            blocks = self._blocks_of(at)
            if some := list(filter(missing, blocks)):
                wanted += some
                frames.append(Frame(starts[at] - offset, starts[at + 1] - starts[at], blocks))
                last = at + 1
            at += 1
        self._next = last
        self._flying[starts[last]] = starts[last] - offset
        return Batch(Priority.HOT, wanted, offset, starts[last] - offset, STREAM, frames)

    def leave(self, here: Ready) -> list[int]:
        """Leave out the frames of which more than half of the blocks are ``here``, and return all their blocks: so it
        brings no more than twice what is not on this node."""
        left: list[int] = []
        for frame in range(len(self._starts) - 1):
            blocks = self._blocks_of(frame)
            if 2 * sum(here[block] for block in blocks) > len(blocks):
                self._left.add(frame)
                left += blocks
        return left

    def _blocks_of(self, frame: int) -> Sequence[int]:
        if frame in self._left:
            return ()
        return self.order[frame * self._per_frame : (frame + 1) * self._per_frame]

    def came(self, batch: Batch, part: Batch) -> None:
        """``part`` of the range ``batch`` came."""
        self._trouble = None
        end = batch.offset + batch.length
        if end in self._flying:
            self._flying[end] = end - part.offset - part.length

    def skip(self, batch: Batch) -> None:
        """The range ``batch`` hangs: go on as if it were at its end. What it still brings is welcome."""
        self.skipped += batch.blocks
        self.ended(batch)

    def ended(self, batch: Batch) -> None:
        """The range ``batch`` came to its end."""
        self._flying.pop(batch.offset + batch.length, None)

    def put_back(self, batch: Batch) -> bool:
        """The range ``batch`` ended early, what is left of its blocks did not come. False: ranges have failed for so
        long by now that the stream is not worth another try."""
        self.ended(batch)
        rest = batch.blocks
        now = time.monotonic()
        if self._trouble is None:
            self._trouble = now
        if rest:
            self._next = min(self._next, self._frame_of[rest[0]])
        return now - self._trouble < _PATIENCE

    def abandon(self) -> None:
        """Ask for no more ranges."""
        self.abandoned = True
