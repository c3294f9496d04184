"""What a fetcher looks for in the store before it knows the tree's block map: the job's hot pack.

Concurrency: one thread per look. Under the lock: what was found, until somebody takes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from bootseer.blocks.fetch import hotsearch
from bootseer.blocks.fetch.hotsearch import Sight
from bootseer.errors import BootseerError
from bootseer.store import Store

log = logging.getLogger(__name__)

_KEPT = 30.0
"""Seconds for which what was found is kept open: the tree may come from a server that runs already."""
_PATIENCE = 5.0
"""Seconds that the start of a prefetch waits for a look that began before it."""


class Foresight:
    """Looks for hot packs in the store folder ``folder`` of the store that ``store`` waits for (None: there is none).

    Advice: what goes wrong is a log line of who takes it, which then looks for itself.
    """

    def __init__(self, store: Callable[[], Store | None], folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._found: Sequence[Sight] = ()
        self._store: Store | None = None
        self._trouble: BaseException | None = None
        self._looked = threading.Event()
        self._over = threading.Event()
        threading.Thread(target=self._look, args=(store,), name="foresight", daemon=True).start()

    def _look(self, store_for: Callable[[], Store | None]) -> None:
        found: Sequence[Sight] = ()
        try:
            if (store := store_for()) is not None:
                found = hotsearch.look(store, self._folder, head=True)
                self._store = store
        except Exception as exc:
            self._trouble = exc
        with self._lock:
            if not self._over.is_set():
                self._found, found = found, ()
        for sight in found:
            sight.close()
        self._looked.set()
        self._over.wait(_KEPT)
        self.close()

    def take(self, store: Store, folder: str) -> Sequence[Sight]:
        """What was found, now the caller's; nothing where another store or folder was looked at, or that takes long."""
        if folder == self._folder and self._looked.wait(_PATIENCE) and store is self._store:
            with self._lock:
                found, self._found = self._found, ()
                self._over.set()
            return found
        if self._trouble is not None:
            expected = isinstance(self._trouble, BootseerError)
            log.info("nothing foreseen: %s", self._trouble, exc_info=None if expected else self._trouble)
        self.close()
        return ()

    def close(self) -> None:
        """Nobody wants to know. Does not wait."""
        with self._lock:
            found, self._found = self._found, ()
            self._over.set()
        for sight in found:
            sight.close()
