"""Parallel reads of the pieces of a request, for storage that is one place: a folder, an object store, another client.

Every piece is cut in runs; each fills its parts and checks them, in a thread of the store's pool. A run that fails is
tried once more, on a source opened afresh where the piece says how.

Concurrency: any number of threads may ask. A request has at most `_THREADS` runs in its pool at a time, so that many
requests get on side by side. Stores have pools of their own: one that hangs keeps no other waiting. Pool threads only
read and check, they never wait for each other. A call returns, or raises, when none of its runs can touch the
destination any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, NamedTuple, TypeVar

from bootseer.errors import DataError, UnavailableError
from bootseer.stripefs.scheduler.model import SLOWEST
from bootseer.stripefs.storage.interface import DEADLINE, Piece

_log = logging.getLogger(__name__)
T = TypeVar("T")

RUN = 4 << 20
"""Largest single read from the storage, unless one part is larger."""
STALL = 3 * DEADLINE
"""A request fails when none of its runs that have begun has ended for so long: each has its own deadline, twice with
the second try."""
_THREADS = 16
_STORES = 16
"""Pools that are kept; while so many are in use, other stores share one."""


class _Pool:
    """The threads of one store. ``users``: calls under way; ``ended_at``: when any of their tasks ended last."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="bootseer-stripe")
        self.users = 0
        self.ended_at = time.monotonic()


_pools: OrderedDict[str, _Pool] = OrderedDict()
_pools_lock = threading.Lock()


def _forget_pools() -> None:
    global _pools, _pools_lock
    _pools, _pools_lock = OrderedDict(), threading.Lock()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_forget_pools)


@contextlib.contextmanager
def _pool_of(store: str) -> Iterator[_Pool]:
    with _pools_lock:
        if store not in _pools and len(_pools) >= _STORES:
            idle = next((name for name, pool in _pools.items() if not pool.users), None)
            if idle is None:
                store = ""
            else:
                _pools.pop(idle).threads.shutdown(wait=False)
        pool = _pools.setdefault(store, _Pool())
        _pools.move_to_end(store)
        pool.users += 1
    try:
        yield pool
    finally:
        with _pools_lock:
            pool.users -= 1


def parallel(tasks: Sequence[Callable[[], T]], *, store: str = "", stall: float | None = None) -> list[T]:
    """Run ``tasks`` in the pool of ``store``; their results in order, or the first error after all have ended.

    ``stall``: `STALL`, where these tasks may take longer. A task may not call this.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    with _pool_of(store) as pool:
        return _Call(pool, tasks, STALL if stall is None else stall).run()


class _Call(Generic[T]):
    def __init__(self, pool: _Pool, tasks: Sequence[Callable[[], T]], stall: float) -> None:
        self._pool, self._tasks, self._stall = pool, tasks, stall
        self._pending: dict[Future[None], int] = {}
        self._results: dict[int, T] = {}
        self._begun: dict[int, float] = {}  # tasks that are running, and since when
        self._over = False

    def _task(self, number: int) -> None:
        self._begun[number] = time.monotonic()
        try:
            if not self._over:
                self._results[number] = self._tasks[number]()
        finally:
            self._pool.ended_at = time.monotonic()
            del self._begun[number]

    def run(self) -> list[T]:
        moved, number = time.monotonic(), 0
        try:
            while number < len(self._tasks) or self._pending:
                while number < len(self._tasks) and len(self._pending) < _THREADS:
                    self._pending[self._pool.threads.submit(self._task, number)] = number
                    number += 1
                done = wait(self._pending, timeout=min(1.0, self._stall / 4), return_when=FIRST_COMPLETED).done
                if done:
                    moved = time.monotonic()
                    self._take(done)
                else:
                    self._check(moved)
        except BaseException:
            self._over = True
            self._end()
            raise
        return [self._results[number] for number in range(len(self._tasks))]

    def _take(self, done: set[Future[None]]) -> None:
        while done:
            future = done.pop()
            del self._pending[future]
            try:
                future.result()
            finally:
                del future  # its error would hold this frame, and this frame the error

    def _check(self, moved: float) -> None:
        """Raise when nothing gets on since ``moved``. Who waits for a thread waits as long as tasks of others end."""
        begun = list(self._begun.values())
        since = max(moved, min(begun) if begun else self._pool.ended_at)
        if time.monotonic() - since > self._stall:
            raise UnavailableError(f"no part of a read has ended within {self._stall:.0f} s")

    def _end(self) -> None:
        """No task may write into the caller's memory after this; also one whose future an interrupt lost."""
        while True:
            try:
                # what was cancelled in the queue counts as done only when a thread comes to it
                wait([future for future in self._pending if not future.cancel()])
                while self._begun:
                    time.sleep(0.01)
                return
            except KeyboardInterrupt:  # the first one is being raised already
                continue


class _Run(NamedTuple):
    piece: Piece
    offset: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return sum(map(len, self.piece.parts[self.first : self.last]))

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


def read_each(pieces: Sequence[Piece], *, store: str) -> None:
    """What `Backend.read_many` promises, by ``readinto`` of each piece's source. ``store``: whose threads do it."""
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
        largest = max(run.size for run in runs)
        parallel([run.read for run in runs], store=store, stall=STALL + 2 * largest / SLOWEST)
