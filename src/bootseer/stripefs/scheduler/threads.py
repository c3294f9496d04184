"""The threads of the read scheduler: they transfer what `Scheduler` decides, and check the bytes.

Concurrency: one lock guards the scheduler and everything here; no transfer, check, copy or request to the NameNode
happens under it. Callers of `Engine.read` only wait. Workers (as many as there are transfers under way) do one thing
after another; a watcher looks every 10 ms at what is late, while there is anything. Idle threads end after 10 s. A call
returns or raises when no transfer can touch the caller's memory any more: it cancels them and waits. See
docs/internals/engine.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from bootseer.errors import BootseerError, UnavailableError
from bootseer.hdfs import datanode
from bootseer.hdfs.records import FileBlocks, Located
from bootseer.storage.interface import Piece
from bootseer.stripefs.scheduler.blockfile import (
    BlockFile,
    Transport,
    land,
    let_go,
    located,
    transfer,
    views,
)
from bootseer.stripefs.scheduler.model import Attempt, Join, Outcome, Place, Relocate, Request, Run, Tuning
from bootseer.stripefs.scheduler.policy import FollowUp, Scheduler

_log = logging.getLogger(__name__)

TICK = 0.010
_IDLE = 10.0


class NodeLook(msgspec.Struct, frozen=True, kw_only=True):
    """One DataNode as this process has seen it. ``state`` of its breaker: ``closed`` (used), ``open`` (left alone for
    ``open_seconds`` more), ``half-open`` (one transfer tries it). ``rate``: bytes a second, None while unknown."""

    address: str
    state: str
    open_seconds: float
    failures: int
    rate: float | None
    latency: float
    flying: int
    served: int


_Job = Callable[[], None]


class Engine:
    """Reads pieces of `BlockFile`s. One per process is enough (`shared`): DataNodes are then known to all readers."""

    def __init__(self, transport: Transport = datanode, *, tuning: Tuning | None = None) -> None:
        self.scheduler = Scheduler(tuning)
        # one for each transfer that may be under way (as many again may be silent), some for questions to the NameNode
        self._most = 2 * (self.scheduler.tuning.total + self.scheduler.tuning.small_total) + 8
        self._transport = transport
        self._lock = threading.Lock()
        self._ready: deque[_Job] = deque()
        self._wake, self._stir = threading.Condition(self._lock), threading.Condition(self._lock)
        self._idle = self.threads = 0
        self._watcher: threading.Thread | None = None
        self._inbox: deque[Request] = deque()

    def read(self, pieces: Sequence[tuple[BlockFile, Piece]]) -> None:
        """Fill and check all ``pieces``. The promises of `bootseer.storage.interface.Backend.read_many`."""
        spans = [span for file, piece in pieces for span in file.spans(piece)]
        if not spans:
            return
        done = threading.Event()
        request = Request(spans, next((piece.name or file.path for file, piece in pieces), ""), done.set)
        try:
            # An interrupt may strike the main thread between any two steps. So callers do nothing to the scheduler:
            # a worker takes the request from here, and what is lost below the watcher makes up for.
            self._inbox.append(request)
            self._kick()
            while not done.wait(1.0):
                self._kick()
        except BaseException as exc:
            self._give_up(request, done, exc)
            raise
        finally:
            for span in spans:  # a hedge that lost may still be under way, with the span, but without this memory
                views(span).parts.clear()
                if span.join is not None:
                    span.join.tag = None
        if (error := request.error) is not None:
            request.error = None
            try:
                raise error
            finally:
                # its traceback holds this frame, and that the caller's memory: not in a circle, nor by the pieces
                del error, request, spans, pieces

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

    def _give_up(self, request: Request, done: threading.Event, error: BaseException) -> None:
        """The caller was interrupted: it may go on when nothing touches its memory any more."""
        while True:
            try:
                with self._lock:
                    self.scheduler.fail(request, error)
                    if request.finished:
                        return
                self._stop_cancelled()
                if done.wait(0.05):
                    return
            except KeyboardInterrupt:  # one is being raised already
                continue

    def _know(self, places: Iterable[Place]) -> None:
        for place in places:
            for node in located(place).nodes:
                self.scheduler.node(node.uuid, node.address)

    def look(self, files: Sequence[BlockFile]) -> dict[str, NodeLook]:
        """The DataNodes that have blocks of ``files``, by key."""
        places = [place for file in files for place in file.places]
        with self._lock:
            self._know(places)
            now, nodes = time.monotonic(), self.scheduler.nodes
            return {
                key: NodeLook(
                    address=nodes[key].address,
                    state=nodes[key].breaker.state,
                    open_seconds=nodes[key].breaker.open_seconds(now),
                    failures=nodes[key].breaker.failures,
                    rate=nodes[key].rate,
                    latency=nodes[key].latency,
                    flying=nodes[key].flying,
                    served=nodes[key].served,
                )
                for key in {key for place in places for key in place.keys}
            }

    # -- under the lock -------------------------------------------------------------------------------------------

    def _next(self) -> _Job | None:
        """What the calling worker should do next."""
        try:
            while self._inbox:
                request = self._inbox.popleft()
                self._know([span.place for span in request.spans])
                self.scheduler.submit(request, time.monotonic())
            self._dispatch(here=True)
        except Exception as exc:
            self._panic(exc)
        return self._ready.popleft() if self._ready else None

    def _dispatch(self, here: bool = False) -> None:
        """Have done what can be done now; ``here``: the calling thread does the first of it."""
        now = time.monotonic()
        while (doing := self.scheduler.take(now)) is not None:
            if isinstance(doing, Attempt):
                doing.handle = self._transport.Transfer()
                self._ready.append(partial(self._attempt, doing))
            else:
                self._ready.append(partial(self._relocate, doing))
        others = len(self._ready) - here
        for _ in range(min(others - self._idle, self._most - self.threads)):
            self._spawn()
        if others > 0:
            self._wake.notify(others)

    def _spawn(self) -> None:
        self.threads += 1
        self._idle += 1
        threading.Thread(target=self._work, name=f"bootseer-read-{self.threads}", daemon=True).start()

    def _panic(self, error: BaseException) -> None:
        """A bug in what decides: the readers get it, nobody hangs."""
        _log.error("the read scheduler failed: %r", error, exc_info=error)
        for request in list(self.scheduler.requests):
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
                job = self._next()
            while job is not None:
                try:
                    job()
                except Exception as exc:
                    with self._lock:
                        self._panic(exc)
                self._stop_cancelled()
                with self._lock:
                    job = self._next()
            with self._lock:
                self._idle += 1

    def _watch(self) -> None:
        left_over: object = None
        while True:
            with self._lock:
                if not self.scheduler.busy and not self._inbox:
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

    @contextlib.contextmanager
    def _bugs_of(self, request: Request | None) -> Iterator[None]:
        """A bug in here, or no memory: the reader gets it, nobody hangs."""
        try:
            yield
        except BaseException as exc:
            if request is not None:
                with self._lock:
                    self.scheduler.fail(request, exc)

    def _attempt(self, attempt: Attempt) -> None:
        outcome: Outcome = Outcome.UNASKED
        error: BootseerError | None = None
        with self._bugs_of(attempt.run.span.request if attempt.run is not None else None):
            outcome, error = transfer(attempt, self._transport)
        if error is not None:
            let_go(error)
        with self._lock:
            now = time.monotonic()
            then = self.scheduler.ended(attempt, outcome, error, now)
            if outcome is Outcome.DAMAGED and not attempt.verify:
                self.scheduler.confirm(attempt, now)
            elif outcome is Outcome.CORRUPT:
                self._corrupt(attempt, error)
        while then is not None:
            if isinstance(then, Join):
                self._join(then)
                break
            then = self._land(then)

    def _land(self, run: Run) -> FollowUp:
        with self._bugs_of(run.span.request):  # if not all bytes are there
            land(run)
        with self._lock:
            return self.scheduler.copied_back(run, time.monotonic())

    def _join(self, join: Join) -> None:
        error: BootseerError | None = None
        with self._bugs_of(join.arrived[0][0].span.request):
            try:
                views(join).check(views(join).parts)
            except BootseerError as exc:
                let_go(exc)
                error = exc
        with self._lock:
            self.scheduler.joined(join, error, time.monotonic())

    def _corrupt(self, attempt: Attempt, error: BootseerError | None) -> None:
        file, where = attempt.place.file, located(attempt.place)
        _log.warning("a replica of %s is damaged: %s", getattr(file, "path", "a file"), error)
        for index, node in enumerate(where.nodes):
            if node.uuid == attempt.node.key and isinstance(file, BlockFile):
                self._ready.append(partial(self._report, file, where.picked([index])))

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

    def _report(self, file: BlockFile, replica: Located) -> None:
        """Tell the NameNode that a replica is damaged."""
        try:
            file.files.report(replica)
        except BootseerError as exc:  # somebody else will meet it
            _log.warning("cannot report a damaged replica of %s: %s", file.path, exc)


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
