"""Waiting for what happens elsewhere, never for ever; and calls that may hang, in a thread that nobody waits for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from bootseer.errors import UnavailableError

A = TypeVar("A")
T = TypeVar("T")


def until(
    condition: Callable[[], object], seconds: float = 10.0, what: str = "what was waited for", *, step: float = 0.005
) -> None:
    """Ask for ``condition`` every ``step`` seconds; what is unavailable meanwhile makes it false.

    Raises `UnavailableError` when it does not become true within ``seconds``.
    """
    end = time.monotonic() + seconds
    problem = ""
    while True:
        try:
            if condition():
                return
        except UnavailableError as exc:
            problem = f": {exc}"
        if time.monotonic() > end:
            raise UnavailableError(f"{what} did not happen within {seconds:g} s{problem}")
        time.sleep(step)


def together(work: Callable[[A], T], of: Iterable[A]) -> list[T]:
    """``work`` of each, all at once in threads; the results in order, or the first error."""
    items = list(of)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))


def later(call: Callable[[], T]) -> Future[T]:
    """What ``call`` returns or raises, from a daemon thread: it may be one that never returns."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=work, daemon=True).start()
    return future


def read_later(path: Path, offset: int, length: int) -> Future[bytes]:
    """``length`` bytes of the file at ``path`` from ``offset`` on, with one pread."""

    def call() -> bytes:
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)

    return later(call)
