"""Blocks brought from a source without a cache: verified, several at once, in a wanted order, each handed on once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from bootseer.blocks.fetch.source import Source
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.frames import verified
from bootseer.blocks.publish.packs import Progress
from bootseer.errors import DataError, UnavailableError

log = logging.getLogger(__name__)

BATCH = 1 << 20
"""Bytes of data per batch: like the windows of the fetcher, one request per megabyte."""
STALLED_SECONDS = 60.0
_FIRST_DELAY = 0.1
_LAST_DELAY = 5.0


def runs(blocks: BlockMap, order: Iterable[int], size: int = BATCH) -> list[range]:
    """``order`` as runs of consecutive blocks of at most ``size`` bytes; each block once, zero blocks left out."""
    most = max(1, size >> blocks.shift)
    seen = bytearray(blocks.count)
    found: list[range] = []
    for block in order:
        if seen[block] or blocks.is_zero(block):
            continue
        seen[block] = 1
        if found and found[-1].stop == block and len(found[-1]) < most:
            found[-1] = range(found[-1].start, block + 1)
        else:
            found.append(range(block, block + 1))
    return found


def read_run(source: Source, blocks: BlockMap, run: range) -> bytes:
    """The bytes of consecutive blocks, verified. Raises `DataError`, `UnavailableError`."""
    return b"".join(data for part in _adjacent(blocks, run) for data in _read_part(source, blocks, part))


def _adjacent(blocks: BlockMap, run: range) -> Iterator[range]:
    """``run`` cut where its frames do not follow each other in one pack."""
    first = run.start
    for block in run:
        last = block - 1
        follows = (
            block > first
            and not blocks.is_zero(block)
            and not blocks.is_zero(last)
            and blocks.pack_of[block] == blocks.pack_of[last]
            and blocks.offsets[block] == blocks.offsets[last] + blocks.lengths[last]
        )
        if block > first and not follows:
            yield range(first, block)
            first = block
    if run:
        yield range(first, run.stop)


def _read_part(source: Source, blocks: BlockMap, part: range) -> Iterator[bytes]:
    if blocks.is_zero(part.start):
        yield bytes(blocks.length_of(part.start))
        return
    at = blocks.offsets[part.start]
    end = blocks.offsets[part[-1]] + blocks.lengths[part[-1]]
    stored = memoryview(source.read(blocks.pack_of[part.start], at, end - at))
    for block in part:
        begin = blocks.offsets[block] - at
        try:
            data = verified(blocks, block, stored[begin : begin + blocks.lengths[block]])
        except DataError as exc:
            raise DataError(f"block {block} is damaged in {source.name}: {exc}") from None
        yield data


class Pull:
    """Brings ``wanted`` runs with ``streams`` threads and calls ``take(run, data)`` for each, from any of them.

    `run` waits for the end in the calling thread. Transfers are judged by progress: what a source cannot give is asked
    for again, until nothing at all has come for ``stalled`` seconds. Threads are daemons, as one may be stuck for ever
    in a source that never answers; none calls ``take`` after `run` has returned or raised.
    """

    def __init__(
        self,
        source: Source,
        blocks: BlockMap,
        wanted: Sequence[range],
        take: Callable[[range, bytes], None],
        *,
        streams: int = 6,
        stalled: float = STALLED_SECONDS,
    ) -> None:
        self._source = source
        self._blocks = blocks
        self._todo = deque(wanted)
        self._take = take
        self._stalled = stalled
        self._total = sum(self._bytes(run) for run in wanted)
        self._done = 0
        self._left = len(wanted)
        self._taking = 0
        self._moved = time.monotonic()
        self._error: BaseException | None = None
        self._trouble: UnavailableError | None = None
        self._over = False
        self._cond = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name="pull", daemon=True) for _ in range(min(streams, len(wanted)))
        ]

    def run(self, progress: Progress | None = None) -> None:
        """Bring everything; ``progress(done, total)`` counts bytes of data. Raises `UnavailableError`, `DataError`, and
        what ``take`` raises."""
        for thread in self._threads:
            thread.start()
        try:
            while True:
                with self._cond:
                    self._cond.wait_for(lambda: not self._left or self._error is not None, 0.2)
                    done, left, error = self._done, self._left, self._error
                    silent = time.monotonic() - self._moved
                if error is not None:
                    raise error
                if progress is not None:
                    progress(done, self._total)
                if not left:
                    return
                if silent > self._stalled:
                    raise self._trouble or UnavailableError(
                        f"nothing came from {self._source.name} for {self._stalled:g} s",
                        hint="check that the store answers",
                    )
        finally:
            self._end()

    def _end(self) -> None:
        with self._cond:
            self._over = True
            self._cond.notify_all()
            # What is being written ends soon; what is being read may never.
            self._cond.wait_for(lambda: not self._taking, 30.0)

    def _work(self) -> None:
        while True:
            with self._cond:
                if self._over or not self._todo:
                    return
                run = self._todo.popleft()
            try:
                data = self._fetch(run)
                if data is None:
                    return
                if not self._begin():
                    return
                try:
                    self._take(run, data)
                finally:
                    with self._cond:
                        self._taking -= 1
                        self._cond.notify_all()
            except BaseException as exc:
                with self._cond:
                    self._error = self._error or exc
                    self._over = True
                    self._cond.notify_all()
                return
            with self._cond:
                self._moved = time.monotonic()
                self._done += self._bytes(run)
                self._left -= 1
                self._cond.notify_all()

    def _begin(self) -> bool:
        with self._cond:
            if self._over:
                return False
            self._taking += 1
            return True

    def _fetch(self, run: range) -> bytes | None:
        """The bytes of ``run``; None when it is over. A damaged answer gets a second chance, no answer many."""
        delay, damaged = _FIRST_DELAY, False
        while True:
            try:
                return read_run(self._source, self._blocks, run)
            except DataError:
                if damaged:
                    raise
                damaged = True
            except UnavailableError as exc:
                log.info("%s; trying again", exc)
                with self._cond:
                    self._trouble = exc
            with self._cond:
                if self._cond.wait_for(lambda: self._over, delay):
                    return None
            delay = min(2 * delay, _LAST_DELAY)

    def _bytes(self, run: range) -> int:
        return min(self._blocks.size, run.stop << self._blocks.shift) - (run.start << self._blocks.shift)


class BlockReader:
    """Reads of any range of a tree's data straight from a source, for looking at a few files: the last ``keep`` runs
    stay in memory. For one thread."""

    def __init__(self, source: Source, blocks: BlockMap, keep: int = 8) -> None:
        self._source = source
        self._blocks = blocks
        self._keep = keep
        self._held: dict[int, bytes] = {}
        self._per = max(1, BATCH >> blocks.shift)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly the bytes, or fewer at the end of the data. Raises `DataError`, `UnavailableError`."""
        end = min(offset + length, self._blocks.size)
        out = bytearray()
        while offset < end:
            number = (offset >> self._blocks.shift) // self._per
            start = number * self._per << self._blocks.shift
            run = self._run(number)
            out += run[offset - start : end - start]
            offset = start + len(run)
        return bytes(out)

    def _run(self, number: int) -> bytes:
        if (data := self._held.pop(number, None)) is None:
            first = number * self._per
            data = self._read(range(first, min(first + self._per, self._blocks.count)))
        self._held[number] = data
        while len(self._held) > self._keep:
            del self._held[next(iter(self._held))]
        return data

    def _read(self, run: range) -> bytes:
        try:
            return read_run(self._source, self._blocks, run)
        except (DataError, UnavailableError) as exc:
            log.info("%s; trying once more", exc)
            return read_run(self._source, self._blocks, run)
