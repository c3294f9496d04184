"""The recording of a start: from the touches that the FUSE server notes to a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.profiles.layout import Part, files_of
from bootseer.blocks.profiles.library import SMALL_TREE
from bootseer.kernel import procfs

log = logging.getLogger(__name__)

_SCANNED = 0.9
"""Who reads more than this share of a tree's files scans it (a checksum, a copy, a search): that says nothing of a
start. A start reads much of few files, and few of a tree's files."""
_SUSPECT = 0.25
"""Share of the bytes below which nobody counts files."""


class Recording:
    """A start being recorded. ``since(n)`` gives the touches from number ``n`` on: (milliseconds since the mount, pid,
    first unit, units). ``began``: Unix time of the mount. ``layout``: where the files of the tree lie, asked only of a
    start that reads much."""

    def __init__(
        self,
        since: Callable[[int], list[tuple[int, int, int, int]]],
        tree: str,
        size: int,
        *,
        began: int,
        layout: Callable[[], Sequence[Part]],
    ) -> None:
        self._since, self._tree, self._size, self._began, self._layout = since, tree, size, began, layout

    def trace(self, *, complete: bool = True) -> Trace:
        """What was recorded until now, without the touches of processes that scan the tree. ``complete`` false: touches
        may be missing, whatever the log says."""
        kept, scanners = without_scanners(tuple(Touch(*row) for row in self._since(0)), self._size, self._layout)
        for pid, size in scanners.items():
            log.info("left out of the recording: %s, %s MB", procfs.shown(pid), f"{size // 10**6:,}")
        return Trace(self._tree, self._size, self._began, complete, kept, len(scanners))


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
