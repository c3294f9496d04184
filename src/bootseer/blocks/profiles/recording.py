"""The recording of a start: from the touches that the FUSE server notes to a trace, with the processes asked as they
appear."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from bootseer.blocks.formats.trace import MAX_PROCESSES, UNIT, Process, Touch, Trace, first_touches
from bootseer.blocks.profiles.library import SMALL_TREE
from bootseer.blocks.profiles.readers import Readers

log = logging.getLogger(__name__)

_SCANNER = 0.25
"""A process that reads more than this share of a tree is a scan (a checksum, a copy, a search), not a start."""


class TouchLog(Protocol):
    """Where touches are noted; see ``bootseer.blocks.serving.shared_memory``."""

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
        began: int,
        clock: float,
        driver: str = "fuse",
        readers: Readers | None = None,
    ) -> None:
        self._log = log
        self._tree = tree
        self._size = size
        self._driver = driver
        self._began = began
        self._clock = clock
        self._readers = readers or Readers()
        self._read = 0
        self.left_out: list[str] = []
        """Scans whose touches `trace` left out, such as ``process cat, 7,100 MB``."""

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
        """What was recorded until now, without the touches of processes that scan the tree. ``complete`` false: touches
        may be missing, whatever the log says."""
        self.poll()
        touches, all_of_them = first_touches(self._log.since(0), self._size)
        kept, scanners = without_scanners(touches, self._size)
        named = {process.pid: process for process in self._readers.table()}
        self.left_out = []
        for one in scanners:
            who = named.setdefault(one.pid, Process(one.pid, ""))
            self.left_out.append(f"process {who.comm or who.pid}, {one.bytes // 10**6:,} MB")
            log.info("left out of the recording: %s", self.left_out[-1])
        processes = tuple(process for _, process in sorted(named.items()))[:MAX_PROCESSES]
        whole = complete and all_of_them
        return Trace(self._tree, self._size, self._began, whole, self._driver, kept, processes)


class Scanner(NamedTuple):
    """A process that read so much of a tree that its touches say nothing of a start."""

    pid: int
    bytes: int


def without_scanners(touches: tuple[Touch, ...], size: int) -> tuple[tuple[Touch, ...], list[Scanner]]:
    """``touches`` of data of ``size`` bytes but for those of scanners, and these. A small tree has none."""
    read: dict[int, int] = {}
    if size > SMALL_TREE:
        for touch in touches:
            read[touch.pid] = read.get(touch.pid, 0) + touch.count * UNIT
    scanners = [Scanner(pid, count) for pid, count in sorted(read.items()) if count > _SCANNER * size]
    if not scanners:
        return touches, []
    pids = {one.pid for one in scanners}
    return tuple(touch for touch in touches if touch.pid not in pids), scanners
