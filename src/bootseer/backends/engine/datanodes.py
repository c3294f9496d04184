"""What is known of one DataNode: how fast it has been, what it is doing for us, and whether to ask it. Pure: the caller
passes the time and holds a lock."""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half-open"]

FIRST = 0.25
"""Seconds for which a breaker is open at first; doubled each time it opens again at once, up to `LONGEST`."""
LONGEST = 15.0
FAILURES = 2
"""Failures in a row that open it; a hard one (frozen, refused) does so alone."""


class Breaker:
    """A circuit breaker: a server that failed is left alone, then one transfer finds out whether it is back.

    closed --failures--> open --time passes--> half-open --the transfer works--> closed
                          ^                        |
                          +------ it fails --------+
    """

    def __init__(self) -> None:
        self.state: State = "closed"
        self.until = 0.0
        self._row = 0
        self._seconds = FIRST

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    @property
    def open(self) -> bool:
        return self.state == "open"

    def failed(self, now: float, *, hard: bool = False) -> bool:
        """A transfer failed; True when that opened the breaker."""
        self._row += 1
        if self.open or (self.closed and not hard and self._row < FAILURES):
            return False
        self._seconds = FIRST if self.closed else min(self._seconds * 2, LONGEST)
        self.state, self.until = "open", now + self._seconds
        return True

    def succeeded(self) -> bool:
        """A transfer worked; True when that closed the breaker."""
        self._row = 0
        if self.closed:
            return False
        self.state = "closed"
        return True

    def half_open(self, now: float) -> bool:
        """Whether it was open for long enough, and the next transfer may try."""
        if not self.open or now < self.until:
            return False
        self.state = "half-open"
        return True


WINDOW = 2.0
"""Seconds of transferring over which a rate is measured; older ones fade."""
BULK = 256 << 10
"""Bytes of a transfer from which on it tells about the rate; smaller ones tell about the latency."""
UNKNOWN = 200 << 20
"""Bytes a second that a DataNode is believed to give while none has been measured."""

_ENOUGH = 0.005
"""Seconds of measurement before a rate is believed."""


class NodeState:
    """One DataNode. ``key``: its uuid; ``address``: for messages. ``flying``: transfers under way, ``bulk``: those of
    more than a few bytes, ``bytes``: what they have still to give. ``latency``: seconds that a small transfer takes (a
    moving average), 0 while unknown. ``served``: bytes in all."""

    def __init__(self, key: str, address: str) -> None:
        self.key, self.address = key, address
        self.breaker = Breaker()
        self.flying, self.bulk, self.bytes = 0, 0, 0
        self.latency = 0.0
        self.served = 0
        self._bytes, self._seconds = 0.0, 0.0  # of bulk transfers lately
        self._since: float | None = None  # from when on the time is not counted yet; None while there are none

    def begin(self, size: int, now: float) -> None:
        self.flying += 1
        self.bytes += size
        if size >= BULK:
            self.bulk += 1
            if self.bulk == 1:
                self._since = now

    def credit(self, count: int, size: int, now: float) -> None:
        """``count`` more bytes of a transfer of ``size`` have come."""
        self.bytes -= count
        self.served += count
        if size >= BULK:
            self._settle(now)
            self._bytes += count

    def end(self, size: int, missing: int, now: float) -> None:
        """A transfer of ``size`` bytes is over; ``missing`` of them have not come."""
        self.flying -= 1
        self.bytes -= missing
        if size >= BULK:
            self.bulk -= 1
            if not self.bulk:
                self._settle(now)
                self._since = None

    def took(self, size: int, seconds: float) -> None:
        if size < BULK:
            self.latency = seconds if not self.latency else 0.8 * self.latency + 0.2 * seconds

    def renew(self, now: float) -> None:
        """It works again: what was measured while it did not says nothing."""
        self._bytes = self._seconds = 0.0
        self._since = now if self.bulk else None

    @property
    def rate(self) -> float | None:
        """Bytes a second while something bulky was transferred, None while unknown. At least 1, so that it divides."""
        return max(1.0, self._bytes / self._seconds) if self._seconds >= _ENOUGH else None

    def _settle(self, now: float) -> None:
        if self._since is not None:
            self._seconds += max(0.0, now - self._since)
            self._since = now
        if self._seconds > WINDOW:
            self._bytes *= WINDOW / self._seconds
            self._seconds = WINDOW
