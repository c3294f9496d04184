"""When a source that did not answer is asked again. Pure policy without threads or clocks: the fetcher calls it under
its lock and hands the time in."""

from __future__ import annotations

import random

from bootseer.errors import BootseerError, UnavailableError

_FIRST = 0.05
_LONGEST = 30.0
"""Seconds that prefetch leaves a store alone which did not answer, doubled until it does."""
_LONGEST_DELAY = 1.0
"""Seconds until what readers wait for is tried again: as long as they have waited, and no longer than this."""
_LONGEST_REST = 30.0


class Pauses:
    """Prefetch pauses for longer and longer, readers are served after what they have waited; and a store that says when
    to come again is asked nothing before."""

    def __init__(self) -> None:
        self.prefetch_from = self.demand_from = 0.0
        self._next = _FIRST

    def answered(self) -> None:
        self._next = _FIRST

    def rest(self, why: BootseerError, now: float) -> None:
        """The source failed with ``why``, which may say for how long it wants to be left alone."""
        self.demand_from = max(self.demand_from, now + rest_of(why))

    def pause(self, now: float) -> float:
        """Prefetch failed. How many seconds it pauses from now on; 0 where it does already."""
        if now < self.prefetch_from:
            return 0.0
        seconds = max(self._next, self.demand_from - now)
        self.prefetch_from = now + self._next
        self._next = min(2 * self._next, _LONGEST)
        return seconds

    @staticmethod
    def again(since: float, now: float) -> float:
        """When to try again what readers have waited for ``since`` then."""
        return now + min(max(now - since, _FIRST), _LONGEST_DELAY)


def rest_of(exc: BootseerError) -> float:
    """Seconds for which the store says in ``exc`` that it wants to be left alone, and a little more: many are told so
    at the same moment. Nobody is believed for longer than half a minute."""
    seconds = exc.retry_after if isinstance(exc, UnavailableError) else None
    return min(seconds, _LONGEST_REST) * random.uniform(1.0, 1.25) if seconds is not None and seconds > 0 else 0.0
