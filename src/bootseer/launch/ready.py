"""Watches what a job writes of its start: hands its events on, and sees the end of the first step: the moment the job
is ready.

The file is the job's, which may be root: it may put a link, a pipe or terabytes there. What is handed on is JSON that
we have written, and no shell that sources it finds anything to expand in it.
Concurrency: one thread that polls the file (an append-only file of a few KiB) every 50 ms, and later every second."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.closing import descriptor
from bootseer.kernel import beneath
from bootseer.profile import emit, ending
from bootseer.wiretypes import json_as, known

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
LATER_SECONDS = 1.0
"""Between two looks when the job is ready."""
OTHERS_SECONDS = 60.0
"""How long the other ranks of the node are waited for after the first one."""
MOST = 64 << 20
"""Bytes of a job's events that are read at all."""
_READ = 1 << 20
_LINE_LIMIT = 64 << 10
"""As readers of events have it."""


class _Event(msgspec.Struct):
    bootseer: int
    ev: str
    span: str
    stage: str = ""
    attrs: dict[str, object] = {}


class ReadyWatch:
    """Calls ``on_ready`` once, from its own thread, when a span of stage ``first_step`` has ended in ``events``, or as
    many as the attribute ``node_ranks`` of one says. ``hand_on`` is given whole lines before that."""

    def __init__(
        self, events: Path, on_ready: Callable[[], None], hand_on: Callable[[bytes], None] | None = None
    ) -> None:
        self._events, self._on_ready, self._hand_on = events, on_ready, hand_on
        self._stop = threading.Event()
        self._steps: set[str] = set()
        self._ended: set[str] = set()
        self._ranks = 1
        self._first = 0.0
        self.offset = 0
        """How far the file was read."""
        self._thread = threading.Thread(target=self._run, name="ready-watch", daemon=True)
        self.ready = threading.Event()

    def start(self, offset: int = 0) -> None:
        """Begin to watch, at byte ``offset`` (what an earlier cycle wrote does not count)."""
        self.offset = offset
        self._thread.start()

    def stop(self) -> None:
        """Look once more (the job may have ended right after its first step) and end the thread."""
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(LATER_SECONDS if self.ready.is_set() else POLL_SECONDS)
            while data := self._more():
                self._take(data)
            late = time.monotonic() - self._first > OTHERS_SECONDS
            if self.ready.is_set() or not self._ended:
                continue
            if stopped or late or len(self._ended) >= self._ranks:
                self.ready.set()
                try:
                    self._on_ready()
                except Exception:
                    log.exception("the job is ready, but what was to follow failed")

    def _more(self) -> bytes:
        """The next whole lines; nothing while there are none."""
        if self.offset >= MOST:
            return b""
        try:
            with descriptor(beneath.open_regular(self._events)) as fd:
                data = os.pread(fd, min(_READ, MOST - self.offset), self.offset)
        except OSError:
            return b""
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= _LINE_LIMIT:  # no event is that long
            whole = len(data)
        self.offset += whole
        if self.offset >= MOST:
            log.warning("the job has written %d MiB of events: no more of them is read", MOST >> 20)
        return data[:whole]

    def _take(self, data: bytes) -> None:
        handed = []
        for line in data.split(b"\n"):
            if not line.startswith(b'{"bootseer":') or len(line) > _LINE_LIMIT:
                continue
            try:
                found = json_as(line.decode("utf-8", "replace"), object)
                event = msgspec.convert(found, known(_Event))
                clean = emit.inert(msgspec.json.encode(found).decode())
            except (ValueError, RecursionError):
                continue
            if len(clean) < _LINE_LIMIT:
                handed.append(clean.encode() + b"\n")
            if event.ev == "begin" and event.stage == "first_step":
                self._steps.add(event.span)
                if isinstance(ranks := event.attrs.get("node_ranks"), int):
                    self._ranks = max(self._ranks, ranks)
            elif event.ev == "end" and event.span in self._steps and not ending.failure(event.attrs):
                self._first = self._first or time.monotonic()
                self._ended.add(event.span)
        if handed and self._hand_on:
            self._hand_on(b"".join(handed))
