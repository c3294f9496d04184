"""How many ranges of a hot stream are asked for at once.

Pure bookkeeping without threads; `bootseer.blocks.fetch.stream` calls it.
"""

from __future__ import annotations

MOST = 3
_TRIAL = 0.15
_TRIAL_BYTES = 2 << 20
"""A trial takes so many seconds and bytes, at least."""
_GAIN = 1.25
"""How much quicker one range more at once must be, to be kept."""


class Lanes:
    """One range at once, whose blocks come in their order, unless more are quicker together, as where a store limits
    each connection or one thread cannot decompress what the link brings.

    What seems quicker is compared twice, before and after: the first moments of a stream are slow by themselves, and
    more ranges that bring nothing cost node and store a request for every few MiB.
    """

    def __init__(self) -> None:
        self.count = 1
        self.settled = False
        self._proven = 1
        self._rate = 0.0
        """Of as many as have proven quickest, in the best trial."""
        self._more = 0.0
        """Of one more, when they are to be compared again."""
        self._since: float | None = None
        self._began: float | None = None
        self._bytes = 0

    def came(self, now: float, length: int, flying: int) -> bool:
        """``length`` bytes came, and ``flying`` ranges are on their way that are not stuck. True: that was the end of
        the last trial."""
        if self.settled:
            return False
        if self._began is None:
            self._since = now if self._since is None else self._since
            # Those of the trial before end first; and there may be no thread for as many.
            if flying == self.count or (flying < self.count and now - self._since >= _TRIAL):
                self._began, self._bytes, self._since = now, 0, None
            return False
        self._bytes += length
        seconds = now - self._began
        if seconds >= _TRIAL and self._bytes >= _TRIAL_BYTES:
            self._began = None
            self._tried(self._bytes / seconds)
        return self.settled

    def interrupted(self) -> None:
        """The store did not answer for a while: that trial says nothing."""
        self._began = self._since = None

    def _tried(self, rate: float) -> None:
        if self.count > self._proven:
            self._more = rate
        else:
            self._rate = max(self._rate, rate)
        if self._more == 0.0:
            self.count = self._proven + 1
        elif self._more <= _GAIN * self._rate:
            self.count, self.settled = self._proven, True
        elif self.count > self._proven:
            self.count = self._proven  # again
        else:
            self._proven += 1
            self._rate, self._more = self._more, 0.0
            self.settled = self._proven == MOST
            self.count = min(self._proven + 1, MOST)
