"""Parallel reads of the pieces of a request, for storage that is one place: a folder, an object store, another client.

Every piece is cut in runs, the runs go to a pool of threads at once; each fills its parts and checks them. A run that
fails is tried once more, on a source opened afresh where the piece says how.

Concurrency: any number of threads may ask. Pool threads only read and check, they never wait for each other. A call
returns, or raises, when none of its runs can touch the destination any more.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

from bootseer.errors import DataError, UnavailableError
from bootseer.stripefs.backend import DEADLINE, Piece

_log = logging.getLogger(__name__)
T = TypeVar("T")

RUN = 4 << 20
"""Largest single read from the storage."""
STALL = 3 * DEADLINE
"""A request fails when none of its runs has ended for so long: each has its own deadline, twice with the second try."""
_THREADS = 16

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _forget_pool() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_forget_pool)


def parallel(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run ``tasks`` in the pool; their results in order, or the first error after all have ended or been cancelled.

    A task may not call this.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bootseer-stripe")
        pool = _pool
    futures: list[Future[T]] = []
    try:
        futures.extend(pool.submit(task) for task in tasks)
        _all_done(futures)
    except BaseException:
        for future in futures:
            future.cancel()
        _end_all(futures)  # no task may write into the caller's memory after this
        raise
    return [future.result() for future in futures]


def _end_all(futures: Sequence[Future[T]]) -> None:
    while True:
        try:
            wait(futures)
            return
        except KeyboardInterrupt:  # the first one is being raised already
            continue


def _all_done(futures: Iterable[Future[T]]) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=STALL, return_when=FIRST_COMPLETED)
        if not done:
            raise UnavailableError(f"no part of a read has ended within {STALL:.0f} s")
        for future in done:
            future.result()


class _Run(NamedTuple):
    piece: Piece
    offset: int
    first: int
    last: int

    def read(self) -> None:
        try:
            self._fill(self.piece)
        except (DataError, UnavailableError) as exc:
            _log.warning("reading %s again: %s", self.piece.name or "a file", exc)
            again = self.piece if self.piece.reopen is None else self.piece._replace(source=self.piece.reopen())
            self._fill(again)

    def _fill(self, piece: Piece) -> None:
        parts = piece.parts[self.first : self.last]
        piece.source.readinto(self.offset, parts)
        if piece.check is not None:
            for number, part in enumerate(parts, self.first):
                piece.check(number, part)


def _runs(piece: Piece) -> Iterator[_Run]:
    offset, first, start, length = piece.offset, 0, piece.offset, 0
    for number, part in enumerate(piece.parts):
        if length and length + len(part) > RUN:
            yield _Run(piece, start, first, number)
            first, start, length = number, offset, 0
        length += len(part)
        offset += len(part)
    if length:
        yield _Run(piece, start, first, len(piece.parts))


def read_each(pieces: Sequence[Piece]) -> None:
    """What `Backend.read_many` promises, by ``readinto`` of each piece's source."""
    pending = [_runs(piece) for piece in pieces]
    runs: list[_Run] = []
    while pending:  # in turn, so that the first runs of all come first
        left = []
        for piece in pending:
            if (run := next(piece, None)) is not None:
                runs.append(run)
                left.append(piece)
        pending = left
    if runs:
        parallel([run.read for run in runs])
