"""What a program does with a server: start it, ask it, see it out, clean up after one that died."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bootseer.closing import descriptor
from bootseer.errors import BootseerError, UnavailableError, doing, from_exit_code
from bootseer.kernel import background, flock
from bootseer.kernel import mount as mounts
from bootseer.mountrecords import Record, Records
from bootseer.served.protocol import LOCK, MAX_REPLY, SOCKET, GoneError, Order, Reply, Request
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Record)

_START_SECONDS = 60.0
_BUSY_SECONDS = 5.0
_LOCK_SECONDS = 120.0
_ATTEMPT_SECONDS = 8.0
PATIENCE = 30.0
"""A server on an overloaded node, or one whose disk is stuck, may take this long to answer; it is not dead."""
_LOOK_SECONDS = 0.005
_LOG_SECONDS = 86_400.0
"""For which the log of a server that has ended says why."""


def records(base: Path, kind: type[R]) -> Records[R]:
    """Those of the servers whose state folders are in ``base``; the id of each is the name of its folder."""
    return Records(base, kind, "/mount.json")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time starts or ends the server whose state is in ``folder``."""
    path = folder.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with doing(f"open {path}"):
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            alone = stack.enter_context(flock.locked(path, os.O_RDWR | os.O_CREAT, _LOCK_SECONDS))
        if not alone:
            raise UnavailableError(f"another process starts or ends the server in {folder} for too long")
        try:
            yield
        finally:
            if not folder.exists():
                path.unlink(missing_ok=True)


def ask(folder: Path, request: Request, kind: type[T], *, timeout: float = PATIENCE) -> T:
    """What the server whose state is in ``folder`` answers; every request may be repeated, and is, while a process of
    the server lives: another is about to start, or it is about to end. Raises `GoneError` when there is no such server,
    `UnavailableError` when it does not answer within ``timeout`` seconds (then it may well live), and the error of its
    own that it answers with."""
    until = time.monotonic() + timeout
    while True:
        try:
            line = _ask(folder, request, min(_ATTEMPT_SECONDS, max(0.1, until - time.monotonic())))
            return _value(line, kind, f"server in {folder}: ")
        except (OSError, ValueError) as exc:
            if isinstance(exc, ConnectionRefusedError | FileNotFoundError) and not alive(folder):
                raise GoneError(f"no server answers in {folder}: {exc}") from None
            if time.monotonic() >= until:
                raise UnavailableError(
                    f"the server in {folder} does not answer: {exc}",
                    hint="it may be overloaded, or its disk be stuck; its log says more",
                ) from None
        time.sleep(0.05)


def _ask(folder: Path, request: Request, timeout: float) -> bytes:
    # Through a descriptor of the folder: a socket's own path may have 107 bytes only.
    with (
        descriptor(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
    ):
        sock.settimeout(timeout)
        sock.connect(f"/proc/self/fd/{fd}/{SOCKET}")
        sock.sendall(msgspec.json.encode(request) + b"\n")
        with sock.makefile("rb") as lines:
            return lines.readline(MAX_REPLY)


def _value(line: bytes, kind: type[T], who: str = "") -> T:
    """What a reply says. Raises the error that it says, and `ValueError` for what is no reply."""
    reply = json_as(line, Reply)
    if reply.code:
        raise from_exit_code(reply.code, who + reply.error, hint=reply.hint)
    return json_as(reply.value, kind)


def start(
    folder: Path,
    server: Sequence[str],
    spec: msgspec.Struct,
    kind: type[T],
    *,
    record: Record,
    cgroup: str = "",
    ending: signal.Signals = signal.SIGKILL,
) -> T:
    """Have a new ``server`` with its state in ``folder``, which is made, serve what ``spec`` says. What it answers.
    ``record``: what is to be known of it when it has died (`records`). One that does not answer in time gets the signal
    ``ending``. Raises what kept it from starting; then the folder is for the caller to clear."""
    with doing(f"start a server in {folder}"):
        folder.mkdir(mode=0o700)
        records(folder.parent, type(record)).save(record)
    _forget_logs(folder.parent)
    order = Order(str(folder), msgspec.Raw(msgspec.json.encode(spec)), cgroup)
    said = background.start(server, msgspec.json.encode(order), seconds=_START_SECONDS, ending=ending)
    try:
        return _value(said, kind)
    except ValueError:
        hint = f"see {folder.with_suffix('.log')}"
        raise UnavailableError(f"the server in {folder} did not start", hint=hint) from None


def _forget_logs(base: Path) -> None:
    """Remove the logs of servers that ended `_LOG_SECONDS` ago. Safe beside others that do the same."""
    for path in base.glob("*.log*"):
        with contextlib.suppress(OSError):
            if (
                not path.with_name(path.name.partition(".")[0]).exists()
                and time.time() - path.stat().st_mtime > _LOG_SECONDS
            ):
                path.unlink()


def unmount(target: Path, ours: Callable[[], bool] = lambda: True, *, users: str = "keep it until they end") -> None:
    """Unmount what is on ``target`` as long as it is ``ours``; lazily, with a log line, when it stays in use.
    ``users``: what becomes of them then."""
    until = time.monotonic() + _BUSY_SECONDS
    while mounts.is_mounted(target) and ours():
        late = time.monotonic() >= until
        if late:
            log.warning("%s is in use; detaching it, its users %s", target, users)
        try:
            mounts.unmount(target, lazy=late)
        except BootseerError:
            if late:
                raise
            time.sleep(0.05)


def alive(folder: Path) -> bool:
    """Whether a process of the server of ``folder`` lives; one that finishes something behind it does not count."""
    try:
        with flock.locked(folder / LOCK) as alone:
            return not alone
    except FileNotFoundError:
        return False


def await_exit(folder: Path, timeout: float) -> None:
    """Wait until no process of the server of ``folder`` lives; kill them, with a log line, when that takes longer than
    ``timeout`` seconds: a FUSE mount fails closed, who still reads gets errors."""
    if ended(folder, timeout):
        return
    group = int((folder / LOCK).read_text() or 0)  # empty: it was stopped before it wrote its number
    log.warning("the server in %s has not ended within %g s; killing process group %d", folder, timeout, group)
    if group not in (0, 1, os.getpgid(0)):
        with contextlib.suppress(ProcessLookupError):  # while one of them lives the number is nobody else's
            os.killpg(group, signal.SIGKILL)
    if not ended(folder, 5.0):
        raise UnavailableError(f"the server in {folder} cannot be killed", hint="its disk or its store may hang")


def ended(folder: Path, timeout: float) -> bool:
    """Whether the server of ``folder`` has ended, or does so within ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while alive(folder):
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def remove(folder: Path, *more: str) -> None:
    """Remove the state of a server that has ended. ``more``: patterns of what else is in its folder."""
    with doing(f"remove the state of a server in {folder}"):
        for path in [path for name in (SOCKET, LOCK, *more) for path in folder.glob(name)]:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir() if path.is_dir() else path.unlink()
        records(folder.parent, Record).delete(folder.name)
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()


def remove_unwatched(folder: Path, *more: str) -> None:
    """In a server that ends by itself: `remove`, unless somebody waits for its end or is about to use it."""
    with contextlib.suppress(OSError, BootseerError), flock.locked(folder.with_suffix(".lock")) as alone:
        if alone:
            remove(folder, *more)
