"""What a start fetches ahead: the hot pack as a stream, then what the traces know besides; or a list of blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.fetch.workers import BlockCache
from bootseer.blocks.formats.trace import Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.library import ProfileKey, Target, newest_pack
from bootseer.blocks.profiles.merge import merge
from bootseer.chunks.nodeblocks import NodeBlocks
from bootseer.errors import UnavailableError
from bootseer.objects import Store

log = logging.getLogger(__name__)

STALLED_SECONDS = 60.0
_STREAM_SECONDS = 60.0
"""Traces are looked at after this, also where the stream has not ended."""
_LOOK = 0.2
_END_SECONDS = 2.0
"""Threads that are stuck in a source are waited for so long."""


class Plan(msgspec.Struct, frozen=True):
    """What `begin` set going: the hot blocks in order, the traces they are from, and the key of the hot pack in use."""

    order: list[int] = []
    traces: int = 0
    pack: str = ""


def begin(
    fetcher: Fetcher,
    store: Store,
    key: ProfileKey,
    target: Target,
    *,
    tell: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Start the prefetch of a tree that is being mounted. Raises `BootseerError`, which who calls logs and goes on: a
    profile is advice. ``tell`` hears of the stream when it begins.

    Blocking: one listing and a request before the stream starts, and then for its whole length: loading and merging
    traces takes the interpreter from those who fetch, and what they know comes after the stream anyway. Without a hot
    pack the hot list comes in ranges of the packs; without any profile nothing happens, and a miss fetches its
    window."""
    traces: list[Trace] = []
    found = newest_pack(store, key.prefix(target.tree), target)
    if found is None:
        # A job's own traces say more about it than another job's pack.
        traces = library.load_own(store, target.tree, key, target.map.size)
        for folder in () if traces else key.others(target.tree):
            if (found := newest_pack(store, folder, target)) is not None:
                break
    order: dict[int, None] = {}
    if found is not None:
        pack = found.pack
        order = dict.fromkeys(pack.blocks)
        tell(begun := Plan(list(order), 0, found.key))
        log.info("hot pack of %d blocks, %d bytes: its stream begins", len(pack.blocks), pack.size)
        source = StoreSource(store, found.key)
        fetcher.stream(HotStream(pack.blocks, pack.lengths, pack.base, source, pack.per_frame))
        fetcher.streamed(_STREAM_SECONDS)
        if fetcher.closed:
            return begun
    traces = traces or library.load(store, target.tree, key, target.map.size)
    if traces:
        more = [block for block in merge(traces, target.map) if block not in order]
        fetcher.hot(more)
        order |= dict.fromkeys(more)
    return Plan(list(order), len(traces), found.key if found is not None else "")


def fetch_all(
    store: Store,
    cache: BlockCache,
    wanted: Sequence[int],
    *,
    streams: int = 6,
    stalled: float = STALLED_SECONDS,
    progress: Callable[[int, int], None] | None = None,
    here: NodeBlocks | None = None,
) -> bool:
    """Fetch the blocks ``wanted`` into ``cache``, in this order, those ``here`` from there; False when it could not
    take one. ``progress(done, total)`` counts blocks. Raises `UnavailableError` when nothing came for ``stalled``
    seconds, `DataError` for a block that no source has right, and at once what a source refuses with."""
    # The fetcher keeps a third of its threads for readers, of which there are none.
    threads = streams + max(1, streams // 2)
    fetcher = Fetcher(cache, StoreSource(store, cache.map), streams=threads, deadline=stalled)
    try:
        if here is not None:
            fetcher.known_here(here)
        fetcher.hot(wanted, waited=False)
        seen, since = -1, time.monotonic()
        while not fetcher.wait(_LOOK) and not fetcher.full:
            count = sum(cache.ready[block] for block in wanted)
            if count != seen:
                seen, since = count, time.monotonic()
            elif time.monotonic() - since > stalled:
                raise fetcher.trouble or UnavailableError(
                    f"nothing came from {store.shown} for {stalled:g} s", hint="check that the store answers"
                )
            if fetcher.trouble is not None and not isinstance(fetcher.trouble, UnavailableError):
                raise fetcher.trouble
            if progress is not None:
                progress(count, len(wanted))
        if fetcher.full:
            return False
        for block in wanted:
            if not cache.ready[block]:
                fetcher.demand(block, block)  # it was given up: this says why
        if progress is not None:
            progress(len(wanted), len(wanted))
        return True
    finally:
        fetcher.close(_END_SECONDS)
