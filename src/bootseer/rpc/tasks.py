"""Work that may take long, once at a time for each thing, in threads that no request waits for longer than it wants."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

from bootseer.errors import BootseerError, UnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Tasks:
    """Each task has a thread of its own, so that none waits for another, such as one whose store is away. There are as
    many as there are things, whose number the callers bound: images and volumes of this node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, Future[object]] = {}

    def start(self, thing: Hashable, work: Callable[[], T]) -> Future[T]:
        """``work`` of ``thing``, or what already does it. A failure that is no `BootseerError` has its traceback in the
        log; those who wait get each."""
        with self._lock:
            running: Future[T] | None = self._running.get(thing)  # type: ignore[assignment]
            if running is not None:
                return running
            future: Future[T] = Future()
            future.set_running_or_notify_cancel()
            self._running[thing] = future  # type: ignore[assignment]

        def run() -> None:
            try:
                finish = functools.partial(future.set_result, work())
            except BaseException as exc:
                finish = functools.partial(future.set_exception, exc)
                log.warning("%s", exc, exc_info=None if isinstance(exc, BootseerError) else exc)
            with self._lock:
                del self._running[thing]
            finish()

        threading.Thread(target=run, name=f"task {thing}", daemon=True).start()
        return future


async def within(task: Future[T], seconds: float, what: str) -> T:
    """The result of ``task``, which outlives this; `UnavailableError` when it takes longer than ``seconds``."""
    waiting = asyncio.wrap_future(task)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio says nobody asked
    await asyncio.wait({waiting}, timeout=seconds)
    if not waiting.done():
        raise UnavailableError(
            f"{what} did not come within {seconds:g} s", hint="the node goes on to bring them: try again"
        )
    return waiting.result()
