"""The recording of a start: from the touches that the FUSE server notes to a trace, with the processes asked as they
appear."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bootseer.blocks.formats.trace import MAX_PROCESSES, UNIT, Process, Touch, Trace, first_touches
from bootseer.blocks.profiles.library import SMALL_TREE
from bootseer.blocks.profiles.readers import Readers

log = logging.getLogger(__name__)

_SCANNER = 0.25
"""A process that reads more than this share of a tree is a scan (a checksum, a copy, a search), not a start."""


class Recording:
    """A start being recorded. `poll` it a few times a second: a process can be asked only while it lives.

    ``since(n)`` gives the touches from number ``n`` on: (milliseconds since the mount, pid, first unit, units).
    ``began``: Unix time of the mount; ``clock``: its monotonic time, from which the touches count. One thread only.
    """

    def __init__(
        self,
        since: Callable[[int], list[tuple[int, int, int, int]]],
        tree: str,
        size: int,
        *,
        began: int,
        clock: float,
        readers: Readers | None = None,
    ) -> None:
        self._since = since
        self._tree = tree
        self._size = size
        self._began = began
        self._clock = clock
        self._readers = readers or Readers()
        self._read = 0

    def poll(self) -> int:
        """Ask who the new touches are by; returns how many touches there are by now."""
        rows = self._since(self._read)
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
        touches, all_of_them = first_touches(self._since(0), self._size)
        kept, scanners = without_scanners(touches, self._size)
        named = {process.pid: process for process in self._readers.table()}
        for pid, size in scanners.items():
            who = named.setdefault(pid, Process(pid, ""))
            log.info("left out of the recording: process %s, %s MB", who.comm or pid, f"{size // 10**6:,}")
        processes = tuple(process for _, process in sorted(named.items()))[:MAX_PROCESSES]
        whole = complete and all_of_them
        return Trace(self._tree, self._size, self._began, whole, "fuse", kept, processes)


def without_scanners(touches: tuple[Touch, ...], size: int) -> tuple[tuple[Touch, ...], dict[int, int]]:
    """``touches`` of data of ``size`` bytes but for those of scanners, and these: pid -> bytes that it read, so much
    that its touches say nothing of a start. A small tree has none."""
    read: dict[int, int] = {}
    for touch in touches:
        read[touch.pid] = read.get(touch.pid, 0) + touch.count * UNIT
    scanners = {pid: count for pid, count in sorted(read.items()) if size > SMALL_TREE and count > _SCANNER * size}
    return tuple(touch for touch in touches if touch.pid not in scanners), scanners
