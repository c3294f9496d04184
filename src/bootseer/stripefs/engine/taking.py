"""What a free transfer does next: a run of a request, or a probe of a DataNode that was left alone.

Looking at every request and DataNode after each transfer would cost more than the transfers of small reads, so it is
remembered where there may be something since the last look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from bootseer.stripefs.engine.budget import ByteBudget
from bootseer.stripefs.engine.choose import Chooser
from bootseer.stripefs.engine.nodes import NodeState
from bootseer.stripefs.engine.occupancy import Occupancy
from bootseer.stripefs.engine.tuning import Tuning
from bootseer.stripefs.engine.work import Attempt, Request, attempt_at


class Taking:
    """``begin`` is told of each attempt that is taken, and returns it. Set ``everywhere`` when it may have changed for
    all what can be taken; tell of new requests (`came`) and of DataNodes with a slot that became free (`freed`)."""

    def __init__(
        self,
        requests: list[Request],
        chooser: Chooser,
        occupancy: Occupancy,
        scratch: ByteBudget,
        tuning: Tuning,
        begin: Callable[[Attempt, float], Attempt],
    ) -> None:
        self._requests, self._chooser, self._occupancy = requests, chooser, occupancy
        self._scratch, self._tuning, self._begin = scratch, tuning, begin
        self.everywhere = False
        self._new: deque[Request] = deque()
        self._freed: deque[NodeState] = deque()

    def came(self, request: Request) -> None:
        self._new.append(request)

    def freed(self, node: NodeState) -> None:
        self._freed.append(node)

    def next(self, now: float) -> Attempt | None:
        """The next attempt, begun; None: there is nothing to take."""
        while True:
            if (attempt := self._look(now)) is not None:
                return attempt
            if not self._new and not self._freed and not self.everywhere:
                return None

    def _look(self, now: float) -> Attempt | None:
        """An attempt where there may be one since the last look: anywhere, a new request, a free slot."""
        if self.everywhere:
            for request in sorted(self._requests, key=_turn):
                if (attempt := self._of(request, request.nodes, now)) is not None:
                    return attempt
            self.everywhere = False
            self._new.clear()
            self._freed.clear()
            return self._probe(now)
        while self._new:
            if (attempt := self._of(self._new[0], self._new[0].nodes, now)) is not None:
                return attempt
            self._new.popleft()
        while self._freed:
            node = self._freed[0]
            for request in sorted(self._requests, key=_turn):
                if node.key in request.lanes_of and (attempt := self._of(request, [node], now)) is not None:
                    return attempt
            self._freed.popleft()
        return None

    def _of(self, request: Request, nodes: Sequence[NodeState], now: float) -> Attempt | None:
        if request.over or not request.pending or self._occupancy.full(request.small):
            return None
        slots = request.slots + (self._tuning.small_slots if request.small else 0)
        for node in sorted(nodes, key=lambda node: node.flying) if len(nodes) > 1 else nodes:
            if node.breaker.closed:
                if (node.flying if request.small else node.bulk) >= slots:
                    continue
            elif node.flying:
                continue
            if (run := self._chooser.pick(request, node, now)) is not None:
                request.pending -= run.size
                request.flying += run.size
                request.touching += 1
                run.primary = attempt_at("primary", node, run)
                return self._begin(run.primary, now)
        return None

    def _probe(self, now: float) -> Attempt | None:
        for request in self._requests:
            for node in request.nodes:
                if not node.breaker.probe_due(now):
                    continue
                for lane in request.lanes_of.get(node.key, ()):
                    size = min(self._tuning.probe, lane.starts[-1] - lane.starts[0])
                    if node.key not in lane.place.bad and self._scratch.try_take(size):
                        node.breaker.probe()
                        return self._begin(Attempt("probe", node, lane.place, lane.starts[0], size, None, False), now)
        return None


def _turn(request: Request) -> tuple[bool, int, int, int]:
    """Small requests first, then who has the least under way, then who has had the least so far."""
    return (not request.small, request.flying, request.size - request.pending, request.number)
