"""Flights: which chunks are being fetched. One thread fetches each, the others wait for it, up to a deadline. Any
number of threads; ``_lock`` guards the table and is never held while bytes move."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from bootseer.backends.interface import DEADLINE, SLOWEST
from bootseer.errors import UnavailableError
from bootseer.ranges import runs
from bootseer.stripefs.files.reader import ChunkFile

_WAIT = 4 * DEADLINE
"""Who waits for a flight gives it up after so long for each of its runs, and twice what its bytes take at `SLOWEST`:
the second try of a read begins anew."""
_LONG = DEADLINE / 2
"""A storage that did not answer for so long is not asked again for the same chunks within `_REFUSED` seconds: who has
waited for them meanwhile, and the kernel, which asks for each page once more, would wait as long again."""
_REFUSED = 2.0


class _Flight:
    """Chunks (``size`` bytes) that one thread fetches, run by run. ``ended``: by run, whether it is over, also when it
    failed. ``patience``: seconds after which all of them are."""

    def __init__(self, runs: list[range], size: int) -> None:
        self.runs = runs
        self.ended = {run[0]: threading.Event() for run in runs}
        self.patience = len(runs) * _WAIT + 2 * size / SLOWEST


class Flights:
    """The chunks of all files that some thread fetches now; ``len`` says how many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[tuple[str, int], tuple[_Flight, int]] = {}  # with the first chunk of its run
        self._failed: dict[tuple[str, int], tuple[float, UnavailableError]] = {}  # and until when they are refused

    def __len__(self) -> int:
        return len(self._flying)

    def bring(
        self, file: ChunkFile, chunks: Iterable[int], here: Callable[[int], bool], fetch: Callable[[range], None]
    ) -> None:
        """Have ``chunks`` brought: run by run by ``fetch``, those that are not ``here`` and that nobody fetches; by
        waiting, those of others. After a failure they are missing, and who has waited tries for itself in `trying`."""
        mine, others = self._claim(file, chunks, here)
        try:
            for run in mine.runs:
                with self.trying(file, run):
                    fetch(run)
                self._release(file, mine, run)
        finally:
            for run in mine.runs:
                self._release(file, mine, run)
        for flight, start in others:
            if not flight.ended[start].wait(flight.patience):
                raise UnavailableError(
                    f"{file.path} was not read: who fetches it has not got on ({flight.patience:.0f} s waited)",
                    hint="check that the storage is reachable from here",
                )
            self._refuse(file, next(run for run in flight.runs if run[0] == start))

    @contextlib.contextmanager
    def trying(self, file: ChunkFile, chunks: range) -> Iterator[None]:
        """Around a read of ``chunks``: `UnavailableError` at once where the storage has just not answered for `_LONG`
        when it was asked for one of them."""
        self._refuse(file, chunks)
        began = time.monotonic()
        try:
            yield
        except UnavailableError as exc:
            if (now := time.monotonic()) - began >= _LONG:
                with self._lock:
                    self._failed = {key: found for key, found in self._failed.items() if now < found[0]}
                    self._failed |= {(file.identity, chunk): (now + _REFUSED, exc) for chunk in chunks}
            raise

    def _refuse(self, file: ChunkFile, chunks: range) -> None:
        failed, now = self._failed, time.monotonic()
        for chunk in chunks if failed else ():
            if (found := failed.get((file.identity, chunk))) is not None and now < found[0]:
                raise UnavailableError(found[1].message, hint=found[1].hint)

    def _claim(
        self, file: ChunkFile, chunks: Iterable[int], here: Callable[[int], bool]
    ) -> tuple[_Flight, list[tuple[_Flight, int]]]:
        """The chunks to fetch, as a flight of this thread; and the runs of others to wait for."""
        others: dict[tuple[int, int], tuple[_Flight, int]] = {}
        mine = []
        with self._lock:  # what is here is so before its flight ends, so it is seen either way
            for chunk in chunks:
                if here(chunk):
                    continue
                if (found := self._flying.get((file.identity, chunk))) is not None:
                    others[id(found[0]), found[1]] = found
                else:
                    mine.append(chunk)
            together = [range(first, first + count) for first, count in runs(mine)]
            flight = _Flight(together, sum(map(file.geometry.chunk_length, mine)))
            self._flying |= {(file.identity, chunk): (flight, run[0]) for run in together for chunk in run}
        return flight, list(others.values())

    def _release(self, file: ChunkFile, flight: _Flight, run: range) -> None:
        """Wake who waits for ``run``, once."""
        if not flight.ended[run[0]].is_set():
            with self._lock:
                for chunk in run:
                    del self._flying[file.identity, chunk]
            flight.ended[run[0]].set()
