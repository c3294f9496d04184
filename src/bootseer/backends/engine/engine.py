"""The threads of the read scheduler (docs/internals/engine.md): they transfer what `Scheduler` decides, and check the
bytes.

Concurrency: one lock guards the scheduler and everything here; no transfer, check, copy or request to the NameNode
happens under it. Callers of `Engine.read` only wait; workers transfer; a watcher looks at what is late. A call returns
or raises when no transfer can touch the caller's memory any more."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from bootseer.backends.engine import memory
from bootseer.backends.engine.model import Attempt, CopyBack, Outcome, Place, ReadRequest, Relocate, Tuning
from bootseer.backends.engine.policy import TICK, Scheduler
from bootseer.backends.engine.transport import BlockFile, Read, land, let_go, replicas_of, transfer, views, wrong
from bootseer.backends.interface import Piece
from bootseer.errors import BootseerError, UnavailableError
from bootseer.hdfs.connection import Transfer

if TYPE_CHECKING:
    from bootseer.hdfs.records import FileBlocks

_log = logging.getLogger(__name__)

_IDLE = 10.0


_Job = Attempt | Relocate


class Engine:
    """Reads pieces of `BlockFile`s. One per process is enough (`shared`): DataNodes are then known to all readers."""

    def __init__(self, read: Read | None = None, *, tuning: Tuning | None = None) -> None:
        if read is None:
            from bootseer.hdfs import datanode  # needs the extra ``hdfs``

            read = datanode.read
        self.scheduler = Scheduler(tuning, memory.process())
        # one for each transfer that may be under way (as many again may be silent), some for questions to the NameNode
        self._most = 2 * (self.scheduler.tuning.total + self.scheduler.tuning.small_total) + 8
        self._read: Read = read
        self._lock = threading.Lock()
        self._ready: deque[_Job] = deque()
        self._wake, self._stir = threading.Condition(self._lock), threading.Condition(self._lock)
        self._idle = self.threads = 0
        self._watcher: threading.Thread | None = None
        self._inbox: deque[tuple[ReadRequest, threading.Event]] = deque()
        self._waiting: dict[ReadRequest, threading.Event] = {}

    def read(self, pieces: Sequence[tuple[BlockFile, Piece]]) -> None:
        """Fill and check all ``pieces``. The promises of `bootseer.backends.interface.Backend.read_many`."""
        reading = Reading(self, pieces)
        try:
            reading.wait()
        finally:
            del reading, pieces  # the traceback of an error holds this frame, and that the caller's memory

    def begin(self, pieces: Sequence[tuple[BlockFile, Piece]]) -> Reading:
        """As `read`, for a caller that waits later: its `Reading.wait` must follow, or `Reading.leave`."""
        reading = Reading(self, pieces)
        reading.begin()
        return reading

    def _kick(self) -> None:
        """See to it that a worker looks at the inbox, and that the watcher watches."""
        with self._lock:
            if not self._idle and self.threads < self._most:
                self._spawn()
            self._wake.notify()
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(target=self._watch, name="bootseer-read-watch", daemon=True)
                self._watcher.start()
            self._stir.notify()

    def _give_up(self, request: ReadRequest, done: threading.Event, error: BaseException) -> None:
        """The caller was interrupted: it may go on when nothing touches its memory any more."""
        while True:
            try:
                with self._lock:
                    self.scheduler.fail(request, error)
                    if request.finished:
                        self._waiting.pop(request, None)
                        return
                self._stop_cancelled()
                if done.wait(0.05):
                    return
            except KeyboardInterrupt:  # one is being raised already
                continue

    def _know(self, places: Iterable[Place]) -> None:
        for place in places:
            for key, node in replicas_of(place).nodes.items():
                self.scheduler.node(key, node.address)

    # -- under the lock -------------------------------------------------------------------------------------------

    def _next(self) -> _Job | None:
        """What the calling worker should do next."""
        now = time.monotonic()
        while self._inbox:
            request, done = self._inbox[0]
            self._waiting[request] = done  # before all that may fail: `_panic` tells who waits
            self._inbox.popleft()
            self._know([span.place for span in request.spans])
            self.scheduler.submit(request, now)
        self._dispatch(here=True)
        return self._ready.popleft() if self._ready else None

    def _dispatch(self, here: bool = False) -> None:
        """Have done what can be done now; ``here``: the calling thread does the first of it."""
        now = time.monotonic()
        while (doing := self.scheduler.take(now)) is not None:
            if isinstance(doing, Attempt):
                doing.handle = Transfer()
            self._ready.append(doing)
        others = len(self._ready) - here
        for _ in range(min(others - self._idle, self._most - self.threads)):
            self._spawn()
        if others > 0:
            self._wake.notify(others)
        for request in [request for request in self._waiting if request.finished]:
            self._waiting.pop(request).set()

    def _spawn(self) -> None:
        self.threads += 1
        self._idle += 1
        threading.Thread(target=self._work, name=f"bootseer-read-{self.threads}", daemon=True).start()

    def _panic(self, error: BaseException) -> None:
        """A bug in what decides: the readers get it, nobody hangs."""
        _log.error("the read scheduler failed: %r", error, exc_info=error)
        for request in list(self._waiting):
            self.scheduler.fail(request, error)

    # -- threads --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        # counted as idle by who started this thread
        while True:
            with self._lock:
                until = time.monotonic() + _IDLE
                while not self._ready and not self._inbox:
                    if (left := until - time.monotonic()) <= 0:
                        self._idle -= 1
                        self.threads -= 1
                        return
                    self._wake.wait(left)
                self._idle -= 1
                job = self._guarded_next()
            while job is not None:
                try:
                    self._do(job)
                except Exception as exc:
                    with self._lock:
                        self._panic(exc)
                self._stop_cancelled()
                with self._lock:
                    job = self._guarded_next()
            with self._lock:
                self._idle += 1

    def _guarded_next(self) -> _Job | None:
        try:
            return self._next()
        except Exception as exc:
            self._panic(exc)
            return None

    def _watch(self) -> None:
        left_over: object = None
        while True:
            with self._lock:
                if not self._waiting and not self.scheduler.busy and not self._inbox:
                    if not self._stir.wait(_IDLE) and not self._inbox:
                        self._watcher = None
                        return
                    continue
                try:
                    self.scheduler.tick(time.monotonic())
                    self._dispatch()
                except Exception as exc:
                    self._panic(exc)
                first: object = self._ready[0] if self._ready else self._inbox[0] if self._inbox else None
                if first is not None and first is left_over and self.threads < 2 * self._most:
                    self._spawn()  # an interrupt may have made the count of idle workers wrong
                left_over = first
            self._stop_cancelled()
            time.sleep(TICK)

    def _stop_cancelled(self) -> None:
        with self._lock:
            cancels = self.scheduler.cancels()
        for attempt in cancels:
            if attempt.handle is not None:
                attempt.handle.cancel()

    def _do(self, job: _Job) -> None:
        if isinstance(job, Attempt):
            self._attempt(job)
        else:
            self._relocate(job)

    def _attempt(self, attempt: Attempt) -> None:
        crash: BaseException | None = None
        try:
            outcome, error = transfer(attempt, self._read)
        except BaseException as exc:  # a bug, or no memory: the reader gets it, nobody hangs
            crash, outcome, error = exc, Outcome.FAILED, UnavailableError(f"cannot read: {exc!r}")
        if error is not None:
            let_go(error)
        with self._lock:
            now = time.monotonic()
            if crash is not None and attempt.run is not None:
                self.scheduler.fail(attempt.run.span.request, crash)
            landing = self.scheduler.ended(attempt, outcome, error, now)
            if outcome is Outcome.DAMAGED and not attempt.verify:
                self.scheduler.confirm(attempt, now)
        if landing is not None:
            self._land(landing)
        elif outcome is Outcome.CORRUPT:
            self._report(attempt, error)

    def _land(self, landing: CopyBack) -> None:
        crash: BaseException | None = None
        try:
            land(landing)
        except BaseException as exc:  # not all bytes are there: the reader gets it
            crash = exc
        with self._lock:
            if crash is not None:
                self.scheduler.fail(landing.run.span.request, crash)
            self.scheduler.copied_back(landing, time.monotonic())

    def _report(self, attempt: Attempt, error: BootseerError | None) -> None:
        """Tell the NameNode that the replica of ``attempt`` is damaged. The watcher goes on with others meanwhile."""
        file, located = attempt.place.file, replicas_of(attempt.place).located
        assert isinstance(file, BlockFile)
        _log.warning("a replica of %s is damaged: %s", file.path, error)
        mine = [index for index, node in enumerate(located.nodes) if node.uuid == attempt.node.key]
        try:
            if mine:  # else there are fresh locations, without it
                file.files.report(located.picked(mine))
        except BootseerError as exc:  # somebody else will meet it
            _log.warning("cannot report a damaged replica of %s: %s", file.path, exc)

    def _relocate(self, job: Relocate) -> None:
        file = job.file
        assert isinstance(file, BlockFile)
        error: BootseerError | None = None
        fresh: FileBlocks | None = None
        try:
            fresh = file.locate()
        except BootseerError as exc:
            error = exc
        except Exception as exc:  # a bug: the readers get it, nobody hangs
            error = UnavailableError(f"cannot locate {file.path}: {exc!r}")
        _log.info("asked again where the blocks of %s are%s", file.path, f": {error}" if error else "")
        with self._lock:
            if fresh is not None:
                file.relocate(fresh)
                self._know(file.places)
            self.scheduler.relocated(file, error, time.monotonic())


class Reading:
    """One call of a reader: begun, and waited for or left, by one thread. It ends in the process that made it: a forked
    child has its engine without the threads."""

    def __init__(self, engine: Engine, pieces: Sequence[tuple[BlockFile, Piece]]) -> None:
        self._engine = engine
        self._split: list[Callable[[], None]] = []
        self._spans = [span for file, piece in pieces for span in file.spans(piece, self._split)]
        self._request = ReadRequest(self._spans, next((piece.name or file.path for file, piece in pieces), ""))
        self._begun, self._done, self._process = False, threading.Event(), os.getpid()

    def begin(self) -> None:
        # An interrupt may strike the main thread between any two steps. So callers do nothing to the scheduler: a
        # worker takes the request from here, and what is lost below the watcher makes up for.
        self._begun = True
        if self._spans:
            self._engine._inbox.append((self._request, self._done))
            self._engine._kick()
        else:
            self._done.set()

    def wait(self) -> None:
        """Until all is there and right, or raise; it is begun here where it was not."""
        if self._process != os.getpid():
            self._forget()
            raise UnavailableError("a forked child cannot wait for a read of its parent")
        try:
            if not self._begun:
                self.begin()
            while not self._done.wait(1.0):
                self._engine._kick()
        except BaseException as exc:
            self._engine._give_up(self._request, self._done, exc)
            raise
        finally:
            self._forget()
        if (error := self._request.error or wrong(self._split)) is not None:
            let_go(error)
            self._request.error = None
            self._split.clear()
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: not in a circle

    def leave(self) -> None:
        """Nobody wants it any more. Returns when nothing touches the caller's memory."""
        if self._begun and self._process == os.getpid() and not self._done.is_set():
            self._engine._give_up(self._request, self._done, UnavailableError("nobody waits for it"))
        self._forget()

    def _forget(self) -> None:
        for span in self._spans:  # a hedge that lost may still be under way, with the span, but without this memory
            views(span).parts.clear()
        self._spans = []


_engine: Engine | None = None
_engine_lock = threading.Lock()


def _forget() -> None:
    global _engine, _engine_lock
    _engine, _engine_lock = None, threading.Lock()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_forget)


def shared() -> Engine:
    """The engine of this process."""
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = Engine()
        return _engine
