"""The end of a start without a first step, as far as its events say: exit codes, signals, what Slurm says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootseer.profile.events import Spans

_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REQUEUED",
    "TIMEOUT",
}  # fmt: skip


def in_slurm(spans: Spans) -> str:
    """The state in which Slurm says that the start-up of ``spans`` ended, or nothing."""
    found = ""
    for stage, attrs in zip(spans.stage, spans.attrs, strict=True):
        if attrs and stage in ("queue", "alloc"):
            state = str(attrs.get("state", "")).split(" ")[0]
            found = state if state in _OVER else found
    return found


def failure(attrs: Mapping[str, object]) -> str:
    """What went wrong in a span, in words; nothing where nothing did."""
    code, signal, error = attrs.get("exit_code"), attrs.get("signal"), attrs.get("error")
    if signal:
        return str(signal)
    return f"exit code {code}" if code else str(error or "")


def last_failure(ends: Iterable[tuple[int, str, Mapping[str, object]]]) -> str:
    """What went wrong in the span that ended last, of those with their ends, stages and attributes."""
    _, stage, attrs = max(ends, key=lambda one: one[0], default=(0, "", {}))
    said = failure(attrs)
    return f"{said} in {stage}" if said else ""
