"""Forked processes that do one thing each for the daemon, until a deadline, and answer through a pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable

import msgspec

from bootseer.errors import BootseerError, UnavailableError, from_os_error
from bootseer.kernel import bounds
from bootseer.kernel.child import Child, close_others, die_with
from bootseer.loglimit import USER
from bootseer.node.accounts import ROOT
from bootseer.node.loop import Loop
from bootseer.node.protocol import REQUEST_SECONDS, NodeReply, failure
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

MAX_RUNNING = 8
"""Of one user; root may have any number."""


class Workers:
    """Those of a daemon with this ``loop``, which hold its ``lock``; ``most``: of all users but root."""

    def __init__(self, loop: Loop, lock: int, most: int) -> None:
        self._loop, self._lock, self._most = loop, lock, most
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._running.total()

    def check(self, account: str) -> None:
        """Raises `UnavailableError` when ``account`` has too many, or all but root have."""
        count, others = self._running[account], self._running.total() - self._running[ROOT]
        if account and (count >= MAX_RUNNING or others >= self._most):
            whose, count = (account, count) if count >= MAX_RUNNING else ("users", others)
            raise UnavailableError(f"{count} requests of {whose} are being worked off", hint="try again")

    def start(
        self,
        account: str,
        name: str,
        work: Callable[[], NodeReply],
        finish: Callable[[NodeReply], object],
        *fds: int,
    ) -> Worker | None:
        """Have a process do ``work`` for ``account``, with ``fds``; ``finish`` comes later, also when there is no
        process."""

        def end(reply: NodeReply) -> None:
            self._running[account] -= 1
            finish(reply)

        self._running[account] += 1
        try:
            return Worker(self._loop, account, name, self._lock, work, end, *fds)
        except OSError as exc:
            error = from_os_error(exc, f"work off a {name} request")
            self._loop.later(finish, 0.0, lambda: end(failure(error)))
            return None


class Worker:
    """Does ``work``; then ``finish`` gets its answer in the loop, or the failure that it was. It is killed when the
    daemon ends, and keeps ``lock`` open until it is dead."""

    def __init__(
        self,
        loop: Loop,
        account: str,
        name: str,
        lock: int,
        work: Callable[[], NodeReply],
        finish: Callable[[NodeReply], None],
        *fds: int,
    ) -> None:
        """Raises `OSError` without descriptors."""
        self._loop, self._account, self._name, self._finish = loop, account, name, finish
        self._said, self._why = b"", ""
        self._pipe, out = os.pipe()
        os.set_blocking(self._pipe, False)
        daemon = os.getpid()
        self._child = Child(f"{name} request", lambda: _run(daemon, out, work, lock, *fds))
        os.close(out)
        self._fds = [fd for fd in (self._child.fileno(), self._pipe) if fd >= 0]
        for fd in self._fds:
            loop.watch(fd, self._see)
        loop.later(self, REQUEST_SECONDS, lambda: self.give_up(f"it took longer than {REQUEST_SECONDS:.0f} s"))

    def give_up(self, why: str) -> None:
        """Kill it; it fails soon, whatever it has done."""
        self._why = self._why or why
        self._child.kill()

    def _see(self) -> None:
        if self._pipe < 0:
            return
        dead = self._child.dead
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._pipe, 1 << 16):
                self._said += piece
        if dead:
            reply = self._reply(self._child.ending)
            for fd in self._fds:
                self._loop.forget(fd)
            self._loop.cancel(self)
            self._child.forget()
            os.close(self._pipe)
            self._pipe = -1
            self._finish(reply)

    def _reply(self, ending: str) -> NodeReply:
        if not self._why:
            with contextlib.suppress(ValueError):
                return json_as(self._said, NodeReply)
        why = self._why or f"its process ended early ({ending})"
        log.warning("a %s request is given up: %s", self._name, why, extra={USER: self._account})
        return failure(UnavailableError(f"the {self._name} request is given up: {why}", hint="try again"))


def _run(daemon: int, out: int, work: Callable[[], NodeReply], *kept: int) -> int:
    """In the process: nothing of the daemon's stays open here but its lock and what ``work`` reads, its socket above
    all."""
    die_with(daemon)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    close_others(out, *kept)
    bounds.be_ended_early()
    bounds.limit_memory()
    os.umask(0o022)  # what block servers put into a store that is a folder is for other users, too
    try:
        reply = work()
    except BootseerError as exc:
        reply = failure(exc)
    except Exception as exc:
        log.exception("a request failed")
        reply = failure(exc)
    answer = msgspec.json.encode(reply)
    while answer:
        answer = answer[os.write(out, answer) :]
    return 0
