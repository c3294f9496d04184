"""The prefetch of a fetcher process: the thread that finds hot pack and traces, and what it set going.

Concurrency: one thread, which waits for the store and for the end of the hot stream; the others look at `Ahead.plan`,
which is replaced as a whole.
"""

from __future__ import annotations

import logging
import threading

from bootseer.blocks.cache import inventory
from bootseer.blocks.cache.metadata import LocalTree
from bootseer.blocks.fetch import prefetch
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.prefetch import Plan, Target
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.store import Store

log = logging.getLogger(__name__)


class Ahead:
    """Prefetches ``tree`` by the profile ``key`` (None: nothing) with ``fetcher``; then, with ``fill``, all the rest.

    What goes wrong is a line in the log: then blocks come on demand.
    """

    def __init__(
        self,
        tree: LocalTree,
        store: Store,
        key: ProfileKey | None,
        fetcher: Fetcher,
        *,
        fill: bool,
    ) -> None:
        self.plan = Plan()
        """What was set going, as far as it is known by now."""
        self.target = Target(tree.digest, tree.map_digest.hex(), tree.map)
        self.thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._tree, self._store, self._key, self._fetcher = tree, store, key, fetcher
        self._fill = fill

    def keep_hot(self, blocks: set[int]) -> None:
        """Remember hot ``blocks`` for when space is short."""
        inventory.keep_hot(self._tree.cache, self._tree.map_digest, self._tree.map.count, blocks)

    def _run(self) -> None:
        try:
            if self._key is not None:
                self._begin(self._key)
            if self._fill:
                self._fetcher.background()
        except Exception:
            log.exception("prefetch failed; blocks come on demand")

    def _begin(self, key: ProfileKey) -> None:
        self.plan = prefetch.begin(self._fetcher, self._store, key, self.target, tell=self._note)
        if self.plan.order:
            self.keep_hot(set(self.plan.order))
        plan = self.plan
        log.info("%d hot blocks, from %d traces and hot pack %r", len(plan.order), plan.traces, plan.pack)

    def _note(self, plan: Plan) -> None:
        self.plan = plan
