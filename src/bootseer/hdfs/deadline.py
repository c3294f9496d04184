"""Calls with a deadline: a blocking call runs in a worker thread, and its caller waits no longer than it said.

A call that never returns keeps its worker; the others go on. Workers are daemon threads, so that such a call does not
hold up the end of the process either.

Concurrency: any thread may call `Workers.call`; each call has one worker for itself; idle workers are reused.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: T
        self._error: BaseException | None = None

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
    """Runs calls in threads of its own, as many as there are calls under way."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[_Job[object]]] = []
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._idle, self._lock = [], threading.Lock()  # a forked child has none of its parent's threads

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """``function()``, or `TimeoutError` after ``seconds``; the call itself then goes on unseen."""
        job = _Job(function)
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), name="bootseer-hdfs", daemon=True).start()
        inbox.put(job)  # type: ignore[arg-type]
        return job.wait(seconds)

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
            del job  # its closure may hold a large buffer
            with self._lock:
                self._idle.append(inbox)
