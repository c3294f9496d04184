"""The holder: parent of the processes that serve one tree. It keeps every descriptor and starts them anew.

One process, one thread, one poll loop; no network, no store, no file of the tree. Children are forked, never exec'd: a
new one is there within milliseconds with everything imported.

A front has all of this too: when the holder is killed, the front forks a child that goes on as the holder. So no
single death leaves the fanotify group without an owner (``docs/internals/blocks-concurrency.md``).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from functools import partial

from bootseer.blocks.serving import _process, oom, standby, successor
from bootseer.blocks.serving.child import Child
from bootseer.blocks.serving.fronts import FanotifyFront, Front, FuseFront
from bootseer.blocks.serving.kept import Kept, calm
from bootseer.blocks.serving.link import Note
from bootseer.blocks.serving.pulse import BEAT_SECONDS, Watch, beat
from bootseer.blocks.serving.shared import Count
from bootseer.blocks.serving.wakeup import Wakeup
from bootseer.errors import BootseerError, UnsupportedError

log = logging.getLogger(__name__)

_FINISH_SECONDS = 60.0
_LEAVE_SECONDS = 0.3
_RETRY_SECONDS = 0.25
_FRONT_SILENCE = 10.0
_FETCHER_SILENCE = 20.0
"""Seconds without a sign of life after which a process is killed, and another takes its place."""
_HOPELESS = 4
"""After so many starts in a row that came to nothing, readers get errors at once instead of waiting."""


class Holder:
    """Supervises one served tree; `run` returns the exit code when it is over. ``front`` None: the tree is complete."""

    def __init__(self, kept: Kept, driver: str, front: Front | None, fetcher: Child) -> None:
        self._kept = kept
        self._counts = kept.shared.counts
        self.driver = driver
        self._front = front
        self._fetcher = fetcher
        self._server: Child | None = None
        """The front's process."""
        self._leaving = self._left = False
        self._behind = False
        """Whether the fetcher stays by itself, to finish what nobody waits for."""
        self._lingered = False
        self._next_try = 0.0
        self._wake = Wakeup(self._told_to_end)
        kept.shared.driver = driver
        self._counts[Count.HOLDER_PID] = os.getpid()
        self._counts[Count.HOLDER_STARTS] = self._counts[Count.FETCHER_STARTS] = 1
        self._counts[Count.FETCHER_PID] = fetcher.pid
        self._watch_fetcher = Watch(self._counts, Count.FETCHER_BEAT, _FETCHER_SILENCE)
        self._watch_front = Watch(self._counts, Count.FRONT_BEAT, _FRONT_SILENCE)
        self._score = oom.score()
        if front is not None:
            oom.protect()
            self._start_front()

    def abandon(self) -> None:
        """Nothing is mounted over it yet, and nothing will be."""
        self._drop_front()

    @property
    def front_dead(self) -> bool:
        return self._server is not None and self._server.dead

    # -- children --------------------------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        calm()
        self._wake.forked()
        for child in (self._fetcher, self._server):
            if child is not None:
                child.forget()

    def _fetch(self) -> int:
        """In a fetcher that replaces another."""
        return successor.fetch(self._kept, self.driver, self._front, self._score)

    def _start_fetcher(self) -> None:
        self._counts[Count.FETCHER_STARTS] += 1
        self._fetcher = Child("fetcher", self._fetch, self._after_fork, self._fetcher)
        if self._fetcher.pid:
            self._counts[Count.FETCHER_PID] = self._fetcher.pid
        self._watch_fetcher.restart()

    def _start_front(self) -> None:
        self._counts[Count.FRONT_STARTS] += 1
        # Not getppid in the child: this process may be dead by then.
        self._server = Child("front", partial(self._answer_kernel, os.getpid()), self._after_fork, self._server)
        self._counts[Count.FRONT_PID] = self._server.pid
        self._watch_front.restart()

    def _answer_kernel(self, holder: int) -> int:
        """In a front."""
        assert self._front is not None
        oom.protect()
        try:
            self._front.serve(self._kept.ends.channel, holder, self._revive)
        except BootseerError as exc:
            log.error("%s", exc)
            return exc.exit_code
        return 0

    def _revive(self) -> int:
        """In a keeper, whose holder died: fork the next one."""
        front = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            self._kept.shared.forked()
            # Events of the front's, its pidfd and the like: open on the data file they count as its users.
            self._kept.close_others(self._front.fds if self._front is not None else ())
            self._counts[Count.HOLDER_STARTS] += 1
            self._counts[Count.HOLDER_PID] = os.getpid()
            self._server = Child.adopt("front", front)
            self._fetcher = Child.adopt("fetcher", self._counts[Count.FETCHER_PID])
            self._watch_fetcher.restart()
            self._watch_front.restart()
            standby.write_pid(self._kept.folder)
            log.warning("process %d holds tree %s from now on", os.getpid(), self._kept.spec.id)
            code = self.run()
        except BaseException:
            log.exception("the holder failed")
        finally:
            os._exit(code)

    # -- the loop --------------------------------------------------------------------------------------------------

    def _told_to_end(self) -> None:
        if not self._leaving:
            self._leaving = True
            self._next_try = 0.0

    def run(self) -> int:
        """Keep the others running until the tree is left or its FUSE mount gone."""
        self._wake.listen()
        while True:
            try:
                if self._step():
                    return 0
            except Exception:  # whoever would end here leaves readers with zeros
                log.exception("the holder of tree %s goes on after this", self._kept.spec.id)
                time.sleep(_RETRY_SECONDS)

    def _step(self) -> bool:
        """Wait for something, see to it. Whether this was the end."""
        beat(self._counts, Count.HOLDER_BEAT)
        self._wait()
        while (got := self._kept.ends.link.receive()) is not None:
            self._heed(got[0])
        if self._left and (self._behind or self._fetcher.dead):
            log.info("the server of tree %s ends", self._kept.spec.id)
            if self._lingered:
                _process.clear_unwatched(self._kept.folder)
            return True
        if self._left:
            if time.monotonic() >= self._next_try:
                log.warning("the fetcher does not finish; killing it")
                self._fetcher.kill()
            return False
        if self._leaving and time.monotonic() >= self._next_try:
            self._leave()
        self._end_silent()
        self._restart()
        return False

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self._kept.ends.link.fileno(), self._wake.fd):
            poll.register(fd, select.POLLIN)
        waits = [2 * BEAT_SECONDS]
        for child in (self._fetcher, self._server):
            if child is not None and child.dead:
                waits.append(child.wait_seconds)
            elif child is not None:
                poll.register(child.pidfd, select.POLLIN)
        if self._leaving:
            waits.append(max(0.0, self._next_try - time.monotonic()))
        poll.poll(int(min(waits) * 1000) + 1)
        self._wake.drain()

    def _heed(self, note: Note) -> None:
        if note.do == "started":
            self._fetcher.succeeded()
            self._counts[Count.DOOMED] = 0
        elif note.do == "complete":
            self._finish_front()
        elif note.do == "behind":
            self._behind = True
        elif note.do == "leave":
            self._leaving = True
            self._leave(_LEAVE_SECONDS, note.number)
        elif note.do == "stay":
            self._leaving = self._left
            self._lingered = False
            self._kept.ends.link.send(Note("left" if self._left else "staying", number=note.number))

    def _end_silent(self) -> None:
        for child, watch in ((self._fetcher, self._watch_fetcher), (self._server, self._watch_front)):
            if child is not None and not child.dead and watch.silent():
                log.error("%s %d gives no sign of life; killing it", child.name, child.pid)
                child.kill()
                watch.restart()

    def _restart(self) -> None:
        counts = self._counts
        fetcher = self._fetcher
        if fetcher.dead and not self._left:
            if fetcher.failures >= _HOPELESS and not counts[Count.DOOMED]:
                log.error("no fetcher stays alive: reads of missing blocks fail until one does")
                counts[Count.DOOMED] = 1
            if fetcher.due:
                log.warning("the fetcher ended (%s); starting another", fetcher.ending)
                self._start_fetcher()
        server, front = self._server, self._front
        if server is None or front is None or not server.dead or self._left:
            return
        if isinstance(front, FuseFront) and not front.mounted:
            log.info("the FUSE mount of tree %s is gone", self._kept.spec.id)
            self._leave()
            return
        if counts[Count.FRONT_READY] == counts[Count.FRONT_STARTS]:
            server.succeeded()
        hopeless = server.failures >= _HOPELESS or server.code == UnsupportedError.exit_code
        if hopeless and not front.give_up(min(1.0, server.wait_seconds)):
            self._server = None
        if self._server is not None and server.due:
            log.warning("the %s ended (%s); starting another", front.name, server.ending)
            self._start_front()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _leave(self, patience: float = 0.0, number: int = 0) -> None:
        """All targets are gone, or a signal said to end. With fanotify that waits until nobody uses the data file:
        a mount that was detached while in use would read zeros without us."""
        if self._left:
            self._kept.ends.link.send(Note("left", number=number))
            return
        until = time.monotonic() + patience
        while self._front is not None and self._front.busy():
            if time.monotonic() >= until:
                if self._next_try == 0.0 or patience:
                    log.warning("tree %s is still in use; its server stays until that ends", self._kept.spec.id)
                    self._kept.ends.link.send(Note("busy", number=number))
                    self._lingered = True
                self._next_try = time.monotonic() + _RETRY_SECONDS
                return
            time.sleep(0.01)
        self._drop_front()
        self._leaving = self._left = True
        self._next_try = time.monotonic() + _FINISH_SECONDS
        self._kept.ends.link.send(Note("left", number=number))

    def _drop_front(self) -> None:
        front, self._front = self._front, None
        if front is not None:
            try:
                front.stop()
            except BootseerError as exc:
                log.warning("%s", exc)
        if self._server is not None:
            self._server.end(0.0)
            self._server = None
        if front is not None:
            front.close()

    def _finish_front(self) -> None:
        """Every block is in the data file and on the disk: the kernel needs nobody any more."""
        front = self._front
        if not isinstance(front, FanotifyFront):
            return
        try:
            front.stop()
        except BootseerError as exc:
            log.warning("the mark cannot be removed, the keeper stays: %s", exc)
            return
        if self._server is not None:
            self._server.end(5.0, signal.SIGTERM)  # it answers what waits first
            self._server = None
        # What it did not answer the kernel allows when the last descriptor closes, and now that is right.
        front.close()
        self._front = None
        self.driver = self._kept.shared.driver = "local"
        self._counts[Count.FRONT_PID] = 0
        self._kept.ends.link.send(Note("local"))
        log.info("tree %s is complete: no keeper any more", self._kept.spec.id)
