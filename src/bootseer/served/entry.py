"""How a server begins: a session, a log, a lock and a cgroup of its own, and one answer to who has started it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer import loglimit
from bootseer.errors import BootseerError, UnavailableError, doing, from_os_error
from bootseer.kernel import background, bounds, mount
from bootseer.kernel.flock import lock
from bootseer.served.protocol import LOCK, Order, Reply, failure
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

_LOG_BYTES = 4 << 20
_LOCK_SECONDS = 0.1
"""Who looks whether a server lives holds the lock for a moment."""


class Answer(background.Answer):
    """Answers who has started this server, once: `done` or `failed`. False: nobody waits, and the server is to end."""

    def done(self, value: object) -> bool:
        return self(msgspec.json.encode(Reply(msgspec.Raw(msgspec.json.encode(value)))).decode())

    def failed(self, exc: BaseException) -> bool:
        return self(msgspec.json.encode(failure(exc)).decode())

    def forget(self) -> None:
        """In a process that is not to answer: then it is noticed that the one which is to has ended."""
        self("")


class Begun(NamedTuple):
    """A server that begins."""

    folder: Path
    """Of its state."""
    spec: msgspec.Raw
    lock: int
    """Descriptor of the locked `protocol.LOCK`: while it is open somewhere, the server lives."""
    answer: Answer


def run(name: str, serve: Callable[[Begun], int]) -> int:
    """Be the server ``name``, as ``ps`` calls it, that `client.start` has ordered: ``serve`` answers, and returns the
    exit code when all is over. What it raises before is answered here."""
    order = json_as(background.request(name), Order)
    folder, answer = Path(order.folder), Answer()
    _log_to_stderr()
    try:
        _write_to(folder.with_suffix(".log"))
        os.chdir("/")
        if order.cgroup:
            _go_to_cgroup(order.cgroup)
        bounds.be_ended_early()  # another one takes over; a job that was ended is gone
        return serve(Begun(folder, order.spec, _lock(folder), answer))
    except (BootseerError, OSError) as exc:
        error = exc if isinstance(exc, BootseerError) else from_os_error(exc, f"serve {folder}")
        log.error("%s", error)
        answer.failed(error)
        return error.exit_code
    except Exception as exc:
        log.exception("the server failed")
        answer.failed(exc)
        return BootseerError.exit_code


def inherit(name: str) -> bytes:
    """Be a process of the server ``name`` that another of its processes has started as a program of its own: what that
    says on the standard input."""
    _log_to_stderr()
    _limit_size()
    background.call_it(name)
    with open(0, "rb", closefd=False) as file:
        return file.read()


def _log_to_stderr() -> None:
    loglimit.to_stderr()
    for handler in logging.getLogger().handlers:
        handler.addFilter(loglimit.LogRateLimit())


def _write_to(path: Path) -> None:
    """Standard output and errors go to the end of the file ``path``."""
    with doing(f"write {path}"):
        if path.exists() and path.stat().st_size > _LOG_BYTES:
            os.replace(path, path.with_suffix(".log.old"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    _limit_size()


def _limit_size() -> None:
    for handler in logging.getLogger().handlers:
        handler.addFilter(loglimit.LogSizeLimit(_LOG_BYTES))


def _go_to_cgroup(name: str) -> None:
    """Leave the cgroups of who mounts: other jobs on the tree outlive them."""
    tops = [entry.target for entry in mount.entries() if entry.fstype in ("cgroup", "cgroup2")]
    found = [path for top in tops if (path := Path(top, name.lstrip("/"), "cgroup.procs")).exists()]
    if not found:
        log.warning("there is no cgroup %s: this server stays in that of the job which mounts first", name)
    for path in found:
        try:
            path.write_text("0")
        except OSError as exc:
            log.warning("this server cannot go to the cgroup %s: %s", path.parent, exc.strerror)


def _lock(folder: Path) -> int:
    """Show that a server lives in ``folder``, for as long as one of its processes does."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not lock(fd, _LOCK_SECONDS):
        os.close(fd)
        raise UnavailableError(f"another server lives in {folder}")
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpgid(0), 0)
    return fd
