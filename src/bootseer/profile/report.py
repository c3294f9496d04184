"""What the analysis of one start-up says: plain records, printed by ``profile show --json`` as they are. Times in
seconds. Definitions: ``docs/reference/definitions.md``."""

from __future__ import annotations

from math import inf

import msgspec

from bootseer.profile.events import AttrValue


class Cell(msgspec.Struct, frozen=True):
    """One stage on one node. ``own``: of the slowest rank; None when no span of it is DONE. ``wait``: the longest, in
    the stage or after it."""

    own: float | None
    wait: float
    state: str
    slowest_rank: int | None = None
    uncertain: bool = False
    open_seconds: float | None = None
    """How long its oldest span has been ``OPEN``."""
    attrs: dict[str, AttrValue] = {}


class NodeReport(msgspec.Struct, frozen=True):
    """``own + wait + gap`` is the job's start-up time; each is the mean over its ranks. ``ready``: when the last of its
    ranks ended its first step, from the start."""

    node: str
    gpus: int
    own: float
    wait: float
    gap: float
    ready: float | None
    stages: dict[str, Cell]

    def number(self, stage: str, name: str) -> float:
        """The attribute ``name`` of ``stage``; 0 where it says none."""
        value = self.stages[stage].attrs.get(name) if stage in self.stages else None
        return value if isinstance(value, int | float) and 0 < value < inf else 0.0


class StageReport(msgspec.Struct, frozen=True):
    """One stage over the job. ``seconds`` is its share of start-up; the shares and the job's ``gap_seconds`` add up.
    ``own_hours`` and ``wait_hours`` are in the unit of the cost; all stages' add up to its ``own`` and ``wait``."""

    stage: str
    seconds: float
    own_hours: float
    wait_hours: float
    nodes: int
    median: float | None
    max: float | None
    slowest: str | None
    slowest_rank: int | None
    """On node ``slowest``; None where the stage was done once for the node."""
    ratio: float | None
    stragglers: list[str]
    unfinished: int


class Still(msgspec.Struct, frozen=True):
    """Nodes of a start without an end whose last span that is open lies in a stage, or which come ``after`` one and are
    in none. ``seconds``: of the one that has been there longest, until now, or where that is not known, up to the
    last event."""

    stage: str
    nodes: list[str]
    seconds: float


class Ended(msgspec.Struct, frozen=True):
    """Nodes that ended before their first step, and how."""

    how: str
    nodes: list[str]


class Cost(msgspec.Struct, frozen=True):
    """``total = own + wait + gap``, in GPU-hours (node-hours where no node says how many GPUs it holds)."""

    unit: str
    total: float
    own: float
    wait: float
    gap: float


class WhatIf(msgspec.Struct, frozen=True):
    """The same job with something changed."""

    name: str
    startup_seconds: float
    saved_seconds: float
    saved_hours: float


class Cause(msgspec.Struct, frozen=True):
    """What held ``node`` back in ``stage``, in words; without both, what is to say of the whole start-up."""

    stage: str
    node: str
    text: str


class Problems(msgspec.Struct, frozen=True):
    """What could not be used, or only with doubt."""

    torn: int = 0
    foreign: int = 0
    newer: int = 0
    duplicates: int = 0
    lost_events: int = 0
    cut_attributes: int = 0
    open_spans: int = 0
    lost_spans: int = 0
    skewed_spans: int = 0
    uncertain_spans: int = 0
    clock_spread_seconds: float = 0.0
    clocks_ahead: dict[str, float] = {}
    """Nodes whose clocks were set right, by the seconds that they were ahead of the others (behind: negative)."""


class JobReport(msgspec.Struct, frozen=True):
    """One start-up. ``startup_seconds`` is None until every rank that is expected has ended its first step."""

    job: str
    attempt: str
    cycle: int
    hot: bool
    started_ns: int
    startup_seconds: float | None
    elapsed_seconds: float
    """Start-up time; while it lasts, the time until now; where it has been given up, up to the last event."""
    queue_seconds: float | None
    queue_held_seconds: int | None
    """Of these, how long a hold, a dependency or a suspension kept it from waiting for resources."""
    gap_seconds: float
    gpus: int
    ranks: int
    ranks_expected: int | None
    ranks_ready: int
    """Those that have ended their first step."""
    nodes_expected: int | None
    nodes_missing: int
    missing: list[str]
    """Names of nodes without data, where the events say which nodes there are."""
    cost: Cost
    stages: list[StageReport]
    nodes: list[NodeReport]
    what_if: list[WhatIf]
    still: list[Still]
    """Least advanced first."""
    ended: list[Ended]
    goes_on: bool
    """Whether a start without an end may still come to its first step: not all nodes have ended, and something was
    heard in the last day."""
    heard_ns: int
    """When the last event of a start without an end was; ns since 1970."""
    heard_seconds: float | None
    """How long ago that was; None where it is complete, or nobody said what time it is."""
    problems: Problems
    causes: list[Cause] = []

    @property
    def complete(self) -> bool:
        """Whether the first step has ended everywhere."""
        return self.startup_seconds is not None

    def stage(self, name: str) -> StageReport | None:
        """The stage of that name, if it was seen."""
        return next((stage for stage in self.stages if stage.stage == name), None)
