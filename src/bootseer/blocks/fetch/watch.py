"""Seconds until a range that is silent, late or stuck is fetched a second time, and when the hot stream hangs.

Pure policy without threads or clocks: the fetcher calls it under its lock and hands the time in. It is for stores that
are one server: registries and object stores. A store in HDFS has replicas below, which its engine asks long before
(`backends.engine.hedging`, `backends.engine.model.Tuning`)."""

from __future__ import annotations

from bootseer.blocks.fetch.deadlines import BlockRequest
from bootseer.blocks.fetch.queue import Batch, Priority
from bootseer.blocks.fetch.stream import HotStream

_LATE = 1.0
"""Seconds that a reader waits for a block of a prefetch that is under way, before the block is fetched directly: a
range of a healthy store has come by then (8 MiB take 0.07 s over 1 Gbit/s)."""
_SUSPECT = 3.0
"""Seconds without a part of a range (256 KiB at least) after which readers do not wait for it any more; nor does the
hot stream, where other requests have brought `_OTHER_BYTES` since."""
_OTHER_BYTES = 16 << 20
"""Bytes that a store which many nodes share does not bring in that time: it may take seconds for a read of 2 MiB."""
_SILENCE = 10.0
"""Seconds after which the hot stream goes on in any case. To ask a busy store twice makes it slower for all."""


class Flight:
    """A request to the source, for what is left of ``batch``. ``stream``: whose range it is, if any. ``skipped``: the
    stream goes on without it. ``abandoned``: nobody waits for its thread either."""

    def __init__(self, batch: Batch, stream: HotStream | None, now: float, brought: int) -> None:
        self.batch = batch
        self.stream = stream
        self.heard(now, brought)
        self.skipped = self.abandoned = False

    def heard(self, now: float, brought: int) -> None:
        """A part of it came, at first that it was begun; all requests had ``brought`` so many bytes by then."""
        self.since, self.before = now, brought

    def silent(self, now: float) -> bool:
        """Whether it is a range of the stream for which no reader is to wait."""
        return self.stream is not None and now - self.since >= _SUSPECT


class Watch:
    """The requests under way. ``brought``: bytes that all requests have brought. ``deadline``: seconds of a reader."""

    def __init__(self, deadline: float) -> None:
        self.flights: set[Flight] = set()
        self.brought = 0
        self.deadline = deadline

    def flying(self) -> list[Priority]:
        return [flight.batch.priority for flight in self.flights]

    def hung(self, now: float) -> list[Flight]:
        """Ranges that the stream had better go on without."""
        return [flight for flight in self.flights if self._hangs(flight, now)]

    def _hangs(self, flight: Flight, now: float) -> bool:
        patience = _SUSPECT if self.brought - flight.before >= _OTHER_BYTES else _SILENCE
        waits = flight.stream is not None and not flight.skipped
        return waits and now - flight.since >= min(patience, self.deadline / 2)

    def stuck(self, now: float) -> list[Flight]:
        """Those whose threads are not to be waited for."""
        return [flight for flight in self.flights if now - flight.since >= self.deadline]

    def late(self, request: BlockRequest, now: float) -> set[int]:
        """Blocks that a prefetch was to bring, and has not in the time that ``request`` has waited, or will not because
        its range is silent."""
        over = now - request.began >= _LATE
        found: set[int] = set()
        direct: set[int] = set()
        for flight in self.flights:
            if flight.batch.priority is Priority.DEMAND:
                direct.update(flight.batch.blocks)
            elif not flight.skipped and (over or flight.silent(now)):
                found |= request.pending.intersection(flight.batch.blocks)
        return found - direct
