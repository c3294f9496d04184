"""The threads that fetch: as many as there are streams, and others for those stuck in a source.

Lock: that of the `Board` (see there) guards the lists here, too; it is not held while a flight is flown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bootseer.blocks.fetch.board import Board
from bootseer.blocks.fetch.flight import Flight

log = logging.getLogger(__name__)

_MOST = 4
"""Times ``streams``: threads in all, those stuck in a source included."""


class Crew:
    """Up to ``streams`` threads that take batches from ``board`` and hand them to ``fly``, which must not raise.

    A third of them, one at least where there are two, take what readers wait for only.
    """

    def __init__(self, board: Board, fly: Callable[[Flight], None], streams: int) -> None:
        self.threads: list[threading.Thread] = []
        self._board = board
        self._fly = fly
        self._streams = streams
        self._unreplaced: list[Flight] = []

    def start(self) -> bool:
        """Start the threads; False where the system gives not even one."""
        reserved = 0 if self._streams == 1 else max(1, self._streams // 3)
        with self._board.lock:
            return sum(self._spawn(index < reserved) for index in range(self._streams)) > 0

    def join(self, until: float) -> None:
        """Wait for the threads to end, until that monotonic time at most."""
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))

    @property
    def stuck(self) -> int:
        """How many threads have not ended."""
        return sum(thread.is_alive() for thread in self.threads)

    def lose(self, flight: Flight) -> None:
        """Under the lock: the thread of ``flight`` may never return."""
        self._unreplaced.append(flight)
        self.replace()

    @property
    def short(self) -> bool:
        """Under the lock: whether there are lost threads in whose place nobody works."""
        return bool(self._unreplaced)

    def replace(self) -> None:
        """Under the lock: threads for those that were lost. One that is not replaced goes on working when it returns,
        so the number at work never shrinks."""
        while self._unreplaced and self.stuck < _MOST * self._streams:
            if self._board.closing.is_set() or not self._spawn(self._unreplaced[0].demand_only):
                return
            self._unreplaced.pop(0).replaced = True

    def _spawn(self, demand_only: bool) -> bool:
        """Under the lock: start one more thread; False where the system gives none."""
        # Daemon threads: one stuck in a source that never answers must not keep the process alive.
        thread = threading.Thread(target=self._work, args=(demand_only,), name="fetch", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            log.warning("cannot start a thread to fetch blocks with: %s", exc)
            return False
        self.threads = [*(one for one in self.threads if one.is_alive()), thread]
        return True

    def _work(self, demand_only: bool) -> None:
        board = self._board
        while True:
            with board.lock:
                while (batch := board.take(demand_only)) is None:
                    if board.closing.is_set():
                        return
                    board.work_came.wait(0.1 if not board.idle() else 5.0)
                flight = Flight(batch, time.monotonic(), demand_only, board.schedule.stream_of(batch))
                board.flights.add(flight)
                if board.schedule.demanded:
                    board.work_came.notify()
            self._fly(flight)
            with board.lock:
                board.flights.discard(flight)
                board.work_done.notify_all()
                if flight.replaced:
                    return
                if flight in self._unreplaced:
                    self._unreplaced.remove(flight)
