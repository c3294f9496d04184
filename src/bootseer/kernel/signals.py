"""Signals of a process that runs a command for somebody: which it passes on, and which it must not leave ignored."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@contextlib.contextmanager
def heard(pass_on: Callable[[int], None]) -> Iterator[None]:
    """``pass_on`` is called with each of `PASSED_ON` that comes meanwhile; in another thread than the main one nothing
    is heard. What we ignore (as under nohup) stays ignored, and the command inherits that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: pass_on(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def restore() -> None:
    """What Python ignores ends a command again, as one that a shell starts."""
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
