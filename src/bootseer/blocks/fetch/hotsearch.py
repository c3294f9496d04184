"""Finding the hot pack of a job in a store, and the request that its stream begins with.

A pack's index is checked against the tree's block map (`choose`), which takes longer to come than the index does. So
`look` needs no map, and can have asked for the first frames, too, in the same request: they come as soon as the stream
takes them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Sequence

import msgspec

from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.formats import hotpack
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.hotpack import HotPack
from bootseer.errors import BootseerError, DataError
from bootseer.store import ObjectInfo, Store

log = logging.getLogger(__name__)

_FIRST_READ = 256 << 10
"""Header and index of a 2 GB hot set in one request."""
_HEAD = 2 << 20
"""Bytes asked for with the index. What is not read waits in the socket, and no more of it than fits there is under way
beside the block map."""
_WORTH = 256 << 10
"""Bytes read to the end that nobody needs, rather than lose their connection."""


class Head:
    """The object that ``source`` reads, of ``size`` bytes: its first ``length`` come with one request, which is under
    way since this was made; `pieces` from there on, once, and what else is asked for, are reads of ``source``.

    One thread at a time, but for `close`. Raises what `StoreSource.pieces` does.
    """

    def __init__(self, source: StoreSource, size: int, length: int) -> None:
        self.name = source.name
        self.length = min(size, length)
        self._source = source
        self._lock = threading.Lock()
        whole, rest = divmod(self.length, _FIRST_READ)
        lengths = [_FIRST_READ] * whole + [rest] * (rest > 0)
        self._coming: Generator[bytes, None, None] | None = source.pieces(0, lengths)
        self._came = next(self._coming, b"")

    def read(self, pack: int, offset: int, length: int) -> bytes:
        """As `StoreSource.read`."""
        while len(self._came) < min(offset + length, self.length) and self._coming is not None:
            self._came += next(self._coming)
        data = self._came[offset : offset + length]
        missing = length - len(data)
        return data + self._source.read(pack, offset + len(data), missing) if missing else data

    def pieces(self, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
        """As `StoreSource.pieces`."""
        coming = self._take()
        if coming is None or offset + sum(lengths) > self.length:
            if coming is not None:
                coming.close()
            yield from self._source.pieces(offset, lengths)
            return
        with contextlib.closing(coming):
            have, at = bytearray(self._came), offset
            for length in lengths:
                while len(have) < at + length:
                    have += next(coming)
                yield bytes(have[at : at + length])
                at += length
            if self.length - len(have) <= _WORTH:
                with contextlib.suppress(BootseerError):
                    for _ in coming:
                        pass

    def close(self) -> None:
        if (coming := self._take()) is not None:
            coming.close()
        self._source.close()

    def _take(self) -> Generator[bytes, None, None] | None:
        with self._lock:
            coming, self._coming = self._coming, None
        return coming


class Sight(msgspec.Struct, frozen=True):
    """A hot pack whose index nobody has looked at yet, or why it cannot be read."""

    info: ObjectInfo
    index: bytes
    source: StoreSource | Head | None
    trouble: str = ""

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


class Opened(msgspec.Struct, frozen=True):
    """A hot pack in a store. Its ``source`` is to be closed."""

    pack: HotPack
    key: str
    source: StoreSource | Head

    def stream(self) -> HotStream:
        """For `bootseer.blocks.fetch.fetcher.Fetcher.stream`, which then owns ``source``."""
        pack, source = self.pack, self.source
        head = source.length if isinstance(source, Head) else 0
        return HotStream(pack.blocks, pack.lengths, pack.base, source, pack.per_frame, head=head)


def look(store: Store, folder: str, *, head: bool = False) -> list[Sight]:
    """The hot packs in the store folder ``profiles/<tree>/<job>``, to be closed. ``head``: with a `Head` each, where
    the store can stream.

    Raises `BootseerError` when the folder cannot be listed.
    """
    found: list[Sight] = []
    try:
        for info in hotpack.packs_in(store, folder):
            found.append(_see(store, info, head))
    except BaseException:
        for sight in found:
            sight.close()
        raise
    return found


def _see(store: Store, info: ObjectInfo, head: bool) -> Sight:
    plain = StoreSource(store, info.key)
    try:
        source = Head(plain, info.size, _FIRST_READ + _HEAD) if head and plain.streams() else plain
        raw = source.read(0, 0, min(info.size, _FIRST_READ))
        missing = min(hotpack.index_size(*hotpack.shape_of(raw)), info.size) - len(raw)
        if missing > 0:
            raw += source.read(0, len(raw), missing)
        return Sight(info, raw, source)
    except BootseerError as exc:
        plain.close()
        return Sight(info, b"", None, str(exc))


def choose(sights: Sequence[Sight], tree: str, map_digest: str, blocks: BlockMap) -> Opened | None:
    """The newest of ``sights`` that is good for this tree and map; the others are closed, bad ones with a log line."""
    best: Opened | None = None
    for sight in sights:
        found = _understood(sight, tree, map_digest, blocks)
        if found is not None and (best is None or _age(best) < _age(found)):
            best, found = found, best
        if found is not None:
            found.source.close()
    return best


def _understood(sight: Sight, tree: str, map_digest: str, blocks: BlockMap) -> Opened | None:
    try:
        if sight.source is None:
            raise DataError(sight.trouble)
        pack = HotPack.decode(sight.index, sight.info.size, tree, map_digest, blocks)
        return Opened(pack, sight.info.key, sight.source)
    except BootseerError as exc:
        log.warning("ignoring hot pack %s: %s", sight.info.key, exc)
        sight.close()
        return None


def _age(opened: Opened) -> int:
    return hotpack.made_at(opened.pack.created)


def load(store: Store, folder: str, tree: str, map_digest: str, blocks: BlockMap) -> Opened | None:
    """`look`, then `choose`; any trouble is one log line."""
    try:
        return choose(look(store, folder), tree, map_digest, blocks)
    except BootseerError as exc:
        log.warning("cannot look for a hot pack in %s: %s", folder, exc)
        return None
