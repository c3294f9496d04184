"""A circuit breaker: leaves a server alone that failed, and lets one small probe find out when it is back.

Pure: the caller passes the time and holds a lock.

    closed --failures--> open --time passes, a probe starts--> half-open --it works--> closed
                          ^                                        |
                          +------ it fails: for twice as long -----+
"""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half-open"]

FIRST = 0.25
"""Seconds for which a breaker is open at first; doubled for each failed probe, up to `LONGEST`."""
LONGEST = 15.0
FAILURES = 2
"""Failures in a row that open it; a hard one (frozen, refused) does so alone."""
CALM = 8
"""Successes in a row after which an earlier failure is forgotten, and the next time open is short again."""


class Breaker:
    def __init__(self) -> None:
        self.state: State = "closed"
        self.until = 0.0
        self.failures = 0
        """In all, for `explain`."""
        self._row, self._calm = 0, 0
        self._seconds = FIRST

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    def failed(self, now: float, *, hard: bool = False) -> bool:
        """A transfer failed; True when that opened the breaker."""
        self.failures += 1
        self._row, self._calm = self._row + 1, 0
        if self.state == "closed":
            if not hard and self._row < FAILURES:
                return False
            self._open(now)
            return True
        if self.state == "half-open":
            self._seconds = min(self._seconds * 2, LONGEST)
            self._open(now)
        return False

    def _open(self, now: float) -> None:
        self.state, self.until = "open", now + self._seconds

    def succeeded(self) -> bool:
        """A transfer worked; True when that closed the breaker."""
        self._row, self._calm = 0, self._calm + 1
        if self._calm >= CALM:
            self._seconds = FIRST
        if self.state == "closed":
            return False
        # short quarrels in a row grow longer too: only `CALM` successes reset the time
        self.state, self._seconds = "closed", min(self._seconds * 2, LONGEST)
        self._calm = 1
        return True

    def probe_due(self, now: float) -> bool:
        return self.state == "open" and now >= self.until

    def probe(self) -> None:
        """A probe starts: `failed` or `succeeded` follows, or `forget_probe`."""
        self.state = "half-open"

    def forget_probe(self, now: float) -> None:
        """The probe ended without telling anything."""
        if self.state == "half-open":
            self._open(now)
