"""Parallel reads of the pieces of a request, for storage that is one place: a folder, an object store, another client.

Every piece is cut in runs. Each run fills its parts and checks them, in a thread of the request; one that fails is
tried once more, on a source opened afresh where the piece says how. A call returns, or raises, when none of its runs
can touch the destination any more."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

from bootseer.backends.interface import Piece
from bootseer.errors import DataError, UnavailableError

_log = logging.getLogger(__name__)
A = TypeVar("A")
T = TypeVar("T")

RUN = 4 << 20
"""Largest single read from the storage, unless one part is larger."""
_THREADS = 16


def parallel(function: Callable[[A], T], of: Iterable[A]) -> list[T]:
    """``function`` of each, side by side; their results in order, or the first error after all have ended."""
    items = list(of)
    if len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items)), thread_name_prefix="bootseer-stripe") as pool:
        futures = [_begin(pool, function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            _end(futures)
            raise


def in_turn(function: Callable[[A], T], of: Iterable[A], threads: int) -> Iterator[T]:
    """`parallel` of what may be endless: results in order, as they come; few are begun before the first is taken."""
    with ThreadPoolExecutor(threads, thread_name_prefix="bootseer-turn") as pool:
        futures = deque[Future[T]]()
        try:
            for item in of:
                futures.append(_begin(pool, function, item))
                if len(futures) > 2 * threads:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        except BaseException:
            _end(futures)
            raise


def _begin(pool: ThreadPoolExecutor, function: Callable[[A], T], item: A) -> Future[T]:
    try:
        return pool.submit(function, item)
    except RuntimeError as exc:
        if "cannot schedule" not in str(exc):  # no thread could be started, but the task waits for one
            raise
        # the main thread has ended, and this one, or a handler at the end, goes on without new ones
        future = Future[T]()
        try:
            future.set_result(function(item))
        except Exception as failed:
            future.set_exception(failed)
        return future


def _end(futures: Collection[Future[T]]) -> None:
    """Cancel what has not begun and wait for the rest: no task may write into the caller's memory after this."""
    while True:
        try:
            wait([future for future in futures if not future.cancel()])
            return
        except KeyboardInterrupt:  # the first one is being raised already
            continue


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
    # in turn, so that the first runs of all pieces come first
    turns = itertools.zip_longest(*map(_runs, pieces))
    parallel(_Run.read, (run for turn in turns for run in turn if run is not None))
