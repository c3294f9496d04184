"""The server of a mount: FUSE operations, read-ahead, node cache, prefetch. The supervisor forks it.

Concurrency: FUSE workers, read threads, read-ahead threads, and for the prefetch one thread with two of its own; one
thread answers the control socket and replaces a dead supervisor; the main thread notes for the next server what was
moved, while it waits for the unmount or for SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from bootseer.errors import BootseerError
from bootseer.folders import private_folder
from bootseer.fsmount.changes import WritableStripes
from bootseer.fsmount.memory import Count, Inherited
from bootseer.fsmount.operations import FRESH, StripeOperations
from bootseer.fsmount.prefetch import Prefetch
from bootseer.fsmount.record import FsStatus, ServerSpec
from bootseer.fsmount.spool import Spools
from bootseer.kernel import fuse
from bootseer.served.entry import Answer
from bootseer.served.keeper import Heir
from bootseer.served.protocol import Request
from bootseer.stripefs.checkpoint.access import AccessRecord
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.store import open_fs
from bootseer.wiretypes import json_as

_log = logging.getLogger(__name__)

_WORKERS = 8
_END_SECONDS = 2.0
"""So long read-ahead under way is waited for when the mount ends."""
_PROVEN_SECONDS = 0.5
"""A server that has served for so long, or whose reads have moved bytes, has not died of its start."""


def mount_options(spec: ServerSpec) -> fuse.Options:
    """How the kernel treats the mount. A pointer may be replaced at any time: names are believed for a second, contents
    (one node each) for ever, permissions as long as names."""
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
    """Serves a mount, as one of several after each other, until it has ended or ``stop`` is set. ``answer``: to who
    started the mount. Raises what reading the folder at its URL raises."""

    def __init__(self, inherited: Inherited, stop: threading.Event, answer: Answer | None) -> None:
        self._inherited, self._stop, self._answer = inherited, stop, answer
        self._spec = spec = inherited.spec
        self._memory, self._counts = inherited.memory, inherited.memory.counts
        self._before = json_as(self._memory.status.read(), FsStatus)
        negotiated = self._memory.negotiated.read()
        self._negotiated = fuse.Negotiated.decode(negotiated) if negotiated else None
        self._fs = open_fs(spec.url, shown=spec.allow_other)
        self._cache = NodeCache(Path(spec.cache_dir), spec.limits) if spec.cache_dir else None
        self._ahead = ReadAhead(memory=spec.memory)
        told: Any = {
            "shared": spec.shared, "journal": self._memory.journal, "generation": self._counts[Count.SERVER_STARTS] - 1,
        }  # fmt: skip
        if spec.writable:
            spools = Spools(private_folder(Path(spec.cache_dir), sub="spools"), spec.spool)
            self._ops: StripeOperations = WritableStripes(
                self._fs, self._ahead, spools, width=spec.width, unit=spec.unit, **told
            )
        else:
            self._ops = StripeOperations(self._fs, self._ahead, cache=self._cache, expected=spec.ranges, **told)
        if read := self._memory.accessed.read():
            self._ops.accessed.add_all(json_as(read, AccessRecord))
        self._server: fuse.Server | None = None
        self._prefetch = Prefetch(
            self._fs, self._cache, self._ahead, self._ops, spec.prefetch, spec.ranges,
            hold=spec.hold and not self._counts[Count.RELEASED], memory=spec.memory,
        )  # fmt: skip
        self._accessed = 0
        self._heir = Heir(self._counts[Count.SUPERVISOR_PID], inherited.start_supervisor)

    def run(self) -> None:
        """Prefetch and serve. Nothing is left running."""
        server = self._server = self._serve()
        try:
            assert server.negotiated is not None
            self._memory.negotiated.write(server.negotiated.encode())
            threading.Thread(target=self._control, name="control", daemon=True).start()
            if self._answer is not None and not self._answer.done(True):
                _log.warning("nobody waits for the mount %s any more", self._spec.mountpoint)
                self._stop.set()
            self._prefetch.start()
            began, proven = time.monotonic(), False
            while not server.wait(0.2 if proven else 0.02) and not self._stop.is_set():
                if not proven and (time.monotonic() - began >= _PROVEN_SECONDS or self._ops.bytes_read):
                    proven = True
                    self._counts[Count.SERVER_READY] = self._counts[Count.SERVER_STARTS]
                self._note()
        finally:
            self._prefetch.end()
            server.stop(timeout=2.0)
            ended = self._prefetch.join()
            if isinstance(self._ops, WritableStripes):
                self._ops.close()
            ended = self._ahead.close(_END_SECONDS) and ended
            if not ended:  # they may write to the cache until this process ends, so it is left as if that was killed
                _log.warning("reads under way are left behind: the storage does not answer")
            elif self._cache:
                self._cache.close()

    def _serve(self) -> fuse.Server:
        options, device = mount_options(self._spec), self._inherited.device
        if self._negotiated is not None:
            return fuse.Server.resume(self._ops, device, self._negotiated, workers=_WORKERS, options=options)
        server = fuse.Server(self._ops, device.mountpoint, workers=_WORKERS, options=options, device=device)
        server.start()
        return server

    def _control(self) -> None:
        """Answer the control socket; replace a supervisor that has died."""
        control = self._inherited.control
        while True:
            poll = select.poll()
            poll.register(control.fileno(), select.POLLIN)
            poll.poll(self._heir.register(poll))
            try:
                control.answer(self._handle)
                self._heir.look()
            except Exception:  # nobody else would
                _log.exception("the control thread goes on after this")
                time.sleep(0.2)

    def _handle(self, request: Request) -> FsStatus | AccessRecord:
        if request.do == "accessed":
            return self._ops.accessed.record()
        if request.do == "release":
            self._counts[Count.RELEASED] = 1
            self._prefetch.release()
        elif request.do == "end":
            self._stop.set()
        elif request.do != "status":
            raise BootseerError(f"unknown request {request.do!r}")
        return self._status()

    def _note(self) -> None:
        """Leave for the next server what this one has moved, and what its readers have read."""
        self._memory.status.write(msgspec.json.encode(self._status()))
        if (changes := self._ops.accessed.changes) != self._accessed:
            self._accessed = changes
            with contextlib.suppress(ValueError):  # it is advice, and has no room
                self._memory.accessed.write(msgspec.json.encode(self._ops.accessed.record()))

    def _status(self) -> FsStatus:
        passed, served = self._server.opens if self._server else (0, 0)
        self._counts[Count.UNFINISHED] = unfinished = self._ops.unfinished
        return msgspec.structs.replace(
            self._before,
            url=self._fs.url,
            pid=self._counts[Count.SUPERVISOR_PID],
            server_pid=os.getpid(),
            restarts=self._counts[Count.SERVER_STARTS] - 1,
            supervisor_restarts=self._counts[Count.SUPERVISOR_STARTS] - 1,
            bytes_read=self._before.bytes_read + self._ops.bytes_read,
            bytes_written=self._before.bytes_written + self._ops.bytes_written,
            unfinished=unfinished,
            fetched_demand=self._before.fetched_demand + self._ahead.demand,
            fetched_ahead=self._before.fetched_ahead + self._ahead.ahead,
            waited_seconds=round(self._before.waited_seconds + self._ops.waited.seconds, 3),
            opened_passthrough=self._before.opened_passthrough + passed,
            opened_served=self._before.opened_served + served,
            prefetch=self._prefetch.state,
            prefetch_total=self._prefetch.total,
            prefetch_done=self._prefetch.done,
        )
