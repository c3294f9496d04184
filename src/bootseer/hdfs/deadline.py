"""Calls with a deadline: a blocking call runs in a thread of its own, and its caller waits no longer than it said.

A call that never returns keeps its thread; the others go on, until so many hang that another would be no use: then new
calls fail at once. The threads are daemons, so that such a call does not hold up the end of the process either.

Concurrency: any thread may call `Workers.call`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from bootseer.errors import UnavailableError

T = TypeVar("T")

LIMIT = 64
"""Calls past their deadline that may be under way. Each holds a thread, and perhaps a buffer of a few MiB."""


class _Job(Generic[T]):
    """One call. Its thread refers to neither function nor outcome when its caller goes on: they may hold a file open.

    ``late``: its caller has gone.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._functions, self._values, self._errors = [function], list[T](), list[BaseException]()
        self.done, self.late = threading.Event(), False

    def run(self) -> None:
        try:
            self._values.append(self._functions.pop()())
        except BaseException as exc:
            self._errors.append(exc)
        self.done.set()

    def outcome(self) -> T:
        if self._errors:
            raise self._errors.pop()
        return self._values.pop()


class Workers:
    """Threads for calls of one kind. ``storage``: whom messages say that they wait for."""

    def __init__(self, storage: str = "HDFS") -> None:
        self._storage = storage
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock, self._late = threading.Lock(), 0  # a forked child has none of its parent's threads

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """``function()``, or `TimeoutError` after ``seconds``; the call itself then goes on unseen.

        `UnavailableError` at once while `LIMIT` earlier calls go on so.
        """
        with self._lock:
            if self._late >= LIMIT:
                raise UnavailableError(
                    f"{self._late} earlier calls to {self._storage} have not ended after their deadlines",
                    hint="check that its servers run and are reachable from here",
                )
        job = _Job(function)
        threading.Thread(target=self._run, args=(job,), name="bootseer-call", daemon=True).start()
        if job.done.wait(seconds):
            return job.outcome()
        with self._lock:
            if not job.done.is_set():
                job.late = True
                self._late += 1
        raise TimeoutError

    def _run(self, job: _Job[T]) -> None:
        job.run()
        with self._lock:
            self._late -= job.late
