"""The parts of a service: processes that one parent keeps, each of which ends and is started again alone. The parent
has one thread and loads nothing that must not be forked. What the processes say of themselves, and what the parent
tells them, is in memory that they share (`Part`). A part ends with the parent."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.errors import BootseerError, ConfigError, PrivilegeError, UnsupportedError, doing, from_os_error
from bootseer.kernel import bounds, flock
from bootseer.kernel.child import Child, die_with, wait
from bootseer.units import one_line

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_STOP_SECONDS = 15.0
_LOCK_SECONDS = 2.0
"""For the end of a process that was killed."""
_MISTAKES = {kind.exit_code for kind in (ConfigError, PrivilegeError, UnsupportedError)}


class Part(ctypes.Structure):
    """What all processes of a service know of one of its parts. By itself: a service without others."""

    _fields_ = (
        ("pid", ctypes.c_int64),
        ("starts", ctypes.c_int64),
        ("mounts", ctypes.c_int64),
        ("serves", ctypes.c_bool),
        ("draining", ctypes.c_bool),
    )
    pid: int
    starts: int
    """How often it was started."""
    mounts: int
    """What it has mounted for others, or has begun to mount."""
    serves: bool
    draining: bool
    """It is to mount nothing more."""


def shared(names: Sequence[str]) -> dict[str, Part]:
    """A part of each name, in memory that processes forked from now on share."""
    size = ctypes.sizeof(Part)
    memory = mmap.mmap(-1, size * len(names))
    return {name: Part.from_buffer(memory, number * size) for number, name in enumerate(names)}


def keep(parts: Mapping[str, Part], runs: Mapping[str, Callable[[], object]], scores: Mapping[str, int]) -> int:
    """Be the parent: run each of ``parts``, and start it again when it ends, until the first one has done all that it
    is to do (it ends with 0) or an exception comes, such as that of a signal; all others are told to end then. Where
    memory is short, those with a higher one of ``scores`` (oom_score_adj) are killed first.

    Returns the exit code. While some part has not served yet, one that ends with a `ConfigError`, `PrivilegeError` or
    `UnsupportedError`, which it has said in one line, ends all: another start would not help."""
    children: dict[str, Child] = {}
    ended: set[str] = set()
    first, all_served = next(iter(parts)), False
    gc.freeze()  # what is loaded is not looked through again, so that the parts share its memory
    try:
        while True:
            for name, part in parts.items():
                if name not in children or (name in ended and not children[name].wait_seconds):
                    children[name] = _start(name, part, runs[name], scores[name], children.get(name))
                    ended.discard(name)
            wait(list(children.values()), None if all_served else _LOOK_SECONDS)
            for name, part in parts.items():
                if part.serves:
                    children[name].succeeded()
            if not all_served and (all_served := all(part.serves for part in parts.values())):
                tell_systemd()
            for name in [name for name, child in children.items() if child.dead and name not in ended]:
                child, parts[name].pid, parts[name].serves = children[name], 0, False
                if name == first and child.ending == "exit code 0":
                    return 0
                if not all_served and child.code in _MISTAKES:
                    return child.code
                log.warning("the part %s has ended (%s); it is started again", name, child.ending)
                ended.add(name)
    finally:
        _end(list(children.values()))


@contextlib.contextmanager
def alone(root: Path, what: str) -> Iterator[None]:
    """In this context no other process serves ``root``. Raises `ConfigError`, which names ``what``, when one does."""
    lock = root / "lock"
    with doing(f"use {lock}"), flock.locked(lock, os.O_RDWR | os.O_CREAT, _LOCK_SECONDS) as alone:
        if not alone:
            raise ConfigError(f"{what} serves {root} already", hint="systemctl stop bootseer-node ends the service")
        yield


def tell_systemd() -> None:
    """Say that clients are served, where the unit has ``Type=notify`` (sd_notify(3))."""
    if address := os.environ.pop("NOTIFY_SOCKET", ""):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", address.replace("@", "\0", 1) if address.startswith("@") else address)


def _start(name: str, part: Part, run: Callable[[], object], score: int, before: Child | None) -> Child:
    parent = os.getpid()

    def body() -> int:
        die_with(parent)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(f"bootseer-{name}"[:15])
        bounds.be_ended_early(score)  # lower ones are the unit's to give
        os.environ.pop("NOTIFY_SOCKET", None)
        bounds.limit_memory()
        try:
            run()
        except (BootseerError, OSError) as exc:
            error = exc if isinstance(exc, BootseerError) else from_os_error(exc, f"be the part {name}")
            sys.stderr.write(f"bootseer: {one_line(str(error))}\n")
            return error.exit_code
        return 0

    child = Child(f"part {name}", body, before)
    part.pid, part.starts = child.pid, part.starts + 1
    return child


def _end(children: Sequence[Child]) -> None:
    """Tell all to end, and kill those that take long."""
    for child in children:
        child.terminate()
    until = time.monotonic() + _STOP_SECONDS
    while any(not child.dead for child in children) and time.monotonic() < until:
        wait([child for child in children if not child.dead], until - time.monotonic())
    for child in children:
        child.end()
