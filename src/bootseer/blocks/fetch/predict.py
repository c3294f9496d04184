"""The hot set of a tree that nobody has started yet, predicted from starts of its nearest kin in the store: a trace
that says which tree it is from, and a hot pack made of it, where those of recorded starts will lie. It is advice like
these; trouble is a line in the log."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bootseer.blocks.fetch.prefetch import fetch_all
from bootseer.blocks.formats.trace import Trace
from bootseer.blocks.metadata import LocalTree, localize, localize_manifest
from bootseer.blocks.profiles import hotpack_builder, library
from bootseer.blocks.profiles.hotpack_builder import MAX_UNITS
from bootseer.blocks.profiles.layout import layout_of
from bootseer.blocks.profiles.library import ProfileKey, Target
from bootseer.blocks.profiles.merge import blocks_of, merge, select, units_of
from bootseer.blocks.profiles.prediction import Side, predict
from bootseer.blocks.publish.dedup import MAX_TREES
from bootseer.blocks.publish.spool import FOLDER_BYTES
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.cachefile import CacheFile, ReadyBlocks
from bootseer.errors import BootseerError, FullError, UnavailableError, logged
from bootseer.objects import Store

if TYPE_CHECKING:
    from bootseer.oci.spec import Descriptor

log = logging.getLogger(__name__)

_LEAST = 0.5
"""Share of what starts touched that must have a place in the new tree: less is no kin."""
_TRIED = 4
"""Trees with profiles that are looked at."""
_JOBS = 8
"""Profiles of the nearest tree that are predicted from, each unlike the others."""
_READ = 32
"""Profiles that are read for them: those with the newest traces, where the store says when."""
_ALIKE = 0.01
"""Share of what two starts touch that one of them alone touches, up to which their profiles are one."""
_LISTED = _READ * library.LOOKED_AT
"""Objects among which they are looked for."""
_STARTS = 3
"""Starts of each that count, the newest: as many as say something new."""
START_SECONDS = 10.0
"""That a start waits for what is foretold of it, or goes by it: without it has most of its blocks by then."""
_LARGER = 8
"""Times its own metadata that a tree reads of its kin at most: whoever writes to the store may make himself kin."""


def predict_profiles(
    store: Store,
    digest: str,
    kin: Iterable[str],
    *,
    work: Path,
    subject: Descriptor | None = None,
    seconds: float = math.inf,
) -> str:
    """Give the tree ``digest`` the profiles of the first tree of ``kin``, the nearest first, whose starts touched files
    that it has, too. Returns that tree's digest; empty: there is none, or profiles of ``digest`` are there already.
    ``subject``: the image whose tree it is; a registry keeps what is published with it. ``work``: a folder with space
    for the metadata of both and for the hot blocks. What takes longer than ``seconds`` is left, but for the request
    that is under way; trouble is a line in the log."""
    in_time = _limit(seconds)
    with _as_advice(digest), store.batch(subject=subject):
        found = _foretold(store, digest, kin, work, in_time)
        if found is not None:
            _publish(store, found, work)
            return found.other
    return ""


def predict_blocks(store: Store, digest: str, kin: Iterable[str], key: ProfileKey, *, cache_dir: Path) -> list[int]:
    """The blocks that a start of the tree ``digest`` by ``key`` is likely to touch, in order, as `predict_profiles`
    foretells them now: for a start that has no profile. Nothing is published, as that start is recorded itself; trouble
    is a line in the log, as is what takes longer than `START_SECONDS`."""
    in_time = _limit(START_SECONDS)
    with _as_advice(digest):
        found = _foretold(store, digest, kin, cache_dir, in_time, key.folder)
        in_time()
        if found is not None:
            return merge(list(found.traces.values()), found.tree.map)
    return []


def _limit(seconds: float) -> Callable[[], None]:
    """Raises `UnavailableError` when it is called after so many ``seconds``."""
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > until:
            raise UnavailableError(f"it takes longer than {seconds:g} s")

    return look


@contextlib.contextmanager
def _as_advice(digest: str) -> Iterator[None]:
    try:
        yield
    except (BootseerError, OSError, ValueError) as exc:
        log.warning("no profile is predicted for tree %s: %s", digest[:12], exc)
    except Exception:
        log.exception("no profile is predicted for tree %s", digest[:12])


class _Foretold(NamedTuple):
    """A tree, the one it is foretold from, a trace by job, and what raises when it is late."""

    tree: LocalTree
    other: str
    traces: dict[str, Trace]
    in_time: Callable[[], None]


def _with_traces(store: Store, trees: Iterable[str], in_time: Callable[[], None]) -> Iterator[str]:
    for one in trees:
        in_time()
        if library.has_traces(store, f"profiles/{one}"):
            yield one


def _foretold(
    store: Store, digest: str, kin: Iterable[str], work: Path, in_time: Callable[[], None], own: str = ""
) -> _Foretold | None:
    """From the first tree of ``kin`` that is near enough; of that the profile ``own`` alone, if it has that."""
    if library.has_traces(store, f"profiles/{digest}"):
        return None
    tree: LocalTree | None = None
    some = itertools.islice((one for one in kin if one != digest), MAX_TREES)
    for other in itertools.islice(_with_traces(store, some, in_time), _TRIED):
        tree = tree or localize(store, digest, work)
        if localize_manifest(store, other, work).manifest.meta.size > _LARGER * tree.manifest.meta.size:
            log.info("tree %s has too much metadata to foretell starts of tree %s", other[:12], digest[:12])
            continue
        in_time()
        old = localize(store, other, work)
        new_side = Side(digest, tree.map, layout_of(tree.meta))
        if found := _predictions(store, Side(other, old.map, layout_of(old.meta)), new_side, own, in_time):
            log.info("%d profiles of tree %s predicted from tree %s", len(found), digest[:12], other[:12])
            return _Foretold(tree, other, found, in_time)
    return None


def _predictions(store: Store, old: Side, new: Side, own: str, in_time: Callable[[], None]) -> dict[str, Trace]:
    """The predicted trace of the job ``own`` of ``old``; without such a profile those of the jobs that were started
    last, as far as they are near enough and unlike those before: who has none takes what another has. A start does not
    wait for more than `_JOBS`."""
    jobs = {own: 0.0} if own and library.has_traces(store, f"profiles/{old.tree}/{own}") else {}
    for info in itertools.islice(store.list(f"profiles/{old.tree}"), 0 if jobs else _LISTED):
        parts = info.key.split("/")
        if len(parts) == 4 and info.key.endswith(".trace"):
            jobs[parts[2]] = max(info.mtime, jobs.get(parts[2], 0.0))
    began, found, unlike = int(time.time()), dict[str, Trace](), list[set[int]]()
    for job in sorted(jobs, key=lambda job: -jobs[job])[: _JOBS if own else _READ]:
        in_time()
        known = [
            trace
            for trace in library.load_own(store, old.tree, ProfileKey(job), old.map.size)
            if sum(touch.count for touch in trace.touches) <= MAX_UNITS
        ]
        newest = sorted(select(known), key=lambda trace: -trace.began)[:_STARTS]
        if newest:
            one = predict(newest, old, new, began=began)
            if one.share >= _LEAST and one.trace.touches:
                units = set(units_of(one.trace))
                if all(len(units ^ other) > _ALIKE * len(units | other) for other in unlike):
                    unlike.append(units)
                    found[job] = one.trace
        if len(found) == _JOBS:
            break
    return found


def _publish(store: Store, found: _Foretold, work: Path) -> None:
    """Hot packs first: a profile with a trace is predicted no more."""
    tree, traces = found.tree, found.traces
    needed = sorted({block for trace in traces.values() for block in blocks_of(trace, tree.map)})
    if sum(map(tree.map.length_of, needed)) > FOLDER_BYTES:
        log.info("no hot pack is made of the prediction: it has %d blocks", len(needed))
    else:
        with logged(log.warning, "no hot pack is made of the prediction", kinds=(UnavailableError, FullError)):
            _packs(store, found, needed, work)
    for job, trace in traces.items():
        raw = trace.encode()
        store.put(f"{ProfileKey(job).prefix(tree.digest)}/{hashing.hexdigest(raw)}.trace", raw)


def _packs(store: Store, found: _Foretold, needed: Sequence[int], work: Path) -> None:
    tree = found.tree
    target = Target(tree.digest, tree.map_digest.hex(), tree.map)
    with CacheFile.open(tree.cache, tree.map, tree.map_digest) as cache:
        if not fetch_all(store, cache, needed, progress=lambda *_: found.in_time()):
            raise FullError(f"no space for the hot blocks of tree {tree.digest[:12]} in {work}")
        with contextlib.closing(cache.blocks_now()) as ready:
            for job, trace in found.traces.items():
                found.in_time()
                _pack(store, ProfileKey(job).prefix(tree.digest), merge([trace], tree.map), ready, target, work)


def _pack(
    store: Store, folder: str, order: Sequence[int], ready: ReadyBlocks[BlockMap], target: Target, work: Path
) -> None:
    stop, hurry = threading.Event(), threading.Event()
    hurry.set()  # somebody waits for the conversion
    path = work / f".hotpack-{uuid.uuid4().hex}"
    try:
        pack = hotpack_builder.build(ready, order, path, target, created=time.time_ns(), stop=stop, hurry=hurry)
        if pack is not None:
            hotpack_builder.publish(store, folder, path, pack, target)
    finally:
        path.unlink(missing_ok=True)
