"""A source of stored bytes: the packs of one tree in one store, each opened when first needed and after a failure."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.frames import verified
from bootseer.errors import BootseerError, DataError, UnavailableError, from_os_error
from bootseer.objects import Source, Store

log = logging.getLogger(__name__)

_MAX_OPEN = 64
"""Packs open at once, one descriptor or connection each; an image has a pack per layer, a few dozen."""


class _Open:
    """A reader and how many threads read from it. It is closed when none does and it is not kept any more."""

    def __init__(self, reader: Source, store: Store) -> None:
        self.reader, self.store = reader, store
        self.users = 1


class StoreSource:
    """Ranges of the packs of ``blocks``, for several threads. Nothing is opened before the first read: a complete cache
    needs no store. A text instead of a map is the key of one object, which is then pack 0. ``others``: stores that are
    tried before ``store``, as those that later mounts have named. Reads raise `UnavailableError` (worth another try),
    `DataError` (too short) or another `BootseerError` (not worth one)."""

    def __init__(self, store: Store, blocks: BlockMap | str, others: Callable[[], Iterable[Store]] = tuple) -> None:
        self._keys = [blocks] if isinstance(blocks, str) else [pack.key for pack in blocks.packs]
        self._store, self._others = store, others
        self.name = self._shown(0) if len(self._keys) == 1 else store.shown
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._failed: dict[Store, float] = {}
        """When a read last failed there; such a store comes after the others."""
        self._closed = False

    def read(self, pack: int, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset`` of the tree's pack number ``pack``."""
        return b"".join(self.pieces(pack, offset, [length]))

    def pieces(self, pack: int, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
        """What ``pack`` has from ``offset`` on, in pieces of these lengths, as they come; may raise after some."""
        with self._reader(pack) as reader:
            for length, piece in zip(lengths, reader.pieces(offset, lengths), strict=True):
                if len(piece) != length:
                    raise DataError(f"{self._shown(pack)} gave {len(piece)} bytes for {length} at {offset}")
                yield piece

    def original(self, pack: int, offset: int, length: int) -> bytes | None:
        """As `read`, past any mirror; None when there is none."""
        with self._reader(pack) as reader:
            return reader.original(offset, length)

    def _shown(self, pack: int) -> str:
        return f"{self._store.shown}/{self._keys[pack]}"

    @contextmanager
    def _reader(self, pack: int) -> Iterator[Source]:
        """Errors of the system come out as `UnavailableError`. After that or `DataError` the pack is opened anew."""
        one = self._take(pack)
        try:
            try:
                yield one.reader
            except OSError as exc:
                raise UnavailableError(str(from_os_error(exc, f"read {self._shown(pack)}"))) from exc
        except (UnavailableError, DataError):
            with self._lock:
                self._failed[one.store] = time.monotonic()
                if self._open.get(pack) is one:
                    del self._open[pack]
            raise
        finally:
            with self._lock:
                one.users -= 1
                unused = not one.users and self._open.get(pack) is not one
            if unused:
                one.reader.close()

    def _take(self, pack: int) -> _Open:
        with self._lock:
            if self._closed:
                raise UnavailableError(f"source {self.name} is closed")
            if (known := self._open.get(pack)) is not None:
                known.users += 1
                return known
        # Not under the lock: opening may take a while, and other packs must go on. Two threads may both open it.
        one = self._opened(self._keys[pack])
        unused: list[_Open] = []
        with self._lock:
            if not self._closed:
                unused += self._forget(pack)
                self._open[pack] = one
                while len(self._open) > _MAX_OPEN:
                    unused += self._forget(next(iter(self._open)))
        for other in unused:
            other.reader.close()
        return one

    def _opened(self, key: str) -> _Open:
        troubles: list[BootseerError] = []
        for store in sorted((*self._others(), self._store), key=lambda store: self._failed.get(store, 0.0)):
            try:
                return _Open(store.open(key), store)
            except BootseerError as exc:
                troubles.append(exc)
        raise next((one for one in troubles if isinstance(one, UnavailableError)), troubles[-1])

    def _forget(self, pack: int) -> list[_Open]:
        """Under the lock: keep the reader of ``pack`` no more. It, if the caller must close it."""
        one = self._open.pop(pack, None)
        return [one] if one is not None and not one.users else []

    def close(self) -> None:
        """Close what nobody reads from; what a thread is stuck in is closed when it returns, if ever."""
        with self._lock:
            self._closed = True
            unused = [one for pack in list(self._open) for one in self._forget(pack)]
        for one in unused:
            one.reader.close()


def read_block(source: StoreSource, blocks: BlockMap, block: int, count: Callable[[int], None]) -> bytes:
    """The verified bytes of ``block``; ``count(bytes)`` for each answer. A source whose mirror has it wrong is asked
    once more, without the mirror. Raises `DataError` when it is damaged, `UnavailableError` when the source does not
    answer."""
    where = blocks.pack_of[block], blocks.offsets[block], blocks.lengths[block]
    trouble: DataError | None = None
    for read in (source.read, source.original):
        try:
            if (raw := read(*where)) is not None:
                count(len(raw))
                return verified(blocks, block, raw)
        except DataError as exc:
            log.warning("block %d from %s: %s", block, source.name, exc)
            trouble = exc
    raise DataError(f"block {block} is damaged in {source.name}: {trouble}")


def read_run(source: StoreSource, blocks: BlockMap, run: range) -> bytes:
    """The verified bytes of consecutive blocks: in one request where their frames follow one another and come right,
    else block by block. Raises as `read_block`."""
    real = [block for block in run if not blocks.is_zero(block)]
    found: dict[int, bytes] = {}
    if len(real) > 1 and all(adjoin(blocks, left, right) for left, right in itertools.pairwise(real)):
        at, last = blocks.offsets[real[0]], real[-1]
        try:
            raw = memoryview(source.read(blocks.pack_of[last], at, blocks.offsets[last] + blocks.lengths[last] - at))
            for block in real:
                begin = blocks.offsets[block] - at
                found[block] = verified(blocks, block, raw[begin : begin + blocks.lengths[block]])
        except (DataError, UnavailableError) as exc:
            log.info("%s; trying once more", exc)
    for block in real:
        if block not in found:
            found[block] = read_block(source, blocks, block, lambda length: None)
    return b"".join(found.get(block) or bytes(blocks.length_of(block)) for block in run)


def adjoin(blocks: BlockMap, left: int, right: int) -> bool:
    """Whether the frame of block ``right`` follows that of ``left`` in the same pack; both have one."""
    return (
        blocks.offsets[left] + blocks.lengths[left] == blocks.offsets[right]
        and blocks.pack_of[left] == blocks.pack_of[right]
    )
