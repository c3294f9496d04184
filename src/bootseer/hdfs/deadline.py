"""Calls with a deadline: a blocking call runs in a worker thread, and its caller waits no longer than it said.

A call that never returns keeps its worker; the others go on, until so many hang that another would be no use: then new
calls fail at once. Workers are daemon threads, so that such a call does not hold up the end of the process either.

Concurrency: any thread may call `Workers.call`; each call has one worker for itself; idle workers are reused.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from bootseer.errors import UnavailableError

T = TypeVar("T")

LIMIT = 64
"""Calls past their deadline that may be under way. Each holds a thread, and perhaps a buffer of a few MiB."""


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: T
        self._error: BaseException | None = None
        self.late = False  # its caller has gone

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as exc:
            self._error = exc
        self._done.set()

    def wait(self, seconds: float) -> T:
        if not self._done.wait(seconds):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class Workers:
    """Runs calls in threads of its own, as many as there are calls under way. ``storage``: its name in messages."""

    def __init__(self, storage: str = "HDFS") -> None:
        self._storage = storage
        self._idle: list[queue.SimpleQueue[_Job[object]]] = []
        self._lock = threading.Lock()
        self._late = 0
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._idle, self._lock, self._late = [], threading.Lock(), 0  # a forked child has none of its parent's threads

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """``function()``, or `TimeoutError` after ``seconds``; the call itself then goes on unseen.

        `UnavailableError` at once while `LIMIT` earlier calls go on so.
        """
        job = _Job(function)
        with self._lock:
            if self._late >= LIMIT:
                raise UnavailableError(
                    f"{self._late} earlier calls to {self._storage} have not ended after their deadlines",
                    hint="check that its servers run and are reachable from here",
                )
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), name="bootseer-call", daemon=True).start()
        inbox.put(job)  # type: ignore[arg-type]
        try:
            return job.wait(seconds)
        except TimeoutError:
            with self._lock:
                if not job.done and not job.late:
                    job.late = True
                    self._late += 1
            raise

    def _work(self, inbox: queue.SimpleQueue[_Job[object]]) -> None:
        while True:
            try:
                job = inbox.get(timeout=10.0)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue
            job.run()
            with self._lock:
                self._late -= job.late
            del job  # its closure may hold a large buffer
            with self._lock:
                self._idle.append(inbox)
