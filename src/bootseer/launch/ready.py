"""Watches a start's events for the end of the first step: the moment the job is ready.

Concurrency: one thread that polls the events file (an append-only file of a few KiB) every 50 ms until the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.wiretypes import known

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
OTHERS_SECONDS = 60.0
"""How long the other ranks of the node are waited for after the first one."""


class _Event(msgspec.Struct):
    ev: str = ""
    span: str = ""
    stage: str = ""
    attrs: dict[str, object] = {}


class ReadyWatch:
    """Calls ``on_ready`` once, from its own thread, when a span of stage ``first_step`` has ended in ``events``, or as
    many as the attribute ``node_ranks`` of one says."""

    def __init__(self, events: Path, on_ready: Callable[[], None]) -> None:
        self._events, self._on_ready = events, on_ready
        self._stop = threading.Event()
        self._steps: set[str] = set()
        self._ended: set[str] = set()
        self._ranks = 1
        self._first = 0.0
        self._offset = 0
        self._thread = threading.Thread(target=self._run, name="ready-watch", daemon=True)
        self.ready = threading.Event()

    def start(self, offset: int = 0) -> None:
        """Begin to watch, at byte ``offset`` (what an earlier cycle wrote does not count)."""
        self._offset = offset
        self._thread.start()

    def stop(self) -> None:
        """Look once more (the job may have ended right after its first step) and end the thread."""
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        stopped = False
        while not self.ready.is_set() and not stopped:
            stopped = self._stop.wait(POLL_SECONDS)
            self._scan()
            late = time.monotonic() - self._first > OTHERS_SECONDS
            if self._ended and (stopped or late or len(self._ended) >= self._ranks):
                self.ready.set()
                try:
                    self._on_ready()
                except Exception:
                    log.exception("the job is ready, but what was to follow failed")

    def _scan(self) -> None:
        try:
            with open(self._events, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                event = msgspec.json.decode(line, type=known(_Event))
            except ValueError:
                continue
            if event.ev == "begin" and event.stage == "first_step":
                self._steps.add(event.span)
                if isinstance(ranks := event.attrs.get("node_ranks"), int):
                    self._ranks = max(self._ranks, ranks)
            elif event.ev == "end" and event.span in self._steps:
                self._first = self._first or time.monotonic()
                self._ended.add(event.span)
