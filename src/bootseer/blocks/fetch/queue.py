"""What to fetch next: demand before hot before background, each as one range of neighbouring frames of one pack. Pure
bookkeeping without threads or clocks; the fetcher calls it under its lock."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import msgspec

from bootseer.blocks.fetch.reach import Reach
from bootseer.blocks.fetch.source import adjoin
from bootseer.chunks.bitmap import Ready
from bootseer.chunks.blockmap import BlockMap

STREAM, HERE = -1, -2
"""In place of a pack's number: the hot pack; other folders of the node cache."""

_HOT_BYTES = 1 << 20
_FILL_BYTES = 4 << 20
"""Of one request, of a hot list and of the background fill."""
_LONGEST_GAP = 64
"""Blocks stored elsewhere (known from another tree, or earlier in this one) that a range may reach over."""


class Priority(enum.IntEnum):
    DEMAND = 0
    HOT = 1
    BACKGROUND = 2


class Frame(NamedTuple):
    """A zstd frame: where it begins in the range of its batch, its length, and the blocks whose bytes it has, one
    after another. Frames of the tree's packs have one block each."""

    start: int
    length: int
    blocks: Sequence[int]


class Batch(msgspec.Struct):
    """``blocks`` that are wanted out of the bytes ``offset .. offset + length`` of ``pack``. ``frames``: those with
    wanted blocks, in stored order. ``pack`` is `STREAM` for a range of the hot pack; a range of any other has no gaps.
    Blocks that are `HERE` have neither frames nor a range."""

    priority: Priority
    blocks: list[int]
    offset: int
    length: int
    pack: int
    frames: list[Frame]

    def parts(self, size: int, first: Set[int] = frozenset()) -> Iterator[Batch]:
        """The range cut between frames, in parts of ``size`` bytes at least, or that end with blocks of ``first``, but
        for the last; gaps between two parts belong to neither."""
        at, taken = 0, 0
        while at < len(self.frames):
            begin, begun = self.frames[at].start, at
            inside: set[int] = set()
            end = begin
            while at < len(self.frames) and end - begin < size:
                end = self.frames[at].start + self.frames[at].length
                hurried = not first.isdisjoint(self.frames[at].blocks)
                inside.update(self.frames[at].blocks)
                at += 1
                if hurried and at < len(self.frames) and first.isdisjoint(self.frames[at].blocks):
                    break
            start = taken
            while taken < len(self.blocks) and self.blocks[taken] in inside:
                taken += 1
            frames = [Frame(frame.start - begin, frame.length, frame.blocks) for frame in self.frames[begun:at]]
            yield Batch(self.priority, self.blocks[start:taken], self.offset + begin, end - begin, self.pack, frames)


class FetchQueue:
    """The blocks of ``map`` that are wanted. A demanded one is fetched with those around it, ``window`` blocks at
    first, then as many as `Reach` says."""

    def __init__(self, blocks: BlockMap, ready: Ready, *, window: int = 1) -> None:
        self._map = blocks
        self._ready = ready
        self.window = window
        """1: there is a profile, or no space."""
        self._least, self._reach = window, Reach(blocks.block_size, window)
        self._in_flight: set[int] = set()
        self._demand: dict[int, float] = {}
        """Block -> time from which on it may be asked for."""
        self._hot: deque[list[int]] = deque()
        self.waited = True
        """Whether readers may wait for blocks of the hot list."""
        self._background = False
        self._prefetches = True
        self._cursor = 0
        self._given_up: set[int] = set()
        self.here: Ready = bytearray(blocks.count)
        """1 for blocks that other folders of the node cache have."""

    def _adjoin(self, left: int, right: int) -> bool:
        """Whether one request brings both blocks."""
        if self.here[left] or self.here[right]:
            return bool(self.here[left] and self.here[right])
        return adjoin(self._map, left, right)

    def _grow(self, block: int, step: int, fits: Callable[[int, int], bool]) -> list[int]:
        """Missing blocks next to ``block`` in the direction ``step`` that come with it; ``fits(block, bytes)``. Zero
        blocks and a few that are stored elsewhere may lie between; those are not taken."""
        lengths = self._map.lengths
        taken: list[int] = []
        each = self._map.block_size if self.here[block] else 0  # frames may be much shorter than their blocks
        size = each or lengths[block]
        edge = block
        at = block + step
        gap = 0
        while 0 <= at < self._map.count and gap <= _LONGEST_GAP:
            if lengths[at] == 0:
                at += step
                continue
            left, right = (edge, at) if step > 0 else (at, edge)
            if not self._adjoin(left, right):
                gap += 1
                at += step
                continue
            size += each or lengths[at]
            if not self.missing(at) or not fits(at, size):
                break
            taken.append(at)
            edge = at
            gap = 0
            at += step
        return taken

    def _batch(self, priority: Priority, blocks: list[int]) -> Batch:
        self._in_flight.update(blocks)
        if self.here[blocks[0]]:
            return Batch(priority, blocks, 0, 0, HERE, [])
        offsets, lengths = self._map.offsets, self._map.lengths
        start = offsets[blocks[0]]
        end = offsets[blocks[-1]] + lengths[blocks[-1]]
        frames = [Frame(offsets[block] - start, lengths[block], (block,)) for block in blocks]
        return Batch(priority, blocks, start, end - start, self._map.pack_of[blocks[0]], frames)

    # -- wishes ------------------------------------------------------------------------------------------------

    def demand(self, block: int, begin: float = 0.0) -> None:
        """A reader waits for ``block``, not to be asked for before ``begin``, unless it is in flight."""
        if self.missing(block):
            self._demand.setdefault(block, begin)

    def hot(self, order: Sequence[int]) -> None:
        """Replace the hot list by blocks in the order in which they will be touched; not after `stop_prefetch`.
        Neighbours are merged in one request when their turn comes within the next few requests anyway."""
        most = _HOT_BYTES if self.waited else _FILL_BYTES
        rank = {block: index for index, block in enumerate(order) if self._map.lengths[block]}
        planned: set[int] = set()
        self._hot.clear()
        if not self._prefetches:
            return
        near = max(16, (16 << 20) // self._map.block_size)
        for index, block in enumerate(order):
            if block in planned or block not in rank or not self.missing(block):
                continue

            def fits(at: int, size: int, limit: int = index + near) -> bool:
                return at not in planned and rank.get(at, limit) < limit and size <= most

            after = self._grow(block, 1, fits)
            run = [block, *after]
            planned.update(run)
            self._hot.append(run)

    def background(self) -> None:
        """Everything else, from the beginning of the file on; not after `stop_prefetch`."""
        self._background = self._prefetches
        self._cursor = 0

    def stop_prefetch(self) -> None:
        """Only demand from now on, block by block (the cache is full)."""
        self._prefetches = False
        self.window = 1
        self._hot.clear()
        self._background = False

    # -- what to do --------------------------------------------------------------------------------------------

    def take_demand(self, now: float) -> Batch | None:
        while (block := next((block for block, begin in self._demand.items() if begin <= now), None)) is not None:
            del self._demand[block]
            if not self.missing(block):
                continue
            low = block - block % min(self._least, self.window)  # for what is before it a reader waits, too
            high = low + self.window

            def fits(at: int, size: int, low: int = low, high: int = high) -> bool:
                return low <= at < high or (at in self._demand and size <= _FILL_BYTES)

            run = [*reversed(self._grow(block, -1, fits)), block, *self._grow(block, 1, fits)]
            for other in run:
                self._demand.pop(other, None)
            return self._batch(Priority.DEMAND, run)
        return None

    def take_hot(self) -> Batch | None:
        """The first gapless part of the first hot run that is still missing; what is behind it stays queued."""
        while self._hot:
            run = self._hot.popleft()
            part: list[int] = []
            for at, block in enumerate(run):
                if self._map.is_zero(block):
                    continue
                if part and not (self.missing(block) and self._adjoin(part[-1], block)):
                    self._hot.appendleft(run[at:])
                    break
                if self.missing(block):
                    part.append(block)
            if part:
                return self._batch(Priority.HOT, part)
        return None

    def take_background(self) -> Batch | None:
        while self._background:
            block = self._ready.find(b"\0", self._cursor)
            if block < 0:
                self._cursor = self._map.count
                return None
            self._cursor = block + 1
            if not self.missing(block) or block in self._given_up:
                continue

            def fits(at: int, size: int) -> bool:
                return at not in self._given_up and size <= _FILL_BYTES

            # The cursor stays: what the run reaches over is next.
            return self._batch(Priority.BACKGROUND, [block, *self._grow(block, 1, fits)])
        return None

    def answered(self, begin: float, rest: int, took: float, blocks: int, length: int) -> None:
        """As `Reach.answered`, of what was demanded."""
        reach = self._reach.answered(begin, rest, took, blocks, length)
        if self.window > 1:
            self.window = reach

    # -- results -----------------------------------------------------------------------------------------------

    def done(self, blocks: Iterable[int]) -> None:
        """Not in flight any more: ready, or failed for good."""
        self._in_flight.difference_update(blocks)

    def give_up(self, block: int) -> None:
        """Damaged in the store: background fill leaves it; a reader may still ask for it."""
        self._given_up.add(block)

    def put_back(
        self, blocks: Sequence[int], priority: Priority, waited_for: Iterable[int], begin: float = 0.0
    ) -> None:
        """What was in flight did not come: blocks that readers wait for become demand, not before ``begin``, the rest
        waits its turn again."""
        self.done(blocks)
        wanted = set(waited_for)
        for block in sorted(wanted):
            self.demand(block, begin)
        rest = [block for block in blocks if block not in wanted]
        if priority is Priority.HOT and rest and self._prefetches:
            self._hot.appendleft(rest)
        elif rest:
            self._cursor = min(self._cursor, rest[0])

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted any more but for what is in flight."""
        return not (self._demand or self._hot or (self._background and self._cursor < self._map.count))

    @property
    def demanded(self) -> int:
        """Demanded blocks that no request is on its way for yet."""
        return len(self._demand)

    def is_demanded(self, block: int) -> bool:
        """Whether ``block`` is demanded, and no request is on its way for it yet."""
        return block in self._demand

    def missing(self, block: int) -> bool:
        """Neither ready nor in flight."""
        return not self._ready[block] and block not in self._in_flight

    def fly(self, blocks: Iterable[int]) -> None:
        """A request for ``blocks`` is on its way that this queue did not give."""
        self._in_flight.update(blocks)
