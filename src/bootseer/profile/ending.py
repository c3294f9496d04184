"""The end of a start without a first step, as far as events say: exit codes, signals, Slurm and Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootseer.profile.events import Spans

_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REQUEUED",
    "TIMEOUT",
}  # fmt: skip


def outside(spans: Spans) -> str:
    """How Slurm or Kubernetes say that the start-up of ``spans`` ended, or nothing."""
    found = ""
    for stage, attrs in zip(spans.stage, spans.attrs, strict=True):
        if attrs and stage in ("queue", "alloc"):
            state = str(attrs.get("state", "")).split(" ")[0]
            found = f"Slurm says {state}" if state in _OVER else found
            found = f"Kubernetes says {attrs['phase']}" if attrs.get("phase") else found
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
