"""The read scheduler: which DataNode reads which part of which request next. Pure policy, driven by the engine, which
calls `submit`, `take`, `ended`, `tick` and so on under one lock, with the time. Rules: docs/internals/engine.md."""

from __future__ import annotations

import logging
from collections import deque

from bootseer.backends.engine.assignment import Assignment
from bootseer.backends.engine.datanodes import NodeState
from bootseer.backends.engine.hedging import Durations, HedgeBudget, HedgePolicy
from bootseer.backends.engine.memory import ByteBudget
from bootseer.backends.engine.model import Attempt, CopyBack, Outcome, ReadRequest, Relocate, Run, Tuning, attempt_at
from bootseer.backends.engine.retry import RetryPolicy
from bootseer.errors import BootseerError, UnavailableError

_log = logging.getLogger(__name__)

TICK = 0.010
"""Seconds between two looks."""


class Scheduler:
    """``scratch``: what hedges may hold."""

    def __init__(self, tuning: Tuning | None = None, scratch: ByteBudget | None = None) -> None:
        self.tuning = tuning or Tuning()
        self.nodes: dict[str, NodeState] = {}
        self.durations, self.budget = Durations(), HedgeBudget()
        self._scratch = scratch or ByteBudget(1 << 62)
        self.requests: list[ReadRequest] = []
        self._flying: dict[Attempt, None] = {}
        self._urgent: deque[Attempt] = deque()
        self._cancels: list[Attempt] = []
        # The transfers under way of bulk requests (False) and of small ones (True), and how many of them are silent.
        self._under_way, self._silent = {False: 0, True: 0}, {False: 0, True: 0}
        self.assignment = Assignment(self.nodes, self.tuning)
        self._changed = False  # whether there may be something to take since the last look
        self._hedging = HedgePolicy(self.durations, self.assignment, self.tuning)
        self._retry = RetryPolicy(self.requests, self.assignment, self.tuning, self.fail)
        self.hedged = self.hedges_won = 0

    # -- what the engine asks -------------------------------------------------------------------------------------

    def node(self, key: str, address: str) -> NodeState:
        if (known := self.nodes.get(key)) is None:
            known = self.nodes[key] = NodeState(key, address)
        known.address = address
        return known

    def submit(self, request: ReadRequest, now: float) -> None:
        """Every DataNode of its places must be known (`node`)."""
        if request.over:
            return
        request.progress_at = now
        request.small = request.size <= self.tuning.small
        self.requests.append(request)
        self.assignment.route(request, now)
        self._changed = True
        for span in request.spans:
            if not span.place.usable:
                self._retry.cut_rest(span, now)

    def take(self, now: float) -> Attempt | Relocate | None:
        """The next thing to do, if there is any: start the attempt (and call `ended`), or ask for locations."""
        if (question := self._retry.question(now)) is not None:
            return question
        while self._urgent:
            late = self._urgent.popleft()
            if late in self._flying and not late.cancelled:
                return late
            self.ended(late, Outcome.CANCELLED, None, now)  # its time has passed before it began
        return self._take(now)

    def ended(self, attempt: Attempt, outcome: Outcome, error: BootseerError | None, now: float) -> CopyBack | None:
        """The attempt is over: nothing writes to its memory any more. What is to be done next, before others."""
        if self._flying.pop(attempt, False) is False:
            return None
        self._changed = True
        self._under_way[_small(attempt)] -= 1
        self._set_silent(attempt, False)
        if outcome is Outcome.DONE:
            self._credit(attempt, attempt.size, now)
        node = attempt.node
        node.end(attempt.size, attempt.size - attempt.received, now)
        self._judge(attempt, outcome, error, now)
        run = attempt.run
        if run is None:
            self._scratch.give(attempt.size)
            return None
        request = run.span.request
        request.flying -= attempt.size
        if attempt.kind == "hedge":
            return self._hedge_ended(run, attempt, outcome, error, now)
        request.touching -= 1
        run.primary = None
        if request.over:
            self._discard(run)
            self._finish(request)
            return None
        if outcome is Outcome.DONE:
            if run.won is not None:  # it came in after all
                self._discard(run)
            self._arrived(run, now)
            return None
        if run.won is not None:
            return self._land(run, run.won)
        if outcome is not Outcome.CANCELLED or attempt.rescued:
            self._retry.failed(run, attempt, outcome, error)
        if run.hedge is None:
            self._requeue(run, now)
        return None

    def copied_back(self, landing: CopyBack, now: float) -> None:
        """The bytes of a hedge are in the caller's memory."""
        run, request = landing.run, landing.run.span.request
        request.touching -= 1
        self._scratch.give(run.size)
        run.won = None
        if request.over:
            self._finish(request)
        else:
            self._arrived(run, now)

    def relocated(self, file: object, error: BootseerError | None, now: float) -> None:
        """The places of ``file`` have fresh locations, or that failed."""
        self._changed = True
        self._retry.relocated(file, error, now)

    def tick(self, now: float) -> None:
        """Look at everything under way: what is late, stuck or given up."""
        self._changed = True
        for attempt in list(self._flying):
            if attempt.handle is not None:
                self._credit(attempt, attempt.handle.received, now)
        self.assignment.rates_changed(self.requests, now)
        for node in {node for request in self.requests for node in request.nodes}:
            if node.breaker.half_open(now):
                node.renew(now)  # left alone for long enough: one transfer tries
        for attempt in list(self._flying):
            if attempt.run is not None and not attempt.cancelled:
                self._watch(attempt, attempt.run, now)
        for request in list(self.requests):
            if not request.over and now - request.progress_at > self.tuning.patience:
                self.fail(
                    request,
                    UnavailableError(
                        f"no part of {request.name or 'a read'} has come within {self.tuning.patience:.0f} s",
                        hint="check that the DataNodes run and are reachable from here",
                    ),
                )

    def fail(self, request: ReadRequest, error: BaseException) -> None:
        """Give the request up; it is `finished` when its last attempt has ended."""
        if not request.over:
            request.error, request.over = error, True
            for attempt in self._flying:
                if attempt.run is not None and attempt.run.span.request is request:
                    self._cancel(attempt)
            for span in request.spans:
                for run in span.again:
                    self._discard(run)
        self._finish(request)

    def cancels(self) -> list[Attempt]:
        """Attempts to stop: their transfers are no longer wanted. `ended` follows as for all."""
        found, self._cancels = self._cancels, []
        return found

    def confirm(self, attempt: Attempt, now: float) -> None:
        """Have the DataNode check the replica that ``attempt`` got wrong bytes from, when scratch memory is free."""
        if self._scratch.try_take(attempt.size):
            self._urgent.append(
                self._begin(
                    Attempt("confirm", attempt.node, attempt.place, attempt.offset, attempt.size, None, True), now
                )
            )

    @property
    def busy(self) -> bool:
        """Whether anything is under way or waits."""
        return bool(self.requests or self._flying)

    # -- taking ---------------------------------------------------------------------------------------------------

    def _full(self, small: bool) -> bool:
        """Whether no more transfers may begin. Silent ones keep no others waiting, up to as many again."""
        total = self.tuning.small_total if small else self.tuning.total
        return self._under_way[small] - min(self._silent[small], total) >= total

    def _set_silent(self, attempt: Attempt, silent: bool) -> None:
        """Nothing comes for ``attempt``, or something again."""
        if attempt.silent is not silent:
            attempt.silent = silent
            self._silent[_small(attempt)] += 1 if silent else -1

    def _take(self, now: float) -> Attempt | None:
        """An attempt, begun: a run of a request for a free slot. None when there is nothing to take."""
        for request in sorted(self.requests, key=_turn) if self._changed else ():
            if (attempt := self._take_of(request, now)) is not None:
                return attempt
        self._changed = False
        return None

    def _take_of(self, request: ReadRequest, now: float) -> Attempt | None:
        if request.over or not request.pending or self._full(request.small):
            return None
        slots = self.tuning.streams + (self.tuning.small_slots if request.small else 0)
        for node in sorted(request.nodes, key=lambda node: node.flying):
            if node.breaker.closed:
                if (node.flying if request.small else node.bulk) >= slots:
                    continue
            elif node.flying:
                continue
            if (run := self.assignment.pick(request, node, now)) is not None:
                request.pending -= run.size
                request.flying += run.size
                request.touching += 1
                run.primary = attempt_at("primary", node, run)
                return self._begin(run.primary, now)
        return None

    # -- beginning ------------------------------------------------------------------------------------------------

    def _begin(self, attempt: Attempt, now: float) -> Attempt:
        attempt.started = attempt.progress_at = now
        self._flying[attempt] = None
        self._under_way[_small(attempt)] += 1
        attempt.node.begin(attempt.size, now)
        return attempt

    # -- results --------------------------------------------------------------------------------------------------

    def _credit(self, attempt: Attempt, received: int, now: float) -> None:
        received = min(received, attempt.size)
        if received > attempt.received:
            attempt.node.credit(received - attempt.received, attempt.size, now)
            attempt.received, attempt.progress_at = received, now
            self._set_silent(attempt, False)
            if attempt.run is not None:
                attempt.run.span.request.progress_at = now

    def _judge(self, attempt: Attempt, outcome: Outcome, error: BootseerError | None, now: float) -> None:
        """What the result says of the DataNode."""
        node = attempt.node
        if outcome is Outcome.FAILED:
            self._node_failed(node, now, str(error), hard=not attempt.received)
        elif outcome not in (Outcome.CANCELLED, Outcome.UNASKED):  # it answers
            if outcome is Outcome.DONE and attempt.kind != "confirm":
                self.durations.add(attempt.size, now - attempt.started)
                node.took(attempt.size, now - attempt.started)
            if node.breaker.succeeded():
                _log.info("DataNode %s works again", node.address)
                self._changed = True
                self.assignment.breakers_changed(self.requests, now)
            if outcome is Outcome.CORRUPT or (attempt.verify and outcome in (Outcome.DONE, Outcome.DAMAGED)):
                attempt.place.checksums.seen = True
            if outcome in (Outcome.REFUSED, Outcome.CORRUPT):
                attempt.place.bad[node.key] = outcome
                self._retry.lost(attempt.place, now)
            elif outcome is Outcome.UNCHECKED and node.key not in attempt.place.unchecked:
                attempt.place.unchecked.add(node.key)
                if attempt.place.without_checksums:
                    self._retry.without_checksums(attempt.place)

    def _node_failed(self, node: NodeState, now: float, why: str, *, hard: bool) -> None:
        level = logging.WARNING if node.breaker.closed else logging.DEBUG
        if node.breaker.failed(now, hard=hard):
            _log.log(level, "DataNode %s is left alone for %.2g s: %s", node.address, node.breaker.until - now, why)
            self._changed = True
            self.assignment.breakers_changed(self.requests, now)

    def _hedge_ended(
        self, run: Run, attempt: Attempt, outcome: Outcome, error: BootseerError | None, now: float
    ) -> CopyBack | None:
        request = run.span.request
        run.hedge = None
        if outcome is Outcome.DONE and not run.done and not request.over:
            self.hedges_won += 1
            if run.primary is None:
                return self._land(run, attempt)
            run.won = attempt
            late = run.primary
            _log.debug("%s: DataNode %s was quicker than %s", request.name, attempt.node.address, late.node.address)
            if late.progress_at + self.durations.late(late.size) < now:
                # no hard failure: with a busy client everything is late now and then
                self._node_failed(late.node, now, "another replica was read while nothing came", hard=False)
            self._cancel(late)
            return None
        self._scratch.give(attempt.size)
        if request.over or run.done:
            return None
        if outcome is not Outcome.CANCELLED:
            self._retry.failed(run, attempt, outcome, error)
        if run.primary is None:
            self._requeue(run, now)
        return None

    def _land(self, run: Run, attempt: Attempt) -> CopyBack:
        run.won = attempt
        run.span.request.touching += 1
        return CopyBack(run, attempt)

    def _discard(self, run: Run) -> None:
        """The hedge that won is not needed."""
        if run.won is not None:
            run.won = None
            self._scratch.give(run.size)

    def _arrived(self, run: Run, now: float) -> None:
        """The bytes of ``run`` are in the caller's memory, and right as far as they can be checked alone."""
        run.done, request = True, run.span.request
        if run.hedge is not None:
            self._cancel(run.hedge)
        request.left -= run.size
        request.progress_at = now
        self.budget.earn(run.size)
        if not request.left:
            request.over = True
            self._finish(request)

    def _finish(self, request: ReadRequest) -> None:
        if request.finished and request in self.requests:
            self.requests.remove(request)

    def _requeue(self, run: Run, now: float) -> None:
        self._changed = True
        self._retry.requeue(run, now)

    def _cancel(self, attempt: Attempt) -> None:
        if not attempt.cancelled:
            attempt.cancelled = True
            self._cancels.append(attempt)

    # -- watching -------------------------------------------------------------------------------------------------

    def _watch(self, attempt: Attempt, run: Run, now: float) -> None:
        verdict = self._hedging.verdict(attempt, run, now)
        if isinstance(verdict, NodeState):
            self._hedge(attempt, run, verdict, now)
        elif verdict is not None:
            node = attempt.node
            self._node_failed(node, now, verdict.why, hard=True)
            if verdict.others:
                attempt.rescued = True
                self._cancel(attempt)
            elif attempt.size <= self.tuning.long_run and any(one.silent and one.node is node for one in self._flying):
                self._cancel(attempt)  # one is enough to wait with; this is no failure of the run
            else:
                self._set_silent(attempt, True)
            self._changed = True

    def _hedge(self, attempt: Attempt, run: Run, node: NodeState, now: float) -> None:
        """Ask ``node`` as well, if memory and budget allow it."""
        if not self._scratch.try_take(attempt.size):
            return
        if not self.budget.spend(attempt.size):
            self._scratch.give(attempt.size)
            return
        self.hedged += 1
        run.span.request.flying += attempt.size
        run.hedge = attempt_at("hedge", node, run)
        self._urgent.append(self._begin(run.hedge, now))


def _turn(request: ReadRequest) -> tuple[bool, int, int]:
    """Small requests first, then who has the least under way, then who has had the least so far."""
    return (not request.small, request.flying, request.size - request.pending)


def _small(attempt: Attempt) -> bool:
    return attempt.run is None or attempt.run.span.request.small
