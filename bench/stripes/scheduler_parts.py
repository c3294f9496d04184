"""The parts of the read scheduler that bench/scheduler takes away, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

from bootseer.backends.engine.assignment import Assignment
from bootseer.backends.engine.datanodes import Breaker, NodeState
from bootseer.backends.engine.hedging import Durations, HedgePolicy
from bootseer.backends.engine.model import ReadRequest, Tuning
from bootseer.backends.engine.policy import Scheduler

NONE: Mapping[Any, Any] = MappingProxyType({})


class Part(NamedTuple):
    """``patches``: by (class, name), what takes the place of it; ``tuning``: other sizes and times."""

    name: str
    without: str
    """What happens in its place."""
    patches: Mapping[tuple[type, str], object] = NONE
    tuning: Mapping[str, Any] = NONE

    @contextlib.contextmanager
    def taken_away(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for (holder, name), value in self.patches.items():
                stack.enter_context(mock.patch.object(holder, name, value))
            if self.tuning:
                first = Scheduler.__init__
                tuning = Tuning(**self.tuning)

                def begin(scheduler: Scheduler, given: Tuning | None = None, *more: Any) -> None:
                    first(scheduler, given or tuning, *more)

                stack.enter_context(mock.patch.object(Scheduler, "__init__", begin))
            yield


def _fixed_size(most: int) -> Callable[[Assignment, ReadRequest, NodeState], int]:
    def size(assignment: Assignment, request: ReadRequest, node: NodeState) -> int:
        tuning = assignment._tuning
        streams = max(1, tuning.streams * len(assignment.healthy(request)))
        return max(tuning.min_run, min(most, request.pending // (2 * min(streams, tuning.total))))

    return size


def _no_stop(policy: HedgePolicy, *args: Any) -> Any:
    verdict = _verdict(policy, *args)
    return verdict if isinstance(verdict, NodeState) else None


_verdict = HedgePolicy.verdict

PARTS = [
    Part("plan", "a DataNode takes from the block with most left", {(Assignment, "_plan"): lambda *args: None}),
    Part("replan-rates", "a plan is kept when rates proved wrong", {(Assignment, "_outdated"): lambda *args: False}),
    Part("replan", "the first plan is kept", {(Assignment, "_settled"): lambda *args: False}),
    Part("run-quick", "runs of 4 MiB at most for all", {(Assignment, "_run_size"): _fixed_size(4 << 20)}),
    Part("run-quick-8", "runs of 8 MiB at most for all", {(Assignment, "_run_size"): _fixed_size(8 << 20)}),
    Part("run-end", "runs of 4 MiB until the end", tuning={"min_run": 4 << 20}),
    Part("leave", "no run is left to others", {(Assignment, "_leaves"): lambda *args: False}),
    Part("hedge", "no second request", {(HedgePolicy, "_hedge"): lambda *args: None}),
    Part("stop", "a silent transfer ends with its deadline", {(HedgePolicy, "verdict"): _no_stop}),
    Part("hedge-stop", "neither", {(HedgePolicy, "verdict"): lambda *args: None}),
    Part("breaker", "a DataNode that failed is asked as before", {(Breaker, "failed"): lambda *args, **more: False}),
    Part("small-slots", "small reads have no slots of their own", tuning={"small_slots": 0}),
    Part("small-first", "small reads wait their turn", tuning={"small": 0}),
    Part("durations", "late is a constant of the size",
         {(Durations, "late"): lambda self, size: 0.1 + 2 * size / (100 << 20)}),
    Part("buckets", "late is a larger constant of the size",
         {(Durations, "late"): lambda self, size: 0.1 + 2 * size / (20 << 20)}),
    Part("usual", "an unknown DataNode is believed to give 200 MiB/s",
         {(Assignment, "rate"): lambda self, node: node.rate or float(200 << 20)}),
    Part("silent", "transfers without a byte count as all", {(Scheduler, "_set_silent"): lambda *args: None}),
]  # fmt: skip
