"""How many transfers are under way, against what one process may have."""

from __future__ import annotations

from bootseer.stripefs.engine.tuning import Tuning
from bootseer.stripefs.engine.work import Attempt


class Occupancy:
    """Transfers of bulk requests and of small ones (probes and confirmations count as small), and how many of each are
    quiet: nothing comes from their DataNodes."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._under_way = {False: 0, True: 0}
        self._quiet = {False: 0, True: 0}

    def full(self, small: bool) -> bool:
        """Whether no more may begin. Quiet ones keep no others waiting, up to as many again."""
        total = self._tuning.small_total if small else self._tuning.total
        return self._under_way[small] - min(self._quiet[small], total) >= total

    @property
    def any_full(self) -> bool:
        return self.full(False) or self.full(True)

    def begin(self, attempt: Attempt) -> None:
        self._under_way[_small(attempt)] += 1

    def end(self, attempt: Attempt) -> None:
        self._under_way[_small(attempt)] -= 1
        self.hush(attempt, False)

    def hush(self, attempt: Attempt, quiet: bool) -> None:
        """Nothing comes for ``attempt``, or something again."""
        if attempt.quiet is not quiet:
            attempt.quiet = quiet
            self._quiet[_small(attempt)] += 1 if quiet else -1


def _small(attempt: Attempt) -> bool:
    return attempt.run is None or attempt.run.lane.request.small
