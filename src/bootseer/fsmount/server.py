"""The server of a mount: FUSE operations, read-ahead, node cache, prefetch. The supervisor forks it.

Concurrency: FUSE workers, read threads, read-ahead threads, and for the prefetch one thread with two of its own; the
main thread tells the supervisor what was moved while it waits for the unmount or for SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bootseer.errors import BootseerError, doing
from bootseer.folders import private_folder
from bootseer.fsmount.nodes import Gone, Known
from bootseer.fsmount.operations import FRESH, StripeOperations
from bootseer.fsmount.prefetch import Prefetch
from bootseer.fsmount.record import FsStatus, Record, ServerSpec
from bootseer.fsmount.unfinished import Spools
from bootseer.fsmount.writing import WritableStripes
from bootseer.kernel import channel, fuse
from bootseer.kernel.child import born
from bootseer.stripefs import loads
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.store import open_fs

_log = logging.getLogger(__name__)

_WORKERS = 8
_REPORT_SECONDS = 5.0
PROVEN_SECONDS = 0.5
"""A server that has served for so long, or whose reads have moved bytes, has not died of its start."""
_TELL_SECONDS = 10.0
"""For which a request waits until the supervisor takes what it is told; then it fails."""


class Ready(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The server serves. ``negotiated``: `fuse.Negotiated.encode`."""

    negotiated: bytes
    status: FsStatus


class Figures(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """What the mount has moved so far, with what earlier servers had."""

    status: FsStatus


class Failed(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The server cannot start: name, message and hint of the error."""

    name: str
    message: str
    hint: str


Message = Known | Gone | Ready | Figures | Failed


class Channel(channel.Channel[Message]):
    """From the server, the first end of a pair, to the supervisor."""

    message = Message


def mount_options(spec: ServerSpec) -> fuse.Options:
    """How the kernel treats the mount.

    A pointer may be replaced at any time: names are believed for a second, contents (one node each) for ever,
    permissions as long as names.
    """
    return fuse.Options(
        name="bootseer-fs",
        max_readahead=4 << 20 if os.geteuid() == 0 else 128 << 10,
        entry_timeout=FRESH,
        negative_timeout=FRESH,
        attr_timeout=FRESH if spec.shared or spec.writable else 3600.0,
        # not for writing: the content of a node changes then
        passthrough=os.geteuid() == 0 and bool(spec.cache_dir) and not spec.writable,
        allow_other=spec.allow_other,
        writable=spec.writable,
    )


class Server:
    """Serves the mount ``device``, as the server number ``generation`` of it, from 0.

    ``known`` and ``negotiated``: what servers before it told, ``before``: with the figures that it goes on from.
    Raises what reading the folder at its URL raises.
    """

    def __init__(
        self,
        spec: ServerSpec,
        device: fuse.Device,
        supervisor: Channel,
        before: FsStatus,
        *,
        known: Sequence[Known] = (),
        negotiated: bytes = b"",
        generation: int = 0,
    ) -> None:
        self._spec, self._device, self._supervisor, self._before = spec, device, supervisor, before
        self._negotiated = fuse.Negotiated.decode(negotiated) if negotiated else None
        self._fs = open_fs(spec.url)
        self._path = Record.path(spec.state_dir, spec.mountpoint)
        self._cache = NodeCache(Path(spec.cache_dir), spec.limits) if spec.cache_dir else None
        self._ahead = ReadAhead(memory=spec.memory)
        told: Any = {"shared": spec.shared, "known": known, "tell": self._tell, "generation": generation}
        if spec.writable:
            spools = Spools(private_folder(Path(spec.cache_dir), sub="spools"), spec.spool)
            self._ops: StripeOperations = WritableStripes(
                self._fs, self._ahead, spools, width=spec.width, unit=spec.unit, **told
            )
        else:
            self._ops = StripeOperations(self._fs, self._ahead, cache=self._cache, expected=spec.ranges, **told)
        if generation:
            self._ops.accessed.add_all(Record.read_accessed(self._path))
        self._server: fuse.Server | None = None
        self._prefetch = Prefetch(
            self._fs, self._cache, self._ahead, self._ops, spec.prefetch, spec.ranges,
            hold=Record.hold(self._path) if spec.hold else None, memory=spec.memory,
        )  # fmt: skip
        self._accessed = 0
        self._meter = loads.LoadMeter(self._fs.url, "mount")
        self._reported = 0.0, 0, 0  # when, and which bytes
        self._born = born(before.pid)

    def run(self, stop: threading.Event) -> None:
        """Prefetch and serve until the mount has ended or ``stop`` is set. Nothing is left running."""
        server = self._server = self._serve()
        try:
            assert server.negotiated is not None
            told = self._before
            if self._negotiated is None:
                told = self._status()
                self._write_record(told)  # who started the mount finds it
            self._tell(Ready(server.negotiated.encode(), self._status()))
            self._prefetch.start()
            began = time.monotonic()
            while not server.wait(0.02 if time.monotonic() - began < PROVEN_SECONDS else 0.2) and not stop.is_set():
                if (status := self._status()) != told and self._supervisor.send(Figures(status)):
                    with contextlib.suppress(BootseerError):  # a full disk does not end the mount
                        self._write_record(status)
                    told = status
                self._keep_access()
                self._keep_report()
        finally:
            self._prefetch.end()
            server.stop(timeout=2.0)
            self._prefetch.join()
            if isinstance(self._ops, WritableStripes):
                self._ops.close()
            self._keep_report(at_once=True)
            self._ahead.close()
            if self._cache:
                self._cache.close()

    def _serve(self) -> fuse.Server:
        options = mount_options(self._spec)
        if self._negotiated is not None:
            return fuse.Server.resume(self._ops, self._device, self._negotiated, workers=_WORKERS, options=options)
        server = fuse.Server(self._ops, self._device.mountpoint, workers=_WORKERS, options=options, device=self._device)
        server.start()
        return server

    def _tell(self, message: Message) -> None:
        if not self._supervisor.send(message, timeout=_TELL_SECONDS):
            _log.error("the supervisor of %s does not take what it is told", self._spec.mountpoint)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _keep_report(self, *, at_once: bool = False) -> None:
        """Tell `loads.last` what the mount has moved, if anything new."""
        needed, fetched = self._ops.bytes_read, self._ahead.demand + self._ahead.ahead
        late = time.monotonic() - self._reported[0] > _REPORT_SECONDS
        if self._spec.state_dir and (late or at_once) and self._reported[1:] != (needed, fetched):
            self._reported = time.monotonic(), needed, fetched
            cached, waited = max(0, needed - fetched), self._ops.waited.seconds
            report = self._meter.report(needed=needed, fetched=fetched, cached=cached, waited=waited)
            loads.keep(report, self._spec.state_dir)

    def _keep_access(self) -> None:
        """Write down what was read, if anything new; then who asked for it may look."""
        asked = Record.asked(self._path).exists()
        if self._spec.state_dir and (changes := self._ops.accessed.changes) != self._accessed:
            path = Record.accessed(self._path)
            with contextlib.suppress(OSError):  # a full disk does not end the mount
                path.with_suffix(".noted").write_bytes(msgspec.json.encode(self._ops.accessed.record()))
                os.replace(path.with_suffix(".noted"), path)
                self._accessed = changes
        if asked:
            Record.asked(self._path).unlink(missing_ok=True)

    def _write_record(self, status: FsStatus) -> None:
        if self._spec.state_dir:
            path = Record.path(self._spec.state_dir, self._spec.mountpoint)
            tmp = path.with_suffix(".new")
            with doing(f"write {path}"):
                tmp.write_bytes(msgspec.json.encode(Record(status, self._born)))
                os.replace(tmp, path)

    def _status(self) -> FsStatus:
        passed, served = self._server.opens if self._server else (0, 0)
        return msgspec.structs.replace(
            self._before,
            url=self._fs.url,
            server_pid=os.getpid(),
            bytes_read=self._before.bytes_read + self._ops.bytes_read,
            bytes_written=self._before.bytes_written + self._ops.bytes_written,
            unfinished=self._ops.unfinished,
            fetched_demand=self._before.fetched_demand + self._ahead.demand,
            fetched_ahead=self._before.fetched_ahead + self._ahead.ahead,
            opened_passthrough=self._before.opened_passthrough + passed,
            opened_served=self._before.opened_served + served,
            prefetch=self._prefetch.state,
            prefetch_total=self._prefetch.total,
            prefetch_done=self._prefetch.done,
        )
