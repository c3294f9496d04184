"""The supervisor of a mount: it keeps the FUSE descriptor, forks the server, and another one when that was killed.

One process, one thread, no storage and no disk. What a successor must know is in shared memory (`MountMemory`), so a
killed server costs its readers a moment. One that is stopped or stuck has no heartbeat and is killed
(`record.SILENCE`). What a server had unfinished is lost with it. When the supervisor is killed, its server starts
another."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time

from bootseer.errors import BootseerError, from_os_error
from bootseer.fsmount.memory import Count, Inherited
from bootseer.fsmount.server import Server
from bootseer.kernel import fuse
from bootseer.kernel.child import wait
from bootseer.served.entry import Answer
from bootseer.served.keeper import SIGNALS, Kept, supervise

_log = logging.getLogger(__name__)

_END_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_HOPELESS = 6
"""After so many servers in a row that died sooner, readers get errors instead of waiting."""


class Supervisor:
    """Serves a mount in `run`. ``answer``: to who started the mount; None where the server runs already."""

    def __init__(self, inherited: Inherited, answer: Answer | None) -> None:
        self._inherited, self._answer = inherited, answer
        self._spec, self._device = inherited.spec, inherited.device
        self._counts = counts = inherited.memory.counts
        cells = counts[Count.SERVER_PID : Count.SERVER_PID + 4]
        self._server = Kept("server", self._serve, cells, self._spec.silence[0], adopt=answer is None)
        self._until = 0.0
        counts[Count.SUPERVISOR_PID] = os.getpid()
        counts[Count.SUPERVISOR_STARTS] += 1

    def run(self) -> int:
        """Serve until the mount has ended or cannot go on. The exit code."""
        supervise(f"the mount {self._spec.mountpoint}", self._step, self._end)
        self._device.close()
        return 0

    def _end(self) -> None:
        if not self._until:
            self._until = time.monotonic() + _END_SECONDS
        self._server.child.terminate()

    def _step(self) -> bool:
        counts, server = self._counts, self._server
        if not counts[Count.SERVER_STARTS]:
            server.start()
            if self._answer is not None:  # who started the mount waits until nobody can answer any more
                self._answer.forget()
        wait([server.child], min(_LOOK_SECONDS, self._until - time.monotonic()) if self._until else _LOOK_SECONDS)
        unfinished = counts[Count.UNFINISHED]
        server.watch.limit = self._spec.silence[unfinished > 0]  # later, when much would be lost
        if not server.dead():
            if self._until and time.monotonic() >= self._until:
                _log.warning("the server of %s does not end; killing it", self._spec.mountpoint)
                server.child.kill()
            return False
        negotiated = self._inherited.memory.negotiated.read()
        if self._until or server.child.ended_well or not self._device.mounted or not negotiated:
            with contextlib.suppress(BootseerError):
                self._device.abort()
            return True
        if unfinished:
            _log.warning("unfinished files that are lost with the server: %d", unfinished)
            counts[Count.UNFINISHED] = 0
        why = "no server stays alive" if server.child.failures >= _HOPELESS else ""
        if "has_resend" not in fuse.Negotiated.decode(negotiated).flags:
            why = "this kernel does not send again what it took (Linux 6.9 does)"
        if why:
            _log.error("the server ended (%s), and %s: readers get errors from now on", server.child.ending, why)
            return True
        if server.child.wait_seconds <= 0:
            server.start()
        return False

    def _serve(self) -> int:
        """In a server."""
        stop = threading.Event()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
        if self._until:  # by a signal that came before
            stop.set()
        try:
            Server(self._inherited, stop, self._answer).run()
        except (BootseerError, OSError) as exc:
            error = exc if isinstance(exc, BootseerError) else from_os_error(exc, f"serve {self._spec.mountpoint}")
            _log.error("the server ends: %s", error)
            if self._answer is not None:
                self._answer.failed(error)
            return error.exit_code
        return 0
