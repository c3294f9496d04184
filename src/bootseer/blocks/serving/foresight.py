"""What a fetcher looks for in the store before it knows the tree's block map: the job's hot pack.

Concurrency: one thread, which ends with what it has found.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from bootseer.blocks.fetcher import hotsearch
from bootseer.blocks.fetcher.hotsearch import Sight
from bootseer.blocks.profiles.profiles import ProfileKey
from bootseer.errors import BootseerError
from bootseer.store import Store

log = logging.getLogger(__name__)


class Foresight:
    """Looks for the hot pack of ``job`` and ``tree`` in the store that ``store`` waits for (None: there is none)."""

    def __init__(self, store: Callable[[], Store | None], tree: str, job: str) -> None:
        self.of = tree, job
        self._found: Future[Sequence[Sight] | None] = Future()
        threading.Thread(target=self._look, args=(store,), name="foresight", daemon=True).start()

    def _look(self, store: Callable[[], Store | None]) -> None:
        tree, job = self.of
        found = None
        try:
            if (met := store()) is not None:
                found = hotsearch.look(met, ProfileKey(job).prefix(tree), head=True)
        except BootseerError as exc:
            log.info("%s", exc)  # who asks instead hears it, too
        except Exception:
            log.exception("looking for the hot pack of tree %s failed", tree[:12])
        self._found.set_result(found)

    def take(self) -> Sequence[Sight] | None:
        """What was found, now the caller's, when it is; None: nobody could look."""
        return self._found.result()

    def close(self) -> None:
        """Nobody wants to know. Does not wait."""

        def end(found: Future[Sequence[Sight] | None]) -> None:
            for sight in found.result() or ():
                sight.close()

        self._found.add_done_callback(end)
