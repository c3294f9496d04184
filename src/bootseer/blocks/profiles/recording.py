"""The recording of a start: from the touches that the FUSE server notes to a trace, with the processes asked as they
appear."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer import ranks
from bootseer.blocks.formats.trace import (
    MAX_COMM,
    MAX_PROCESSES,
    UNIT,
    Process,
    Touch,
    Trace,
)
from bootseer.blocks.profiles.layout import Part, files_of
from bootseer.blocks.profiles.library import SMALL_TREE

log = logging.getLogger(__name__)

_SCANNED = 0.9
"""Who reads more than this share of a tree's files scans it (a checksum, a copy, a search): that says nothing of a
start. A start reads much of few files, and few of a tree's files."""
_SUSPECT = 0.25
"""Share of the bytes below which nobody counts files."""

_MAX_ENVIRON = 1 << 20
_SLACK = 0.05
"""Seconds: start times have the resolution of a clock tick, 10 ms, and touches that of a millisecond."""


class Readers:
    """A table of processes, each asked once. `note` never raises: a process that is gone has no entry."""

    def __init__(self, proc: Path = Path("/proc"), limit: int = MAX_PROCESSES) -> None:
        self._proc = os.fspath(proc)
        self._limit = limit
        self._known: dict[int, Process | None] = {}
        self._tick = 1 / os.sysconf("SC_CLK_TCK")

    def note(self, pid: int, touched: float) -> None:
        """``pid`` touched something at monotonic time ``touched``. A process that began after that is another one,
        which was given the same number."""
        if pid in self._known or pid <= 0 or len(self._known) >= self._limit:
            return
        try:
            self._known[pid] = self._ask(pid, touched)
        except (OSError, ValueError, IndexError):
            self._known[pid] = None

    def table(self) -> tuple[Process, ...]:
        """Those that could be asked, by pid."""
        return tuple(found for _, found in sorted(self._known.items()) if found is not None)

    def _ask(self, pid: int, touched: float) -> Process | None:
        # FUSE gives the thread's id; its directory is not listed but there, and names the process.
        leader = self._leader(pid)
        began = self._began(leader)
        offset = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        if began - offset > touched + _SLACK:
            return None
        found = Process(
            pid,
            _text(self._read(leader, "comm", 4096).rstrip(b"\n"), MAX_COMM),
            self._rank(leader),
        )
        return found if self._began(leader) == began else None

    def _read(self, pid: int, name: str, most: int) -> bytes:
        with open(f"{self._proc}/{pid}/{name}", "rb") as file:
            return file.read(most)

    def _leader(self, pid: int) -> int:
        for line in self._read(pid, "status", 1 << 16).splitlines():
            if line.startswith(b"Tgid:"):
                return int(line[5:])
        raise ValueError("no Tgid")

    def _began(self, pid: int) -> float:
        """Start of the process, seconds since boot. Field 22, counted behind the name, which may hold anything."""
        stat = self._read(pid, "stat", 4096)
        return int(stat[stat.rindex(b")") + 2 :].split()[19]) * self._tick

    def _rank(self, pid: int) -> int:
        try:
            environ = self._read(pid, "environ", _MAX_ENVIRON)
        except OSError:
            return -1
        found = dict(part.split("=", 1) for part in environ.decode(errors="replace").split("\0") if "=" in part)
        rank = ranks.first(found, ranks.RANKS)
        return -1 if rank is None else rank


def _text(raw: bytes, most: int) -> str:
    """``raw`` as text whose UTF-8 has at most ``most`` bytes."""
    return raw.decode(errors="replace").encode()[:most].decode(errors="ignore")


class Recording:
    """A start being recorded. `poll` it a few times a second: a process can be asked only while it lives.

    ``since(n)`` gives the touches from number ``n`` on: (milliseconds since the mount, pid, first unit, units).
    ``began``: Unix time of the mount; ``clock``: its monotonic time, from which the touches count. ``layout``: where
    the files of the tree lie, asked only of a start that reads much. One thread only.
    """

    def __init__(
        self,
        since: Callable[[int], list[tuple[int, int, int, int]]],
        tree: str,
        size: int,
        *,
        began: int,
        clock: float,
        layout: Callable[[], Sequence[Part]],
        readers: Readers | None = None,
    ) -> None:
        self._since = since
        self._tree = tree
        self._size = size
        self._began = began
        self._clock = clock
        self._layout = layout
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
        kept, scanners = without_scanners(tuple(Touch(*row) for row in self._since(0)), self._size, self._layout)
        named = {process.pid: process for process in self._readers.table()}
        for pid, size in scanners.items():
            who = named.setdefault(pid, Process(pid, ""))
            log.info("left out of the recording: process %s, %s MB", who.comm or pid, f"{size // 10**6:,}")
        # without their names: a store is for others, too
        processes = tuple(Process(pid, "", one.rank) for pid, one in sorted(named.items()))[:MAX_PROCESSES]
        return Trace(self._tree, self._size, self._began, complete, kept, processes)


def without_scanners(
    touches: tuple[Touch, ...], size: int, layout: Callable[[], Sequence[Part]]
) -> tuple[tuple[Touch, ...], dict[int, int]]:
    """``touches`` of data of ``size`` bytes but for those of scanners, and these: pid -> bytes that it read. Where all
    processes together scan, as the many of a parallel search do, none is left. A small tree has no scanners."""
    read: dict[int, int] = {}
    for touch in touches:
        read[touch.pid] = read.get(touch.pid, 0) + touch.count * UNIT
    if size <= SMALL_TREE or sum(read.values()) <= _SUSPECT * size:
        return touches, {}
    parts = layout()
    starts, files = [part.unit for part in parts], len({part.path for part in parts})

    def scans(some: tuple[Touch, ...]) -> bool:
        return len(files_of(some, parts, starts)) > _SCANNED * files

    suspects = [pid for pid, count in sorted(read.items()) if count > _SUSPECT * size]
    found = [pid for pid in suspects if scans(tuple(touch for touch in touches if touch.pid == pid))]
    kept = tuple(touch for touch in touches if touch.pid not in found)
    if sum(touch.count for touch in kept) * UNIT > _SUSPECT * size and scans(kept):
        kept, found = (), sorted(read)
    return kept, {pid: read[pid] for pid in found}
