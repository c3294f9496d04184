"""Block servers that have started Python and wait to be told what to serve.

Starting one takes longer than all the rest of a mount, nearly all of it imports (``python -X importtime -c "import
bootseer.blocks.serving.server"``); a caller that knows it will mount something starts the process beforehand, or lets
it be forked from this one (`FORK`). It ends by itself when this process does.
Concurrency: the waiting ones are kept in one list of this process; under its lock they are announced to, taken and
ended. In the server, one thread meets the store (`Met`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from bootseer.blocks.serving import twin
from bootseer.blocks.serving.twin import Forked
from bootseer.errors import BootseerError
from bootseer.store import Store

log = logging.getLogger(__name__)

SERVER = (sys.executable, "-m", "bootseer.blocks.serving.server")
FORK = ("fork",)
"""In place of a command: a server forked from this process, if that has no threads. See `twin` for who may ask for
that."""
_END_SECONDS = 2.0
_GROUP_SECONDS = 0.3
_OPEN_SECONDS = 1.0
_LOOK = "look"
PID = "pid"
"""File in a server's state folder that names the process."""


class Starting(NamedTuple):
    """A server process on its way, and the descriptor it answers on; `reap` its first process after the answer."""

    answer_fd: int
    process: subprocess.Popen[bytes] | Forked

    def reap(self) -> None:
        os.close(self.answer_fd)
        try:
            self.process.wait(5.0)
        except (subprocess.TimeoutExpired, TimeoutError):
            self.process.kill()
            self.process.wait(5.0)


class _Waiting(NamedTuple):
    tell_fd: int
    server: Starting


_waiting: list[_Waiting] = []
_lock = threading.Lock()


@contextlib.contextmanager
def standby(store_url: str, count: int = 1, *, fork: bool = False) -> Iterator[None]:
    """Have ``count`` servers ready for the next mounts of this process; unused ones end with the context.

    They load what the store at ``store_url`` needs, and meet it, before they are asked to. ``fork``: they are forked
    from this process, see `FORK`, where it can be (`twin.hindrance`).
    """
    mine = []
    try:
        for _ in range(count):
            mine.append(_prepare(store_url, fork=fork))
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
def ahead(store_url: str, state_dir: Path, command: Sequence[str] = SERVER) -> Iterator[None]:
    """`standby` for the one mount in this context, which takes a while before it needs its server. Nothing when a
    server waits already, or serves something here that this mount may well join, or for a ``command`` of others."""
    if tuple(command) not in (SERVER, FORK) or _waiting or any(state_dir.glob("trees/*/spec.json")):
        yield
        return
    with standby(store_url, fork=tuple(command) == FORK):
        yield


def _await_group(group: int) -> None:
    """Wait a moment for the last of its processes."""
    until = time.monotonic() + _GROUP_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.005)


def announce(profile: str) -> None:
    """Have the server that `take` would give look for hot packs in the store folder ``profile`` already."""
    line = json.dumps([_LOOK, profile]).encode() + b"\n"
    with _lock, contextlib.suppress(IndexError, OSError):  # none waits; or it is gone, which `take` finds out
        os.write(_waiting[-1].tell_fd, line)


def take(command: Sequence[str], folder: Path, logfile: Path) -> Starting | None:
    """Let a waiting server serve ``folder``; None when there is none."""
    if tuple(command) not in (SERVER, FORK):
        return None
    line = json.dumps([str(folder), str(logfile)]).encode() + b"\n"
    with _lock:
        try:
            one = _waiting.pop()
        except IndexError:
            return None
        try:
            os.write(one.tell_fd, line)
            return one.server
        except OSError as exc:
            trouble = exc
        finally:
            os.close(one.tell_fd)
    log.warning("the block server started beforehand is gone (%s); starting another", trouble)
    one.server.reap()
    return None


def spawn(argv: Sequence[str], *more: str, stdin: int, out: IO[bytes] | int) -> Starting:
    """Start a server: ``argv``, the descriptor to answer on, ``more``; where `FORK` found none waiting, `SERVER`."""
    if tuple(argv[: len(FORK)]) == FORK:
        argv = [*SERVER, *argv[len(FORK) :]]
    answer_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [*argv, str(write_fd), *more],
            stdin=stdin,
            stdout=out,
            stderr=out,
            pass_fds=[write_fd],
            start_new_session=True,
        )
    except BaseException:
        os.close(answer_fd)
        raise
    finally:
        os.close(write_fd)
    return Starting(answer_fd, process)


def _prepare(store_url: str, *, fork: bool) -> _Waiting:
    read_fd, tell_fd = os.pipe()
    try:
        if fork and not (why := twin.hindrance(SERVER, store_url)):
            return _Waiting(tell_fd, _fork(read_fd, store_url))
        if fork:
            log.info("this process forks no block server, a new one is executed: %s", why)
        return _Waiting(tell_fd, spawn([*SERVER, "-"], store_url, stdin=read_fd, out=subprocess.DEVNULL))
    except BaseException:
        os.close(tell_fd)
        raise
    finally:
        os.close(read_fd)


def _fork(tell_fd: int, store_url: str) -> Starting:
    answer_fd, write_fd = os.pipe()
    try:
        return Starting(answer_fd, twin.fork(SERVER, store_url, tell_fd=tell_fd, answer_fd=write_fd))
    except BaseException:
        os.close(answer_fd)
        raise
    finally:
        os.close(write_fd)


class Met:
    """In the server: the store at ``url``, opened and met by a thread, so that its client is loaded, connected and
    logged in when it is needed. Trouble shows again when it matters."""

    def __init__(self, store_for: Callable[[str], Store], url: str) -> None:
        self._store_for, self._url = store_for, url
        self._store: Store | None = None
        self._opened = threading.Event()
        # Beside, as a store that does not answer must not hold up a tree that needs none.
        threading.Thread(target=self._meet, name="warm-up", daemon=True).start()

    def _meet(self) -> None:
        try:
            try:
                self._store = self._store_for(self._url)
            finally:
                self._opened.set()
            self._store.exists("trees/none")
        except BootseerError as exc:
            log.info("%s", exc)

    def store(self, url: str) -> Store:
        """That store, or the one at ``url`` where it is another or takes long to open."""
        self._opened.wait(_OPEN_SECONDS)
        store = self._store
        return store if store is not None and url in (self._url, store.url) else self._store_for(url)

    def known(self) -> Store | None:
        """The store when it is open, however long that takes; None where it cannot be. For a thread of its own."""
        self._opened.wait()
        return self._store


def await_folder(look: Callable[[str], object]) -> tuple[Path, Path] | None:
    """In the server: wait for the folder to serve, turn to its log, return both; None when the other side has gone.
    ``look`` hears of the profile that is `announced <announce>`."""
    with open(0, "rb", closefd=False) as told:
        for line in told:
            words = json.loads(line)
            if words[0] != _LOOK:
                break
            look(words[1])
        else:
            return None
    folder, logfile = words
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    turn_to(Path(logfile))
    return Path(folder), Path(logfile)


def write_pid(folder: Path) -> None:
    """Have the state ``folder`` name this process, and its group."""
    (folder / PID).write_text(f"{os.getpid()} {os.getpgid(0)}\n")


def turn_to(logfile: Path) -> None:
    """Write standard output and errors there from now on."""
    out = os.open(logfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
