"""One flight from its request to its landing: read from the sources, try again, put back, or leave.

Lock: that of the `Board` (see there); it is not held while a source is asked.
"""

from __future__ import annotations

import contextlib
import logging
import time

from bootseer.blocks.fetch.board import Board
from bootseer.blocks.fetch.flight import Flight
from bootseer.blocks.fetch.landing import Landing
from bootseer.blocks.fetch.queue import Batch, Priority
from bootseer.blocks.fetch.source import Sources
from bootseer.blocks.fetch.stream import HotStream
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError

log = logging.getLogger(__name__)

_FIRST_DELAY = 0.05
_LAST_DELAY = 2.0


class Pilot:
    """Brings flights from ``sources`` (those of the hot stream from its own) to ``landing``; for many threads."""

    def __init__(self, board: Board, sources: Sources, landing: Landing) -> None:
        self._board = board
        self._sources = sources
        self._landing = landing

    def fly(self, flight: Flight) -> None:
        """Fetch the batch of ``flight``. Never raises: what fails is told to its readers, or goes back in the queue."""
        batch = flight.batch
        try:
            if flight.stream is not None:
                self._follow(flight, flight.stream)
            else:
                self._fly(flight)
        except Exception as exc:
            log.exception("fetching blocks %d..%d failed", batch.blocks[0], batch.blocks[-1])
            if flight.stream is not None:
                self._give_back(flight, flight.stream, repr(exc))
            else:
                for block in batch.blocks:
                    self._landing.finish([(block, None, UnavailableError(f"fetching block {block} failed: {exc!r}"))])

    def _fly(self, flight: Flight) -> None:
        board, batch = self._board, flight.batch
        delay = _FIRST_DELAY
        while True:
            flight.started = time.monotonic()
            try:
                raw = self._sources.read(batch.pack, batch.offset, batch.length)
                board.count(batch.priority, batch.length)
                break
            except UnavailableError as exc:
                if not self._again(flight, exc, delay):
                    return
                delay = min(2 * delay, _LAST_DELAY)
            except BootseerError as exc:
                log.warning("%s", exc)
                if not isinstance(exc, DataError):
                    self._refuse(batch, exc)
                    return
                # Perhaps only a part of the range is damaged or cut off: look at each block on its own.
                raw = b""
                break
        with board.lock:
            board.schedule.answered()
        lost = self._landing.land(batch, raw)
        with board.lock:
            if not flight.abandoned:
                board.schedule.landed(flight, time.monotonic() - flight.started)
        if lost and not board.closing.wait(_FIRST_DELAY):
            board.put_back(batch.only(lost), None)

    def _follow(self, flight: Flight, stream: HotStream) -> None:
        """A range of the hot stream: its frames land while the rest of it arrives."""
        board = self._board
        flight.started = time.monotonic()
        try:
            with contextlib.closing(stream.parts(flight.batch)) as parts:
                for part, raw in parts:
                    board.count(part.priority, part.length, requests=part.offset == flight.batch.offset)
                    lost = self._landing.land(part, raw)
                    with board.lock:
                        if flight.abandoned:
                            return
                        flight.started = time.monotonic()  # it gets on
                        if board.schedule.advanced(flight, stream, part):
                            board.work_came.notify()
                    if lost and not board.closing.wait(_FIRST_DELAY):
                        board.put_back(part.only(lost), None)
                    if board.schedule.full:
                        self._give_back(flight, stream)
                        return
                    if board.closing.is_set():
                        return
        except UnavailableError as exc:
            self._interrupted(flight, stream, exc)
        except BootseerError as exc:
            log.warning("%s", exc)
            self._give_back(flight, stream, str(exc))

    def _give_back(self, flight: Flight, stream: HotStream, why: str = "") -> None:
        """What has not come of a range is for others to fetch, unless they do. ``why``: the stream is of no use."""
        board = self._board
        with board.lock:
            if flight.abandoned:
                return
            if why:
                board.schedule.leave(flight.batch, stream, why)
            else:
                board.schedule.put_back(flight.batch, stream)
            board.work_came.notify_all()

    def _interrupted(self, flight: Flight, stream: HotStream, exc: UnavailableError) -> None:
        """The rest of a range did not come."""
        board = self._board
        with board.lock:
            board.stats.retries += 1
            self._sources.heed(exc)  # it lies in the same store
            rest = self._sources.rest
            now = time.monotonic()
            board.schedule.refused(flight.batch, now, exc, until=now + rest if rest else 0.0)
        self._give_back(flight, stream)

    def _again(self, flight: Flight, exc: UnavailableError, delay: float) -> bool:
        """The source did not answer. True: try the same batch again (a reader waits for it)."""
        board, batch = self._board, flight.batch
        with board.lock:
            board.stats.retries += 1
            now = time.monotonic()
            rest = self._sources.rest
            board.schedule.refused(batch, now, exc, until=now + rest if rest else 0.0)
            if flight.abandoned:
                return False
            waited_for = any(block in board.waiting for block in batch.blocks)
        if batch.priority is not Priority.DEMAND or not waited_for or board.closing.is_set():
            board.put_back(batch, None)
            return False
        log.warning("fetch of blocks %d..%d: %s; trying again", batch.blocks[0], batch.blocks[-1], exc)
        flight.started = now + max(delay, rest)
        # A new reader ends the pause: it must not wait for a store that is back already. But not every microsecond, and
        # not where the source has said when to come again.
        asked = board.asked
        if not board.closing.wait(max(rest, _FIRST_DELAY)):
            with board.lock:
                board.hurry.wait_for(
                    lambda: board.asked != asked or board.closing.is_set(), delay - _FIRST_DELAY - rest
                )
        return not board.closing.is_set()

    def _refuse(self, batch: Batch, exc: BootseerError) -> None:
        """The source says no, and would say so again: readers hear it at once, prefetch goes on after a pause. What is
        gone is left; for the rest somebody may mend the permission."""
        board = self._board
        gone = isinstance(exc, NotFoundError)
        with board.lock:
            settled = [one for block in batch.blocks for one in board.waiting.came(block, None, exc)]
            board.schedule.refused(batch, time.monotonic(), exc)
            if gone:
                board.queue.done(batch.blocks)
                for block in batch.blocks:
                    board.queue.give_up(block)
            else:
                board.schedule.put_back(batch, None)
        for request in settled:
            request.answer()
