"""Two start-ups, row by row."""

from __future__ import annotations

import msgspec

from bootseer.profile.starts import Start


class Row(msgspec.Struct, frozen=True):
    """One stage's share of the start in seconds, None where it was not seen; or what ``name`` says, of the whole."""

    name: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """Seconds more than before; None unless both are known."""
        return None if self.before is None or self.after is None else self.after - self.before


def rows(before: Start, after: Start) -> list[Row]:
    """Each stage of either, in the order of the first, what lies between stages, and the whole start."""
    first = {stage.stage: stage.seconds for stage in before.stages}
    second = {stage.stage: stage.seconds for stage in after.stages}
    found = [Row(name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second])]
    found.append(Row("between stages", _between(before), _between(after)))
    found.append(Row("queue", before.queue_seconds, after.queue_seconds))
    found.append(Row("start-up", before.startup_seconds, after.startup_seconds))
    return found


def _between(start: Start) -> float:
    return start.elapsed_seconds - sum(stage.seconds for stage in start.stages)
