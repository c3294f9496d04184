"""The recording of a start: from the touches that a front notes to a trace, with the processes asked as they appear."""

from __future__ import annotations

from typing import Protocol

from bootseer.blocks.formats.trace import Trace, first_touches
from bootseer.blocks.profiles.readers import Readers


class TouchLog(Protocol):
    """What the front appends to; see ``bootseer.blocks.serving.shared``."""

    def since(self, start: int) -> list[tuple[int, int, int, int]]:
        """Touches from number ``start`` on: (milliseconds since the mount, pid, first unit, units)."""
        ...


class Recording:
    """A start being recorded. `poll` it a few times a second: a process can be asked only while it lives.

    ``began``: Unix time of the mount; ``clock``: its monotonic time, from which the touches count. One thread only.
    """

    def __init__(
        self,
        log: TouchLog,
        tree: str,
        size: int,
        *,
        driver: str,
        began: int,
        clock: float,
        readers: Readers | None = None,
    ) -> None:
        self._log = log
        self._tree = tree
        self._size = size
        self.driver = driver
        self._began = began
        self._clock = clock
        self._readers = readers or Readers()
        self._read = 0

    def poll(self) -> int:
        """Ask who the new touches are by; returns how many touches there are by now."""
        rows = self._log.since(self._read)
        self._read += len(rows)
        first: dict[int, int] = {}
        for ms, pid, _, _ in rows:
            first.setdefault(pid, ms)
        for pid, ms in first.items():
            self._readers.note(pid, self._clock + ms / 1000)
        return self._read

    def trace(self, *, complete: bool = True) -> Trace:
        """What was recorded until now. ``complete`` false: touches may be missing, whatever the log says."""
        self.poll()
        touches, all_of_them = first_touches(self._log.since(0), self._size)
        return Trace(
            self._tree,
            self._size,
            self._began,
            complete and all_of_them,
            self.driver,
            touches,
            self._readers.table(),
        )
