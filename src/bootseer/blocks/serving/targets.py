"""The mounts of a served tree, and the requests on the control socket that change them.

The list is kept on disk for the next fetcher. Whether a tree may be left or joined is the holder's decision, so
`Requests` asks it and believes only the very answer to its own question.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.blocks.serving.control import Request, StoppingError, TreeStatus
from bootseer.blocks.serving.link import Link, Note
from bootseer.blocks.serving.shared import Count
from bootseer.blocks.serving.spec import TARGETS, ServerSpec
from bootseer.errors import BootseerError, UnavailableError

log = logging.getLogger(__name__)

_HOLDER_SECONDS = 5.0
"""For its answer; less than a client waits for one, more than the holder needs to end a FUSE mount that is busy."""
_UNSENT_SECONDS = 0.2
"""The same when the question could not be sent."""


class Targets:
    """The mount points of one tree, in `now`. Best effort on disk: a full one must not keep a tree from being mounted
    or unmounted."""

    def __init__(self, folder: Path, id: str, now: list[str]) -> None:
        self._folder = folder
        self._id = id
        self._behind = False
        """Whether the file is."""
        self.now = now

    @classmethod
    def begin(cls, folder: Path, spec: ServerSpec) -> Targets:
        """Those of a tree's first fetcher, written to ``folder``."""
        targets = cls(folder, spec.id, [spec.target])
        targets.keep()
        return targets

    @classmethod
    def load(cls, folder: Path, spec: ServerSpec) -> Targets:
        """Those that the fetcher before kept in ``folder``; without them the one that the server was started for."""
        try:
            now = msgspec.json.decode((folder / TARGETS).read_bytes(), type=list[str])
        except (OSError, msgspec.MsgspecError) as exc:
            log.warning("the mounts of tree %s are not known any more: %s", spec.id, exc)
            now = [spec.target]
        return cls(folder, spec.id, now)

    def change(self, now: list[str]) -> None:
        if now != self.now:
            self.now = now
            self.keep()

    def keep(self) -> None:
        """Write the list for the next fetcher."""
        tmp = self._folder / f"{TARGETS}.tmp"
        try:
            tmp.write_bytes(msgspec.json.encode(self.now))
            os.replace(tmp, self._folder / TARGETS)
            self._behind = False
        except OSError as exc:
            if not self._behind:
                log.warning("cannot keep the mounts of tree %s, trying again later: %s", self._id, exc)
            self._behind = True

    def retry(self) -> None:
        """Write it again if that failed."""
        if self._behind:
            self.keep()


class Questions:
    """Questions to the holder. One thread asks, another heeds the notes that come."""

    def __init__(self, link: Link, id: str) -> None:
        self._link = link
        self._id = id
        self._asked = os.getpid() << 20
        self._answered = threading.Event()
        self._answer = Note("")
        self._left_alone = threading.Event()

    def heed(self, note: Note) -> None:
        """Any note of the holder's."""
        if note.number == self._asked:
            self._answer = note
            self._answered.set()

    def left_alone(self) -> None:
        """The holder is gone for good: leaving needs no answer any more."""
        self._left_alone.set()

    def ask(self, do: str) -> str:
        """Its very answer to this question. Raises `UnavailableError` when it gives none."""
        self._asked += 1
        self._answered.clear()
        sent = self._link.send(Note(do, number=self._asked))
        if not self._answered.wait(_HOLDER_SECONDS if sent else _UNSENT_SECONDS):
            if do == "leave" and self._left_alone.is_set():
                return "left"  # it ends by itself when nobody uses the tree any more
            raise UnavailableError(f"the holder of tree {self._id} does not answer to {do!r}", hint="try again")
        return self._answer.do


class Requests:
    """Answers requests on the control socket with what ``status`` gives. ``stop`` is set when the server ends; after
    ``still`` the fetcher uses no file of that mount."""

    def __init__(
        self,
        targets: Targets,
        holder: Questions,
        counts: memoryview,
        stop: threading.Event,
        status: Callable[[], TreeStatus],
        still: Callable[[str], None],
    ) -> None:
        self._targets = targets
        self._holder = holder
        self._counts = counts
        self._stop = stop
        self._status = status
        self._still = still

    def handle(self, request: Request) -> TreeStatus:
        """Raises `StoppingError` (mount anew), `UnavailableError` (no answer of the holder's), `BootseerError`."""
        counts, targets = self._counts, self._targets
        if request.do == "ready":
            counts[Count.JOB_READY] = 1
        elif request.do == "add":
            # Always: a question to leave may be on its way that nobody waits for any more.
            if self._stop.is_set() or self._holder.ask("stay") != "staying":
                raise StoppingError("the block server is stopping")
            if request.target not in targets.now:
                targets.change([*targets.now, request.target])
            counts[Count.INCOMPLETE] = 1
        elif request.do == "remove":
            left = [target for target in targets.now if target != request.target]
            if not left and not self._stop.is_set():
                self._holder.ask("leave")  # no answer is an error, and changes nothing
            targets.change(left)
        elif request.do == "still":
            self._still(request.target)
        elif request.do == "stop":
            self._holder.ask("leave")
        elif request.do != "status":
            raise BootseerError(f"unknown request {request.do!r}")
        return self._status()
