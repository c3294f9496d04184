"""What a hot start prefetched and did not use, from the traces in the store: its own, and those it prefetched by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.blocks import profiles
from bootseer.blocks.manifest import localize
from bootseer.store import open_store


@contextlib.contextmanager
def judged(store_url: str | None, digest: str, job: str, work: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """Around a hot start of profile ``job``; what it yields says ``waste`` (share of prefetched blocks that were not
    touched) afterwards, or nothing when the start published no trace of its own."""
    assert store_url is not None
    store = open_store(store_url)
    tree = localize(store, digest, work / "profile")
    key = profiles.ProfileKey(job)
    before = profiles.load(store, digest, key, tree.map.size)

    def verdict() -> dict[str, float]:
        known = {trace.encode() for trace in before}
        new = [trace for trace in profiles.load(store, digest, key, tree.map.size) if trace.encode() not in known]
        if not new or not before:
            return {}
        hot = {block for block in profiles.merge(before, tree.map) if not tree.map.is_zero(block)}
        used = profiles.blocks_of(new[0], tree.map).keys()
        return {"waste": round(len(hot - used) / len(hot), 4)}

    yield verdict
