"""Calls with a deadline: a blocking call runs in a thread of its own, and its caller waits no longer than it said.

A call that never returns keeps its thread; the others go on, until so many hang that another would be no use: then new
calls fail at once. The threads are daemons: such a call does not hold up the end of the process. Any thread may call
`Workers.call`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from bootseer.errors import UnavailableError

T = TypeVar("T")

LIMIT = 64
"""Calls past their deadline that may be under way. Each holds a thread, and perhaps a buffer of a few MiB."""


class Workers:
    """Threads for calls of one kind. ``storage``: whom messages say that they wait for."""

    def __init__(self, storage: str = "HDFS") -> None:
        self._storage = storage
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock, self._late = threading.Lock(), 0  # a forked child has none of its parent's threads

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """``function()``, or `TimeoutError` after ``seconds``; the call itself then goes on unseen. `UnavailableError`
        at once while `LIMIT` earlier calls go on so."""
        with self._lock:
            if self._late >= LIMIT:
                raise UnavailableError(
                    f"{self._late} earlier calls to {self._storage} have not ended after their deadlines",
                    hint="check that its servers run and are reachable from here",
                )
        call = Future[T]()
        threading.Thread(target=_run, args=(call, [function]), name="bootseer-call", daemon=True).start()
        try:
            if wait([call], seconds).done:
                return call.result()
            with self._lock:
                self._late += 1
            call.add_done_callback(self._ended)
            raise TimeoutError
        finally:
            del call  # an error refers to this frame: no circle

    def _ended(self, call: Future[T]) -> None:
        with self._lock:
            self._late -= 1


def _run(call: Future[T], functions: list[Callable[[], T]]) -> None:
    """One call. When its caller goes on, its thread has let go of the function, and ends: both may hold a file open."""
    try:
        call.set_result(functions.pop()())
    except BaseException as exc:
        call.set_exception(exc)
    finally:
        del call
