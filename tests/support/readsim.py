"""A cluster of DataNodes in virtual time, to see what the read scheduler does with rates, freezes, damage and loss.

`Cluster.run` drives a `bootseer.backends.engine.policy.Scheduler` without threads or bytes; a hundred seconds of it
take less than one. Transfers of one DataNode share its rate evenly, after its latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bootseer.backends.engine.model import Attempt, Outcome, Place, ReadRequest, Relocate
from bootseer.backends.engine.policy import TICK, Scheduler
from bootseer.backends.interface import SLOWEST
from bootseer.errors import BootseerError, DataError, UnavailableError

STEP = 0.002
"""Seconds of virtual time at once."""


@dataclass
class SimNode:
    """``rate`` in bytes a second, ``latency`` in seconds before the first byte of each transfer.

    ``frozen``: (from, to) in seconds, when nothing comes; ``dead_from``: refuses everything from then on; ``changed``:
    (from, rate), another rate from then on.
    """

    rate: float
    latency: float = 0.001
    frozen: tuple[float, float] = (-1.0, -1.0)
    dead_from: float = float("inf")
    changed: tuple[float, float] = (float("inf"), 0.0)

    def rate_at(self, now: float) -> float:
        return self.changed[1] if now >= self.changed[0] else self.rate


@dataclass(eq=False)
class _Transfer:
    attempt: Attempt
    begun: float
    received: int = 0
    exact: float = 0.0

    @property
    def finished(self) -> bool:
        return self.exact >= self.attempt.size

    def cancel(self) -> None:
        """`Cluster` asks the scheduler itself what it cancels."""


@dataclass
class Cluster:
    """``nodes`` by key. ``gone`` and ``corrupt``: (key, place) pairs; ``unsound``: wrong bytes with right checksums.

    ``moves``: what a place's keys become when locations are asked for again. ``link``: bytes a second that the reader's
    own network gives to all transfers together.
    """

    nodes: dict[str, SimNode]
    gone: set[tuple[str, Place]] = field(default_factory=set)
    corrupt: set[tuple[str, Place]] = field(default_factory=set)
    unsound: set[tuple[str, Place]] = field(default_factory=set)
    moves: dict[Place, Sequence[str]] = field(default_factory=dict)
    now: float = 0.0
    deadline: float = 20.0
    link: float = float("inf")
    given: dict[str, float] = field(default_factory=dict)
    relocations: int = 0
    most_flying: int = 0

    def run(
        self, scheduler: Scheduler, arrivals: Sequence[tuple[float, ReadRequest]], *, limit: float = 300.0
    ) -> dict[ReadRequest, float]:
        """Seconds that each request took. `AssertionError` when two attempts share memory, or it does not end."""
        flying: dict[Attempt, _Transfer] = {}
        waiting = sorted(arrivals, key=lambda pair: pair[0])
        began = {request: at for at, request in arrivals}
        ended: dict[ReadRequest, float] = {}
        ticked = self.now
        for key in self.nodes:
            scheduler.node(key, key)
        while waiting or len(ended) < len(began) or flying:
            assert self.now < limit, "it does not end"
            while waiting and waiting[0][0] <= self.now:
                scheduler.submit(waiting.pop(0)[1], self.now)
            if self.now - ticked >= TICK:
                scheduler.tick(self.now)
                ticked = self.now
            for attempt in scheduler.cancels():
                if attempt in flying:
                    del flying[attempt]
                    self._end(scheduler, attempt, Outcome.CANCELLED, None)
            while (doing := scheduler.take(self.now)) is not None:
                if isinstance(doing, Relocate):
                    self._relocate(scheduler, doing)
                else:
                    transfer = _Transfer(doing, self.now)
                    doing.handle = transfer
                    flying[doing] = transfer
            self._check_memory(flying)
            self.most_flying = max(self.most_flying, len(flying))
            for request in began:
                if request.finished and request not in ended:
                    ended[request] = self.now - began[request]
            self._advance(scheduler, flying)
        return ended

    def _advance(self, scheduler: Scheduler, flying: dict[Attempt, _Transfer]) -> None:
        step = STEP if any(self._moving(transfer) for transfer in flying.values()) else TICK
        self.now += step
        by_node: dict[str, list[_Transfer]] = {}
        for transfer in flying.values():
            by_node.setdefault(transfer.attempt.node.key, []).append(transfer)
        offered = sum(
            self.nodes[key].rate_at(self.now) for key, mine in by_node.items() if any(map(self._moving, mine))
        )
        passed = min(1.0, self.link / offered) if offered else 1.0
        for key, mine in by_node.items():
            node = self.nodes[key]
            frozen = node.frozen[0] <= self.now < node.frozen[1]
            for transfer in mine:
                attempt = transfer.attempt
                outcome, error = self._refusal(attempt)
                if self.now >= node.dead_from:
                    outcome, error = Outcome.FAILED, UnavailableError(f"{key} refuses")
                elif self.now - transfer.begun > self._deadline(attempt):
                    outcome, error = Outcome.FAILED, UnavailableError(f"{key} does not answer")
                elif frozen:
                    continue
                elif outcome is not Outcome.REFUSED and self.now - transfer.begun >= node.latency:
                    transfer.exact += passed * node.rate_at(self.now) * step / len(mine)
                    transfer.received = min(int(transfer.exact), attempt.size)
                    if not transfer.finished:
                        continue
                    self.given[key] = self.given.get(key, 0.0) + attempt.size
                elif outcome is not Outcome.REFUSED:
                    continue
                del flying[attempt]
                self._end(scheduler, attempt, outcome, error)

    def _moving(self, transfer: _Transfer) -> bool:
        node = self.nodes[transfer.attempt.node.key]
        return not node.frozen[0] <= self.now < node.frozen[1] and self.now - transfer.begun < self._deadline(
            transfer.attempt
        )

    def _deadline(self, attempt: Attempt) -> float:
        return self.deadline + attempt.size / SLOWEST

    def _refusal(self, attempt: Attempt) -> tuple[Outcome, BootseerError | None]:
        where = attempt.node.key, attempt.place
        if where in self.gone or attempt.node.key not in attempt.place.keys:
            return Outcome.REFUSED, UnavailableError("the replica is gone")
        if where in self.corrupt:
            return (Outcome.CORRUPT if attempt.verify else Outcome.DAMAGED), DataError("damaged")
        if where in self.unsound and attempt.run is not None:
            return Outcome.DAMAGED, DataError("damaged")
        return Outcome.DONE, None

    def _end(self, scheduler: Scheduler, attempt: Attempt, outcome: Outcome, error: BootseerError | None) -> None:
        then = scheduler.ended(attempt, outcome, error, self.now)
        if outcome is Outcome.DAMAGED and not attempt.verify:
            scheduler.confirm(attempt, self.now)
        if then is not None:
            assert then.run.primary is None, "a copy while a transfer writes there"
            scheduler.copied_back(then, self.now)

    def _relocate(self, scheduler: Scheduler, job: Relocate) -> None:
        self.relocations += 1
        for place, keys in self.moves.items():
            if place.file is job.file:
                place.keys = tuple(keys)
        for place in _places(scheduler, job.file):
            place.bad.clear()
        scheduler.relocated(job.file, None, self.now)

    def _check_memory(self, flying: dict[Attempt, _Transfer]) -> None:
        seen: set[tuple[int, int]] = set()
        for attempt in flying:
            if attempt.run is not None and attempt.kind == "primary":
                for part in range(attempt.run.first, attempt.run.last):
                    where = (id(attempt.run.span), part)
                    assert where not in seen, "two transfers into the same memory"
                    seen.add(where)
                assert attempt.run.span.request.touching > 0


def _places(scheduler: Scheduler, file: object) -> set[Place]:
    spans = (span for request in scheduler.requests for span in request.spans)
    return {span.place for span in spans if span.place.file is file}
