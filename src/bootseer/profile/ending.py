"""The end of a start, as far as its events say: exit codes, signals, what Slurm says, until when it held its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.profile.clock import Axis
from bootseer.profile.events import AttrValue, Spans

FAILED = frozenset(("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"))
"""States of Slurm in which a job failed."""
_OVER = FAILED | {"COMPLETED", "CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED", "REQUEUED"}
_ASKED = ("SIGTERM", "SIGINT")
"""Signals by which somebody ends a job that works."""


class Ending(NamedTuple):
    """``slurm``: the state in which Slurm says that it ended, or nothing. ``until``: when its GPUs were free, in ns on
    the axis; None where nobody says it."""

    failed: bool
    slurm: str
    until: int | None


def find(spans: Spans, axis: Axis) -> Ending:
    """The ending of the start-up that is all of ``spans``."""
    failed, slurm, until = False, "", list[int]()
    for row, attrs in enumerate(spans.attrs):
        if not attrs:
            continue
        state = attrs.get("state")
        if spans.stage[row] in ("queue", "alloc") and isinstance(state, str) and state.split(" ")[0] in _OVER:
            slurm = state.split(" ")[0]
        begin, ended, seconds = axis.place(row)[0], axis.last(row), attrs.get("run_seconds")
        if isinstance(seconds, int | float) and 0 <= seconds < 1e9 and begin is not None:
            until.append(begin + int(seconds * 1e9))
        if spans.stage[row] == "init" and (attrs.get("exit_code") is not None or attrs.get("signal")):
            failed = failed or (bool(failure(attrs)) and attrs.get("signal") not in _ASKED)
            if ended is not None and seconds is None:
                until.append(ended)
    return Ending(failed or slurm in FAILED, slurm, max(until, default=None))


def failure(attrs: Mapping[str, AttrValue]) -> str:
    """What went wrong in a span, in words; nothing where nothing did."""
    code, signal, error = attrs.get("exit_code"), attrs.get("signal"), attrs.get("error")
    if signal:
        return str(signal)
    return f"exit code {code}" if code else str(error or "")


def last_failure(ends: Iterable[tuple[int, str, Mapping[str, AttrValue]]]) -> str:
    """What went wrong in the span that ended last, of those with their ends, stages and attributes."""
    _, stage, attrs = max(ends, key=lambda one: one[0], default=(0, "", {}))
    said = failure(attrs)
    return f"{said} in {stage}" if said else ""
