"""Start-ups that never happened: events of any number of nodes, as their emitters would have written them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from bootseer.profile import events
from bootseer.profile.events import AttrValue, EventLog

_BASE_WALL = 1_750_000_000_123_456_789
_BASE_MONO = 5_000_000_000_000


class StartUp:
    """Collects events of one (job, attempt, cycle). Times are seconds from an arbitrary common zero."""

    def __init__(
        self, job: str = "job", attempt: str = "0", cycle: int = 0, *, gpus: int = 8, zero: float = 0.0
    ) -> None:
        self.job, self.attempt, self.cycle, self.gpus, self.zero = job, attempt, cycle, gpus, zero
        self.ahead: dict[str, float] = {}
        """By how many seconds the wall clock of a node is ahead."""
        self.events: list[dict[str, object]] = []
        self._count = 0

    def span(
        self,
        node: str,
        stage: str,
        begin: float | None,
        end: float | None,
        *,
        rank: int | None = None,
        parent: str = "",
        **attrs: AttrValue,
    ) -> str:
        """A span on ``node``; without ``begin`` or ``end`` that event is missing. Returns its id."""
        self._count += 1
        span_id = f"{zlib.crc32(f'{self.job}/{self.attempt}/{self.cycle}'.encode()):08x}{self._count:08x}"
        for kind, when in (("begin", begin), ("end", end)):
            if when is not None:
                self.event(kind, span_id, node, when, stage=stage, rank=rank, parent=parent, attrs=attrs)
        return span_id

    def event(
        self,
        kind: str,
        span_id: str,
        node: str,
        when: float,
        *,
        stage: str = "",
        rank: int | None = None,
        parent: str = "",
        attrs: dict[str, AttrValue] | None = None,
        wall_step: float = 0.0,
        boot: str | None = None,
    ) -> None:
        """One event; ``wall_step`` moves the wall clock only; ``boot`` replaces the boot id, "" leaves out ``mono``."""
        ns = round((self.zero + when) * 1e9)
        line: dict[str, object] = {"bootseer": 2, "ev": kind, "span": span_id}
        if kind == "begin":
            line |= {"stage": stage} | ({"parent": parent} if parent else {})
        line |= {"job": self.job, "attempt": self.attempt, "cycle": self.cycle, "node": node, "gpus": self.gpus}
        if rank is not None:
            line["rank"] = rank
        line["wall"] = _BASE_WALL + ns + round((wall_step + self.ahead.get(node, 0.0)) * 1e9)
        if boot != "":
            line |= {"mono": _BASE_MONO + ns, "boot": boot or f"boot-of-{node}"}
        line["pid"] = 1
        if attrs and kind != "end":
            line["attrs"] = attrs
        self.events.append(line)

    def lines(self) -> list[bytes]:
        """Every event as a line of an events file."""
        return [json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in self.events]

    def write(self, path: Path) -> Path:
        """An events file."""
        path.write_bytes(b"".join(self.lines()))
        return path

    def log(self) -> EventLog:
        """What the reader makes of the events."""
        return events.parse(self.lines())
