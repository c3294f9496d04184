"""The prefetch of a fetcher process: the thread that finds hot pack and traces, and what it set going.

Concurrency: one thread, which waits for the store, for the choice of the driver and for the end of the hot stream; the
others look at `Ahead.plan`, which is replaced as a whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence

from bootseer.blocks.cache import inventory
from bootseer.blocks.cache.metadata import LocalTree
from bootseer.blocks.fetch import prefetch
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.hotsearch import Sight
from bootseer.blocks.fetch.prefetch import Plan, Target
from bootseer.blocks.profiles.profiles import ProfileKey
from bootseer.blocks.serving.foresight import Foresight
from bootseer.store import Store

log = logging.getLogger(__name__)


class Ahead:
    """Prefetches ``tree`` by the profile ``key`` (None: nothing) with ``fetcher``; then, with ``fill``, all the rest.

    ``driver`` waits until that is chosen; ``foresight`` may know the hot pack already. What goes wrong is a line in the
    log: then blocks come on demand.
    """

    def __init__(
        self,
        tree: LocalTree,
        store: Store,
        key: ProfileKey | None,
        fetcher: Fetcher,
        driver: Callable[[], str],
        foresight: Foresight | None,
        *,
        fill: bool,
    ) -> None:
        self.plan = Plan()
        """What was set going, as far as it is known by now."""
        self.target = Target(tree.digest, tree.map_digest.hex(), tree.map)
        self.thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._tree, self._store, self._key, self._fetcher = tree, store, key, fetcher
        self._driver = driver
        self._foresight = foresight
        self._foreseen: Collection[str] = ()
        self._fill = fill

    def keep_hot(self, blocks: set[int]) -> None:
        """Remember hot ``blocks`` for when space is short."""
        inventory.keep_hot(self._tree.cache, self._tree.map_digest, self._tree.map.count, blocks)

    def _run(self) -> None:
        try:
            if self._key is not None:
                self._begin(self._key)
            elif self._foresight is not None:
                self._foresight.close()
            if self._fill:
                self._fetcher.background()
        except Exception:
            log.exception("prefetch failed; blocks come on demand")

    def _begin(self, key: ProfileKey) -> None:
        self.plan = prefetch.begin(
            self._fetcher,
            self._store,
            key,
            self.target,
            driver=self._driver,
            tell=self._note,
            seen=lambda: self._seen(key),
        )
        if self.plan.order:
            self.keep_hot(set(self.plan.order))
        plan = self.plan
        how = "foreseen " if plan.pack in self._foreseen else ""
        log.info("%d hot blocks, from %d traces and %shot pack %r", len(plan.order), plan.traces, how, plan.pack)

    def _seen(self, key: ProfileKey) -> Sequence[Sight]:
        if self._foresight is None:
            return ()
        seen = self._foresight.take(self._store, key.prefix(self._tree.digest))
        self._foreseen = {sight.info.key for sight in seen}
        return seen

    def _note(self, plan: Plan) -> None:
        self.plan = plan
