"""What the analysis of one start-up says: plain records, printed by ``profile show --json`` as they are.

Times in seconds. Definitions: ``docs/reference/definitions.md``.
"""

from __future__ import annotations

import msgspec

from bootseer.profile.events import AttrValue


class Cell(msgspec.Struct, frozen=True):
    """One stage on one node. ``own`` is None when no span of it is DONE; ``wait`` for others is not part of it."""

    own: float | None
    wait: float
    state: str
    uncertain: bool = False
    attrs: dict[str, AttrValue] = {}


class NodeReport(msgspec.Struct, frozen=True):
    """``own + wait + gap`` is the job's start-up time. ``ready``: end of this node's first step, from the start."""

    node: str
    gpus: int
    own: float
    wait: float
    gap: float
    ready: float | None
    stages: dict[str, Cell]


class StageReport(msgspec.Struct, frozen=True):
    """One stage over the job. ``seconds`` is its share of start-up; the shares and the job's ``gap_seconds`` add up."""

    stage: str
    seconds: float
    nodes: int
    median: float | None
    max: float | None
    slowest: str | None
    ratio: float | None
    stragglers: list[str]
    unfinished: int


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
    """One start-up. ``startup_seconds`` is None until the slowest rank has ended its first step."""

    job: str
    attempt: str
    cycle: int
    hot: bool
    started_ns: int
    startup_seconds: float | None
    elapsed_seconds: float
    """Start-up time; while it lasts, the time up to the last event."""
    queue_seconds: float | None
    gap_seconds: float
    gpus: int
    ranks: int
    nodes_expected: int | None
    nodes_missing: int
    cost: Cost
    stages: list[StageReport]
    nodes: list[NodeReport]
    what_if: list[WhatIf]
    problems: Problems

    @property
    def complete(self) -> bool:
        """Whether the first step has ended everywhere."""
        return self.startup_seconds is not None

    def stage(self, name: str) -> StageReport | None:
        """The stage of that name, if it was seen."""
        return next((stage for stage in self.stages if stage.stage == name), None)
