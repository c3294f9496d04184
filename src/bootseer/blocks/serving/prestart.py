"""Block servers that have started Python and wait to be told what to serve.

Starting one takes longer than all the rest of a mount, nearly all of it imports (``python -X importtime -c "import
bootseer.blocks.serving.server"``); a program that knows it will mount something starts the process beforehand. It ends
by itself when this process does. The waiting ones are kept in one list of this process, with a lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)

SERVER = (sys.executable, "-m", "bootseer.blocks.serving.server")
_END_SECONDS = 2.0
_GROUP_SECONDS = 0.3


class Starting(NamedTuple):
    """A server on its way, and the descriptor it answers on; `reap` its first process after the answer."""

    answer_fd: int
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End all its processes: they share the group of the first one."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> None:
        os.close(self.answer_fd)
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5.0)


class _Waiting(NamedTuple):
    tell_fd: int
    server: Starting


_waiting: list[_Waiting] = []
_lock = threading.Lock()


@contextlib.contextmanager
def prestart(store_url: str, count: int = 1) -> Iterator[None]:
    """Have ``count`` servers ready for the next mounts of this process; unused ones end with the context. They have
    imported what the store at ``store_url`` needs."""
    mine = []
    try:
        for _ in range(count):
            mine.append(_prepare(store_url))
            with _lock:
                _waiting.append(mine[-1])
    except OSError as exc:
        log.warning("cannot start a block server beforehand: %s", exc)
    try:
        yield
    finally:
        for one in mine:
            with contextlib.suppress(ValueError):
                with _lock:
                    _waiting.remove(one)
                os.close(one.tell_fd)
                # It answers nothing and ends: by then nothing of it is left that its starter could trip over.
                select.select([one.server.answer_fd], [], [], _END_SECONDS)
                one.server.reap()
                _await_group(one.server.process.pid)


@contextlib.contextmanager
def prestart_one(store_url: str, state_dir: Path, command: Sequence[str] = SERVER) -> Iterator[None]:
    """`prestart` for the one mount in this context. Nothing when a server waits already, or serves something here that
    this mount may well join, or for a ``command`` of others."""
    if tuple(command) != SERVER or _waiting or any(state_dir.glob("trees/*/spec.json")):
        yield
        return
    with prestart(store_url):
        yield


def _await_group(group: int) -> None:
    """Wait a moment for the last of its processes."""
    until = time.monotonic() + _GROUP_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.005)


def take(command: Sequence[str], folder: Path, logfile: Path) -> Starting | None:
    """Let a waiting server serve ``folder``; None when there is none, or for a ``command`` of others."""
    if tuple(command) != SERVER:
        return None
    with _lock:
        if not _waiting:
            return None
        one = _waiting.pop()
    try:
        os.write(one.tell_fd, json.dumps([str(folder), str(logfile)]).encode() + b"\n")
        return one.server
    except OSError as exc:
        log.warning("the block server started beforehand is gone (%s); starting another", exc)
        one.server.reap()
        return None
    finally:
        os.close(one.tell_fd)


def spawn(argv: Sequence[str], *more: str, stdin: int, out: IO[bytes] | int) -> Starting:
    """Start a server: ``argv``, the descriptor to answer on, ``more``."""
    answer_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [*argv, str(write_fd), *more], stdin=stdin, stdout=out, stderr=out, pass_fds=[write_fd],
            start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(answer_fd)
        raise
    finally:
        os.close(write_fd)
    return Starting(answer_fd, process)


def _prepare(store_url: str) -> _Waiting:
    read_fd, tell_fd = os.pipe()
    try:
        return _Waiting(tell_fd, spawn([*SERVER, "-"], store_url, stdin=read_fd, out=subprocess.DEVNULL))
    except BaseException:
        os.close(tell_fd)
        raise
    finally:
        os.close(read_fd)
