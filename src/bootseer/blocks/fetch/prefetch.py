"""Prefetch by profile: what a start fetches ahead, and the hot pack that it leaves to the next ones.

`begin` runs when a tree is mounted, `renew` after a trace was published. Both log trouble and never raise for it: a
profile is advice.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bootseer import faults
from bootseer.blocks.fetch import hotsearch
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.hotsearch import Opened, Sight
from bootseer.blocks.formats import hotpack, pagelist
from bootseer.blocks.formats.blockmap import BlockMap
from bootseer.blocks.formats.trace import Trace
from bootseer.blocks.profiles import profiles
from bootseer.blocks.profiles.profiles import ProfileKey
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.store import Store

log = logging.getLogger(__name__)

_NEW = 0.01
_OLD = 0.1
"""A hot pack is renewed when more than this share of the hot list is not in it, or of it not in the hot list."""
_THERE = 0.95
"""Share of the hot list that must be in the cache: what is missing would be missing from the pack for good."""
_CLAIM_SECONDS = 900.0
_STREAM_SECONDS = 60.0
"""Traces are looked at after this, also where the stream has not ended."""


class Target(msgspec.Struct, frozen=True):
    """The tree to prefetch for: its digest, that of its block map (both hexadecimal), and the map."""

    tree: str
    map_digest: str
    map: BlockMap


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
    driver: Callable[[], str],
    tell: Callable[[Plan], None] = lambda plan: None,
    seen: Callable[[], Sequence[Sight]] = tuple,
) -> Plan:
    """Start the prefetch: the hot pack as a stream, at once, then what the traces know besides.

    ``driver`` waits until that is chosen, and is asked only when the stream is on its way. ``tell`` hears of the stream
    when it begins. ``seen``: what `hotsearch.look` has found for ``key`` already.
    Blocking: one listing and a request or two before the stream starts, and then for its whole length: loading and
    merging traces takes the interpreter from those who fetch, and what they know comes after the stream anyway. Without
    a hot pack the hot list comes in ranges of the packs; without any profile nothing happens, and a miss fetches its
    window.
    """
    try:
        return _begin(fetcher, store, key, target, driver, tell, seen)
    except BootseerError as exc:
        log.warning("no prefetch of tree %s: %s", target.tree[:12], exc)
    except Exception:
        log.exception("prefetch of tree %s failed; blocks come on demand", target.tree[:12])
    return Plan()


def _begin(
    fetcher: Fetcher,
    store: Store,
    key: ProfileKey,
    target: Target,
    driver: Callable[[], str],
    tell: Callable[[Plan], None],
    seen: Callable[[], Sequence[Sight]],
) -> Plan:
    traces: list[Trace] = []
    opened = hotsearch.choose(seen(), target.tree, target.map_digest, target.map)
    if opened is None:
        opened = _pack_in(key.prefix(target.tree), store, target)
    if opened is None:
        # A job's own traces say more about it than another job's pack.
        traces = profiles.load_own(store, target.tree, key, target.map.size)
        opened = _pack_in(f"profiles/{target.tree}", store, target) if not traces else None
    order: dict[int, None] = {}
    if opened is not None:
        order = dict.fromkeys(opened.pack.blocks)
        tell(begun := Plan(list(order), 0, opened.key))
        fetcher.stream(opened.stream())
        fetcher.streamed(_STREAM_SECONDS)
        if fetcher.closed:
            return begun
    traces = traces or profiles.load(store, target.tree, key, target.map.size)
    if traces:
        more = [block for block in profiles.merge(traces, target.map, driver()) if block not in order]
        fetcher.hot(more)
        order |= dict.fromkeys(more)
    return Plan(list(order), len(traces), opened.key if opened is not None else "")


def _pack_in(folder: str, store: Store, target: Target) -> Opened | None:
    return hotsearch.load(store, folder, target.tree, target.map_digest, target.map)


def renew(
    store: Store,
    key: ProfileKey,
    target: Target,
    cache: hotpack.Ready,
    *,
    driver: str,
    work: Path,
    stop: threading.Event | None = None,
    hurry: threading.Event | None = None,
) -> str:
    """Make and publish a new hot pack where that says something new. Takes a while: give it a thread of its own.

    ``work``: a folder with space for the pack. ``stop`` ends it, ``hurry`` ends its rests. Returns what happened:
    ``published``, ``not needed`` (there is a good one), ``no traces``, ``not ready`` (blocks are missing in the
    cache), ``made elsewhere`` (another node is at it), ``stopped`` or ``failed``.
    """
    path = work / f".hotpack-{uuid.uuid4().hex}"
    try:
        return _renew(store, key, target, cache, driver, path, stop, hurry)
    except BootseerError as exc:
        log.warning("no new hot pack for tree %s: %s", target.tree[:12], exc)
    except Exception:
        log.exception("no new hot pack for tree %s", target.tree[:12])
    finally:
        path.unlink(missing_ok=True)
    return "failed"


def renew_pages(store: Store, key: ProfileKey, target: Target, *, driver: str, meta: Path) -> str:
    """Make and publish the page list of the newest hot pack where it has none that is fresh. Takes a few seconds.

    ``meta``: the tree's metadata. Returns what happened: ``published``, ``not needed``, ``no hot pack``, ``too few
    starts`` (see `pagelist.ENOUGH`), ``made elsewhere``, ``retired`` (the pack, meanwhile) or ``failed``.
    """
    try:
        return _renew_pages(store, key, target, driver, meta)
    except (BootseerError, OSError, ValueError) as exc:
        log.warning("no page list for tree %s: %s", target.tree[:12], exc)
    except Exception:
        log.exception("no page list for tree %s", target.tree[:12])
    return "failed"


def _renew_pages(store: Store, key: ProfileKey, target: Target, driver: str, meta: Path) -> str:
    known = _pack_in(key.prefix(target.tree), store, target)
    if known is None:
        return "no hot pack"
    known.source.close()
    name, claim = hotpack.pages_key(known.key, driver), f"{key.prefix(target.tree)}/pages.claim"
    try:
        if pagelist.load(store, name, target.tree, target.map.size).fresh:
            return "not needed"
    except (NotFoundError, DataError):
        pass  # none, or one to be replaced
    traces = profiles.load_own(store, target.tree, key, target.map.size)
    agreeing = [trace for trace in traces if trace.complete and trace.driver == driver]
    if len(agreeing) < pagelist.ENOUGH:
        return "too few starts"
    if not _claim(store, claim):
        return "made elsewhere"
    try:
        with open(meta, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            pages = pagelist.build(agreeing, driver, target.tree, mapped, time.time_ns())
        faults.point("blocks.pagelist.before-publish")
        if not store.exists(known.key):
            return "retired"
        store.put(name, pages.encode(), overwrite=True)
    finally:
        _unclaim(store, claim)
    return "published"


def _renew(
    store: Store,
    key: ProfileKey,
    target: Target,
    cache: hotpack.Ready,
    driver: str,
    path: Path,
    stop: threading.Event | None,
    hurry: threading.Event | None,
) -> str:
    folder = key.prefix(target.tree)
    traces = profiles.load_own(store, target.tree, key, target.map.size)
    order = [block for block in profiles.merge(traces, target.map, driver) if not target.map.is_zero(block)]
    if not order:
        return "no traces"
    known = _pack_in(folder, store, target)
    if known is not None:
        known.source.close()
        if _covers(known.pack.blocks, order):
            return "not needed"
    if sum(cache.is_ready(block, block) for block in order) < _THERE * len(order):
        return "not ready"
    if not _claim(store, f"{folder}/hot.claim"):
        return "made elsewhere"
    try:
        profiles.trim(store, folder)
        now = time.time_ns()
        pack = hotpack.build(
            cache,
            order,
            path,
            tree=target.tree,
            map_digest=target.map_digest,
            created=now,
            stop=stop,
            hurry=hurry,
        )
        if pack is None:
            return "stopped"
        log.info("hot pack of %d blocks, %d bytes", len(pack.blocks), pack.size)
        hotpack.publish(store, folder, path, pack)
    finally:
        _unclaim(store, f"{folder}/hot.claim")
    return "published"


def _covers(blocks: Sequence[int], order: Sequence[int]) -> bool:
    have, want = set(blocks), set(order)
    return len(want - have) <= _NEW * len(want) and len(have - want) <= _OLD * len(have)


def _claim(store: Store, key: str) -> bool:
    """Of the nodes of one job that end their recording together one makes the pack. A claim is void after a while."""
    now = time.time()
    text = f"{now:.0f}".encode()
    if store.put(key, text):
        return True
    try:
        age = now - float(store.get(key)[:32])
    except ValueError:
        age = _CLAIM_SECONDS
    if abs(age) < _CLAIM_SECONDS:  # clocks differ a little
        return False
    log.warning("taking over the making of a hot pack from a node that did not end it: %s", key)
    store.put(key, text, overwrite=True)
    return True


def _unclaim(store: Store, key: str) -> None:
    try:
        store.delete(key)
    except BootseerError as exc:
        log.warning("cannot remove %s: %s", key, exc)
