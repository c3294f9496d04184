"""The supervisor of a mount: it keeps the FUSE descriptor, forks the server, and another one when that was killed.

One process, one thread, no storage and no disk. It knows what a successor must: what INIT granted, and the nodes
(`nodes`), which each server tells it. So a killed server costs its readers a moment. One that is stopped or stuck has
no heartbeat and is killed (`record.SILENCE`). What a server had unfinished is lost with it. When the supervisor is
killed its server ends too, and the mount gives errors (ENOTCONN).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.errors import BootseerError, UnavailableError, from_os_error
from bootseer.fsmount.nodes import Gone, Known
from bootseer.fsmount.record import FsStatus, Record, ServerSpec
from bootseer.fsmount.server import PROVEN_SECONDS, Channel, Failed, Ready, Server, mount_options
from bootseer.kernel import fuse
from bootseer.kernel.child import Child, Watch, born, die_with, keep_beating

_log = logging.getLogger(__name__)

Answer = Record | tuple[str, str, str]
"""To who started the mount: its record, or class, message and hint of the error that kept it from starting."""

_END_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_HOPELESS = 6
"""After so many servers in a row that died sooner, readers get errors instead of waiting."""


class Supervisor:
    """Mounts in `run`. ``answer`` is called once, when the mount works or cannot; with None in a process that has
    nothing to answer."""

    def __init__(self, spec: ServerSpec, answer: Callable[[Answer | None], None]) -> None:
        self._spec, self._answer = spec, answer
        self._status = FsStatus(url="", mountpoint=spec.mountpoint, pid=os.getpid())
        self._record: Record | None = None
        self._nodes: dict[int, Known] = {}
        self._negotiated = b""
        self._ready = 0.0
        self._until = 0.0
        self._generation = -1
        self._child: Child | None = None
        self._beats = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")  # one cell, shared with the servers
        self._watch = Watch(self._beats, 0, spec.silence[0])
        self._server_end, self._channel = Channel.pair()
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve until the mount has ended or cannot go on. Raises what keeps it from starting: errors as of
        `kernel.mount` and of reading the folder at the URL."""
        signal.signal(signal.SIGTERM, lambda number, frame: self._told_to_end())
        device = fuse.Device.open(Path(self._spec.mountpoint), mount_options(self._spec))
        try:
            child = self._start(device)
            while True:
                self._wait(child)
                if self._until and time.monotonic() >= self._until and not child.dead:
                    _log.warning("the server of %s does not end; killing it", self._spec.mountpoint)
                    child.end()
                if not child.dead:
                    self._end_silent(child)
                    continue
                self._take_messages()  # what it told before it died
                if self._until or child.ended_well or not device.mounted:
                    device.abort()
                    return
                if self._ready and time.monotonic() - self._ready >= PROVEN_SECONDS:
                    child.succeeded()
                self._ready = 0.0
                if lost := self._status.unfinished:
                    _log.warning("unfinished files that are lost with the server: %d", lost)
                    self._status = msgspec.structs.replace(self._status, unfinished=0)
                if not self._record:
                    device.abort()
                    raise UnavailableError(f"the server of {self._spec.mountpoint} ended ({child.ending})")
                if why := self._hopeless(child):
                    _log.error("the server ended (%s), and %s: readers get errors from now on", child.ending, why)
                    return
                if child.wait_seconds <= 0:
                    _log.warning("the server ended (%s); starting another", child.ending)
                    child = self._start(device)
        except BaseException:
            if self._child is not None:
                self._child.end()
            with contextlib.suppress(BootseerError):
                device.abort()
            raise
        finally:
            device.close()

    def _end_silent(self, child: Child) -> None:
        """Kill a server that is stopped or stuck; later, when much would be lost."""
        self._watch.limit = self._spec.silence[self._status.unfinished > 0]
        if self._watch.silent():
            _log.warning("the server has had no heartbeat for %g s; killing it", self._watch.limit)
            child.kill()
            self._watch.restart()

    def _hopeless(self, child: Child) -> str:
        """Why no other server is to be started, "" when there is to be one."""
        if "has_resend" not in fuse.Negotiated.decode(self._negotiated).flags:
            return "this kernel does not send again what it took (Linux 6.9 does)"
        return "no server stays alive" if child.failures >= _HOPELESS else ""

    def _start(self, device: fuse.Device) -> Child:
        self._generation += 1
        self._ready = 0.0
        child = self._child = Child("server", lambda: self._serve(device), self._child)
        self._watch.restart()
        if self._until:
            child.terminate()
        return child

    def _serve(self, device: fuse.Device) -> int:
        """In a server."""
        die_with(self._status.pid)
        keep_beating(self._beats, 0)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
        if self._until:  # by a signal that came before
            stop.set()
        self._answer(None)  # who started the mount waits until nobody can answer any more
        self._channel.close()
        for fd in (self._wake, self._waker):
            os.close(fd)
        try:
            Server(
                self._spec,
                device,
                self._server_end,
                msgspec.structs.replace(self._status, restarts=self._generation),
                known=list(self._nodes.values()),
                negotiated=self._negotiated,
                generation=self._generation,
            ).run(stop)
        except (BootseerError, OSError) as exc:
            error = exc if isinstance(exc, BootseerError) else from_os_error(exc, f"serve {self._spec.mountpoint}")
            _log.error("the server ends: %s", error)
            self._server_end.send(Failed(type(error).__name__, error.message, error.hint))
            return error.exit_code
        return 0

    def _told_to_end(self) -> None:
        if not self._until:
            self._until = time.monotonic() + _END_SECONDS
        if self._child is not None:
            self._child.terminate()
        with contextlib.suppress(OSError):
            os.write(self._waker, b".")

    def _wait(self, child: Child) -> None:
        """Wait for something to happen; take what the server tells."""
        poll = select.poll()
        for fd in (self._channel.fileno(), self._wake):
            poll.register(fd, select.POLLIN)
        seconds = child.wait_seconds if child.dead else _LOOK_SECONDS
        if self._until:
            seconds = min(seconds, self._until - time.monotonic())
        if not child.dead:
            poll.register(child.fileno(), select.POLLIN)
        poll.poll(max(0, int(seconds * 1000)) + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        self._take_messages()

    def _take_messages(self) -> None:
        while (got := self._channel.receive()) is not None:
            message = got[0]
            if isinstance(message, Known):
                self._nodes.pop(message.number, None)  # to the end: the newest of its path
                self._nodes[message.number] = message
            elif isinstance(message, Gone):
                self._nodes.pop(message.number, None)
            elif isinstance(message, Failed):
                if self._record is None:
                    self._until = self._until or time.monotonic() + _END_SECONDS
                    self._answer((message.name, message.message, message.hint))
            elif isinstance(message, Ready):
                self._negotiated, self._ready = message.negotiated, time.monotonic()
                self._status = message.status
                if self._record is None:
                    self._record = Record(message.status, born(os.getpid()))
                    self._answer(self._record)
            else:
                if message.status.bytes_read > self._status.bytes_read and self._child is not None:
                    self._child.succeeded()
                self._status = message.status
