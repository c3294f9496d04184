"""What a mount pulls into the node cache by itself: what a start before read, or whole files. Concurrency: one thread,
with two of its own that read; any thread may look at the figures."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bootseer.backends.interface import clean, join
from bootseer.backends.pool import parallel
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.fsmount.operations import StripeOperations
from bootseer.fsmount.record import LATEST, State
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.checkpoint.access import FileAccess, Ranges, counterparts
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.files.reader import NOWHERE, ChunkFile
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.store import StripeFS

_log = logging.getLogger(__name__)

_PIECE = 16 << 20
_END_SECONDS = 5.0
_HOLD_SECONDS = 600.0
"""A prefetch that nobody releases begins after so long: who should have may be dead."""


class Prefetch:
    """Prefetch of ``ranges``, or of the files and folders ``named``. ``total``, ``done``: bytes. ``hold``: nothing is
    prefetched before `release`. ``memory``: bytes that ``ahead`` holds. ``operations`` are told what of ``ranges`` is
    here."""

    def __init__(
        self,
        fs: StripeFS,
        cache: NodeCache | None,
        ahead: ReadAhead,
        operations: StripeOperations,
        named: Sequence[str],
        ranges: Sequence[FileAccess],
        *,
        hold: bool,
        memory: int,
    ) -> None:
        self._fs, self._cache, self._ahead, self._ops = fs, cache, ahead, operations
        self._named, self._ranges, self._memory = named, ranges, memory
        self.state: State = "running" if named or ranges else "none"
        self.total = self.done = 0
        self._stop, self._released = threading.Event(), threading.Event()
        if not hold:
            self._released.set()
        self._thread = threading.Thread(target=self._pull, name="prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def release(self) -> None:
        self._released.set()

    def end(self) -> None:
        """Begin no more reads."""
        self._stop.set()
        self._released.set()

    def join(self) -> bool:
        """Wait for the reads under way, for some seconds; whether they have ended."""
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        return not self._thread.is_alive()

    def _pull(self) -> None:
        if self.state == "none":
            return
        try:
            wanted = [(self._fs.open(path), ranges) for path, ranges in self._recorded() or self._whole()]
            pieces = [(file, list(self._pieces(file, ranges))) for file, ranges in wanted]
            self.total = sum(_bytes(file, piece) for file, parts in pieces for piece in parts)
            self._await_release()
            with ThreadPoolExecutor(2, thread_name_prefix="bootseer-prefetch") as pool:
                for file, parts in pieces:
                    if self._cache is not None:
                        file.attach(self._cache.open(file, join(self._fs.url, file.path)) or NOWHERE)
                    if file.local is NOWHERE:
                        fits = self._memory // 2 // file.unit
                        self.done += sum(_bytes(file, piece) for piece in parts if piece[1] > fits)
                        parts = [piece for piece in parts if piece[1] <= fits]
                    for count in pool.map(partial(self._pull_piece, file), parts):
                        self.done += count
                    # stays open there until the mount ends: what was asked for is not evicted, nor compared again
                    file.local = NOWHERE
                    file.close()
            if self._cache:
                self._cache.sync()
            self.state = "done"
        except (BootseerError, OSError) as exc:
            self.state = "failed"
            _log.warning("prefetch stopped: %s", exc)

    def _pull_piece(self, file: ChunkFile, piece: tuple[int, int]) -> int:
        if self._stop.is_set():
            raise UnavailableError("the mount ended")
        self._ahead.prefetch(file, *piece)
        return _bytes(file, piece)

    def _pieces(self, file: ChunkFile, ranges: Ranges) -> Iterator[tuple[int, int]]:
        """The chunks of ``ranges``, in steps of `_PIECE` bytes: (first, one after the last)."""
        step, done = max(1, _PIECE // file.unit), 0
        for first, last in ranges:
            begin, end = max(done, first // file.unit), -(-last // file.unit)
            yield from ((at, min(at + step, end)) for at in range(begin, end, step))
            done = max(done, end)

    def _await_release(self) -> None:
        """Wait until whoever held the prefetch back lets it go."""
        if not self._released.wait(_HOLD_SECONDS):
            _log.warning("prefetch begins: it was held back for %.0f s", _HOLD_SECONDS)
        if self._stop.is_set():
            raise UnavailableError("the mount ended")

    def _recorded(self) -> list[tuple[str, Ranges]]:
        """The given ranges, of files that have a counterpart here."""
        if not self._ranges:
            return []
        paths = [file.path for file in self._ranges]
        sizes = self._sizes(paths)
        if len(sizes) < len(paths):  # names are others here
            sizes |= self._sizes(path for path in self._paths(("",)) if path not in sizes)
        wanted = counterparts(self._ranges, sizes)
        if len(wanted) < len(self._ranges):
            what = "what else it read" if wanted else "what the start before read: all files are prefetched"
            _log.info("%s has %d of %d files of %s", self._fs.url, len(wanted), len(self._ranges), what)
        self._ops.expect(wanted)
        return wanted

    def _sizes(self, paths: Iterable[str]) -> dict[str, int]:
        """Sizes of those files that are here."""

        def size(path: str) -> tuple[str, int | None]:
            with contextlib.suppress(NotFoundError):
                return path, self._fs.stat(path).size
            return path, None

        return {path: found for path, found in parallel(size, paths) if found is not None}

    def _whole(self) -> list[tuple[str, Ranges]]:
        """All of the files that are named, or of all files when no given range is here."""
        paths = self._paths(self._named or ("",))
        return [(path, ((0, size),)) for path in paths if (size := self._fs.stat(path).size)]

    def _paths(self, items: Sequence[str]) -> list[str]:
        found: dict[str, None] = {}
        for item in items:
            path = self._fs.latest("") if item == LATEST else clean(item)
            try:
                names = [join(path, file.path) for file in self._fs.checkpoint(path).files]
            except (NotFoundError, DataError):
                names = [name for name in self._fs.files(path) if name.rpartition("/")[2] != commit.NAME]
            found |= dict.fromkeys(names)
        return list(found)


def _bytes(file: ChunkFile, piece: tuple[int, int]) -> int:
    first, last = piece
    return min(last * file.unit, file.size) - first * file.unit
