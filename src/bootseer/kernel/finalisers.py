"""Finalisers of objects that nobody closed: who is in one, and how it gives back what such an object holds.

A finaliser runs anywhere: while its thread holds any lock, and at the end of the interpreter, when no other thread goes
on and none can be started. So it takes no lock, waits for nothing and starts no thread: `later` has another thread do
that, which `prepare` started while the object was made. A test looks for those that do it themselves."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType

_log = logging.getLogger(__name__)

_FINALIZE = weakref.finalize.__call__.__code__
"""Its argument is the reference whose object is gone; who calls it himself gives none."""
_works: SimpleQueue[Callable[[], object]] = SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def prepare() -> None:
    """Have the thread of `later` run."""
    global _thread
    if _thread is None:
        with _lock, contextlib.suppress(RuntimeError):  # of a program that ends, where none can be started
            if _thread is None:
                made = threading.Thread(target=_work, args=(_works,), name="bootseer-finalisers", daemon=True)
                made.start()
                _thread = made


def later(work: Callable[[], object]) -> None:
    """Have ``work`` done soon by another thread; never at the end of the interpreter. Errors become log lines."""
    _works.put(work)


def settle(seconds: float) -> None:
    """Wait until what came before is done, for at most ``seconds``. Not for finalisers."""
    if _thread is not None:
        done = threading.Event()
        later(done.set)
        done.wait(seconds)


def running() -> int:
    """Which finaliser the caller is in, as a number; 0: in none. Of those in Python, `weakref.finalize` too, and of
    files written in Python, which the finaliser of `io.IOBase` closes; those of ``io`` itself ask a file that they
    close for its ``_dealloc_warn`` first."""
    if sys.is_finalizing():
        return -1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _finalises(frame):
        frame = frame.f_back
    return id(frame) if frame is not None else 0


def _finalises(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name == "__del__" or (code is _FINALIZE and frame.f_locals["_"] is not None):
        return True
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return isinstance(first, io.IOBase) and bool(getattr(first, "_finalizing", False))


def _work(works: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        work: Callable[[], object] | None = works.get()
        try:
            assert work is not None
            work()
        except Exception as exc:
            _log.warning("what nobody closed is not given back: %s", exc)
        work = None  # it may hold much, and the next one be late


def _forget() -> None:
    global _works, _thread, _lock
    _works, _thread, _lock = SimpleQueue(), None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
