"""Sizes and times of the read scheduler, in one place."""

from __future__ import annotations

from dataclasses import dataclass

SLOWEST = 512 << 10
"""Bytes a second that one transfer must give on average: a chunk of 64 MiB over a slow, shared link is no failure."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes in bytes, times in seconds."""

    streams: int = 8
    """Bulk transfers that one request has under way where its DataNodes are few; else 2 per DataNode."""
    total: int = 32
    """Bulk transfers under way in the process, not counting as many from which nothing comes; each has a thread."""
    small: int = 256 << 10
    """Requests up to this size go first, and do not wait for the slots of larger ones."""
    small_slots: int = 4
    small_total: int = 32
    min_run: int = 1 << 20
    max_run: int = 4 << 20
    """Of a DataNode that is not known yet, or not quick."""
    run_seconds: float = 0.25
    """What a slow DataNode is given at once."""
    quick_seconds: float = 0.06
    """What a quick DataNode is given at once: the more, the fewer requests, which cost both sides CPU time."""
    long_run: int = 8 << 20
    """Of a quick DataNode: hedges of two are within what may be read twice in advance."""
    plan_from: int = 8 << 20
    """Requests from this size on have a plan."""
    stall: float = 0.25
    """An attempt that gets nothing for so long, and for 4 times the 95th percentile, is stopped."""
    batch: int = 1 << 20
    """A transfer tells of its bytes in steps of about this size."""
    patience: float = 60.0
    """A request fails when nothing of it has come for so long."""
    rounds: int = 4
    """How often fresh locations are asked for on behalf of one run."""
    round_wait: float = 0.25
    """Seconds before the second of these rounds is tried; three times as many before each one after it."""
    probe: int = 64 << 10
    tries: int = 2
    """How often one DataNode is asked for one run between fresh locations."""
