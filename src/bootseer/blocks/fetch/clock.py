"""The clock of a fetcher: ends requests at their deadline, gives late blocks another chance.

Lock: that of the `Board` (see there); it is not held while a reader is answered.
"""

from __future__ import annotations

import logging
import threading
import time

from bootseer.blocks.fetch.board import Board
from bootseer.blocks.fetch.crew import Crew
from bootseer.blocks.fetch.deadlines import DEADLINE, Request
from bootseer.blocks.fetch.flight import Flight
from bootseer.errors import UnavailableError

log = logging.getLogger(__name__)

_RETRY_SPAWN = 1.0
_SECOND_LOOK = 1.0
"""Seconds after which a block that is late is fetched twice, whatever was fetched twice already."""
_STUMBLE = 0.05


class Clock:
    """One thread, which also answers readers that need not wait and has ``crew`` replace the threads it lost.

    ``name``: what the sources are called in errors and the log.
    """

    def __init__(self, board: Board, crew: Crew, name: str) -> None:
        self._board = board
        self._crew = crew
        self._name = name
        self._thread = threading.Thread(target=self._watch, name="fetch-clock", daemon=True)

    def start(self) -> None:
        """Raises `UnavailableError` where the system gives no thread."""
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise UnavailableError(f"cannot start a thread: {exc}", hint="raise the limit of processes") from None

    def join(self, until: float) -> None:
        """Wait for the thread to end, until that monotonic time at most."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _watch(self) -> None:
        """Ends requests at their deadline, gives late blocks another chance, answers those who need not wait."""
        board = self._board
        while True:
            settled: list[Request] = []
            try:
                with board.lock:
                    if not self._await_alarm():
                        return
                    settled += board.served
                    board.served.clear()
                    for request, block in board.waiting.alarms(time.monotonic()):
                        self._ring(request, block)
                        if request.settled:
                            settled.append(request)
                    self._crew.replace()
            except Exception:
                # Without this thread readers would wait for ever.
                log.exception("the clock of the fetcher stumbled; going on")
                board.closing.wait(_STUMBLE)
            for request in settled:
                request.answer()

    def _await_alarm(self) -> bool:
        """Under the lock: wait until there is something to do; False when that is to end."""
        board = self._board
        while not board.served:
            now = time.monotonic()
            at = board.waiting.next_alarm()
            if at is not None and at <= now:
                break
            if board.closing.is_set():
                return False
            longest = _RETRY_SPAWN if self._crew.short else 5.0
            board.alarm.wait(longest if at is None else min(longest, at - now))
            if self._crew.short:
                break
        return True

    def _ring(self, request: Request, block: int) -> None:
        """Under the lock: an alarm is due. No failure of one ends the clock."""
        board = self._board
        try:
            if block == DEADLINE:
                self.expire(request)
            else:
                now = time.monotonic()
                if board.schedule.hedge(block, board.flights):
                    board.work_came.notify()
                else:
                    board.waiting.alarm(now + _SECOND_LOOK, request, block)
        except Exception:
            log.exception("an alarm of the fetcher failed")

    def expire(self, request: Request) -> None:
        """Under the lock: a reader gives up. Where its flight is stuck, let the next reader start another one."""
        board = self._board
        block = min(request.pending)
        trouble = UnavailableError(
            f"block {block} did not come from {self._name} within {board.deadline:g} s",
            hint="check that the store answers",
        )
        pending = set(request.pending)
        board.waiting.settle(request, trouble)
        now = time.monotonic()
        board.schedule.last_demand = now
        for flight in list(board.flights):
            # Half: the flight began a little after the reader, or was a prefetch that the reader joined late.
            if now - flight.started >= board.deadline / 2 and not pending.isdisjoint(flight.batch.blocks):
                self._abandon(flight)

    def _abandon(self, flight: Flight) -> None:
        board = self._board
        log.warning("a request to %s does not return; leaving it", self._name)
        flight.abandoned = True
        board.flights.discard(flight)
        board.schedule.abandon(flight)
        self._crew.lose(flight)
        board.work_came.notify_all()
        board.work_done.notify_all()
