"""The holder: parent of the processes that serve one tree. It keeps every descriptor and starts them anew.

One process, one thread, one poll loop; no network, no store, no file of the tree. It forks the fetcher first, gets the
shared memory, the data file and the lock from it, chooses the driver, guards the data file with a fanotify mark, forks
the front, and only then says "ok" to who mounts. Children are forked, never exec'd: a new one is there within
milliseconds with everything imported.

The front has all of this too: when the holder is killed, the front forks a child that goes on as the holder. So no
single death leaves the group's descriptor without an owner (``docs/internals/blocks-concurrency.md``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.blocks import _process, driver, keeper, standby
from bootseer.blocks.cache import in_use
from bootseer.blocks.channel import Channel
from bootseer.blocks.child import Child
from bootseer.blocks.fetcherd import FetcherProcess, Inherited
from bootseer.blocks.keeper import Keeper
from bootseer.blocks.link import Link, Note
from bootseer.blocks.shared import JOURNAL_SLOTS, Count, Shared
from bootseer.blocks.spec import SPEC, ServerSpec
from bootseer.errors import BootseerError, UnavailableError
from bootseer.kernel import fanotify
from bootseer.store import Store

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_FINISH_SECONDS = 60.0
_LEAVE_SECONDS = 0.3
_RETRY_SECONDS = 0.25
_HOPELESS = 5
"""After so many starts in a row that came to nothing, readers get errors at once instead of waiting."""

StoreFor = Callable[[str], Store]


class Holder:
    """Serves one tree. `run` returns the exit code when it is over; children never return from here."""

    def __init__(self, answer: Callable[[str], None], store_for: StoreFor) -> None:
        self._answer = answer
        self._store_for = store_for
        self._link, self._far_link = Link.pair()
        self._channel, self._far_channel = Channel.pair()
        self._folder = Path()
        self._spec: ServerSpec | None = None
        self._shared: Shared | None = None
        self._data_fd = self._lock_fd = -1
        self._driver = "none"
        self._group: fanotify.Group | None = None
        self._fetcher: Child | None = None
        self._front: Child | None = None
        self._started = False
        self._leaving = False
        self._left = False
        self._lingered = False
        self._next_try = 0.0
        self._wake = (-1, -1)

    # -- start -----------------------------------------------------------------------------------------------------

    def run(self, folder: Path | None, url: str = "") -> int:
        """Serve ``folder``; None: wait until standard input names one, meet the store at ``url`` meanwhile."""
        self._listen()
        self._fetcher = Child("fetcher", lambda: self._first_fetcher(folder, url), self._after_fork)
        try:
            if folder is None:
                found = standby.await_folder()
                if found is None:
                    return 0
                folder, logfile = found
                self._link.send(Note("folder", path=str(folder), log=str(logfile)))
            self._folder = folder
            self._write_pid()
            self._spec = msgspec.json.decode((folder / SPEC).read_bytes(), type=ServerSpec)
            os.chdir("/")
            self._begin(self._spec)
        except BootseerError as exc:
            log.error("%s", exc)
            self._link.send(Note("refused", code=exc.exit_code, text=str(exc)))
            self._answer(f"error {exc.exit_code} {exc}\n")
            self._fetcher.end(3.0)
            return exc.exit_code
        return self._serve()

    def _begin(self, spec: ServerSpec) -> None:
        note, fds = self._expect("serve")
        shared_fd, self._data_fd, self._lock_fd = fds
        self._shared = Shared.attach(shared_fd)
        cache = Path(note.path)
        state = self._folder.parents[1]
        self._driver = driver.choose(
            spec.driver, cache, self._data_fd, state, complete=note.complete, missing=note.missing
        )
        if self._driver == "fanotify":
            self._group = driver.guard(self._data_fd, cache)
        counts = self._shared.counts
        self._shared.driver = self._driver
        counts[Count.HOLDER_PID] = os.getpid()
        counts[Count.HOLDER_STARTS] = counts[Count.FETCHER_STARTS] = 1
        assert self._fetcher is not None
        counts[Count.FETCHER_PID] = self._fetcher.pid
        if self._group is not None:
            _protect()
            self._start_front()
        self._link.send(Note("serving", driver=self._driver), [self._group.fileno()] if self._group else [])
        self._expect("started")
        self._fetcher.succeeded()
        self._started = True
        log.info("tree %s is served by the %s driver", spec.id, self._driver)
        self._answer(f"ok {os.getpid()} {self._driver}\n")

    def _expect(self, do: str) -> tuple[Note, list[int]]:
        assert self._fetcher is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            got = self._link.receive(timeout=0.05)
            if got is not None and got[0].do == do:
                return got
            if got is not None and got[0].do == "failed":
                raise _Failed(got[0].code, got[0].text)
            if got is None and self._fetcher.dead:
                raise UnavailableError("the fetcher of a block server ended while it started")
        raise UnavailableError(f"the fetcher of a block server is not ready after {_START_SECONDS:g} s")

    # -- children --------------------------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        """In a child: signals are the holder's business, and so is the answer."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for fd in self._wake:
            os.close(fd)
        self._wake = (-1, -1)
        self._answer("")
        for child in (self._fetcher, self._front):
            if child is not None:
                child.forget()

    def _first_fetcher(self, folder: Path | None, url: str) -> int:
        self._link.close()
        self._channel.close()
        link = self._far_link
        if folder is None:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            standby.warm_up(self._store_for, url)
            try:
                got = link.receive(timeout=1 << 20)
            except UnavailableError:
                return 0
            if got is None:
                return 0
            folder = Path(got[0].path)
            standby.turn_to(Path(got[0].log))
        try:
            spec = msgspec.json.decode((folder / SPEC).read_bytes(), type=ServerSpec)
            os.chdir("/")
            process = FetcherProcess(spec, folder, self._store_for(spec.store_url), link, self._far_channel, None)
        except BootseerError as exc:
            link.send(Note("failed", code=exc.exit_code, text=str(exc)))
            return exc.exit_code
        except Exception as exc:
            log.exception("the fetcher failed")
            link.send(Note("failed", code=70, text=repr(exc)))
            return 70
        process.run()
        return 0

    def _next_fetcher(self) -> int:
        self._link.close()
        self._channel.close()
        spec, shared = self._spec, self._shared
        assert spec is not None and shared is not None
        before = Inherited(shared, self._data_fd, self._lock_fd, self._driver, self._group)
        store = self._store_for(spec.store_url)
        FetcherProcess(spec, self._folder, store, self._far_link, self._far_channel, before).run()
        return 0

    def _start_fetcher(self) -> None:
        assert self._shared is not None
        counts = self._shared.counts
        counts[Count.FETCHER_STARTS] += 1
        self._fetcher = Child("fetcher", self._next_fetcher, self._after_fork, self._fetcher)
        counts[Count.FETCHER_PID] = self._fetcher.pid

    def _start_front(self) -> None:
        assert self._shared is not None
        counts = self._shared.counts
        counts[Count.FRONT_STARTS] += 1
        self._front = Child("keeper", self._keep, self._after_fork, self._front)
        counts[Count.FRONT_PID] = self._front.pid

    def _keep(self) -> int:
        """In the front process."""
        assert self._shared is not None and self._group is not None
        _protect()
        Keeper(self._shared, self._group, self._channel, os.getppid(), self._revive).run()
        return 0

    def _revive(self) -> int:
        """In the front process, whose holder died: fork the next one."""
        assert self._shared is not None
        front = os.getpid()
        counts = self._shared.counts
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            self._close_others()
            self._listen()
            counts[Count.HOLDER_STARTS] += 1
            counts[Count.HOLDER_PID] = os.getpid()
            self._front = Child.adopt("keeper", front)
            self._fetcher = Child.adopt("fetcher", counts[Count.FETCHER_PID])
            self._write_pid()
            log.warning("process %d holds tree %s from now on", os.getpid(), self._folder.name)
            code = self._serve()
        except BaseException:
            log.exception("the holder failed")
        finally:
            os._exit(code)

    def _close_others(self) -> None:
        """Events of the front's, its pidfd and the like: descriptors that are open on the data file count as users."""
        assert self._shared is not None and self._group is not None
        own = {self._shared.fd, self._group.fileno(), self._data_fd, self._lock_fd}
        own |= {end.fileno() for end in (self._link, self._far_link, self._channel, self._far_channel)}
        last = 2
        for fd in [*sorted(own), JOURNAL_SLOTS]:
            os.closerange(last + 1, fd)
            last = fd

    # -- the loop --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        one, two = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake = (one, two)
        signal.set_wakeup_fd(two, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._told_to_end)

    def _told_to_end(self, *_: object) -> None:
        if not self._leaving:
            self._leaving = True
            self._next_try = 0.0

    def _serve(self) -> int:
        assert self._fetcher is not None
        while True:
            self._wait()
            while (got := self._link.receive()) is not None:
                self._heed(got[0])
            if self._fetcher.dead and self._left:
                log.info("the server of tree %s ends", self._folder.name)
                if self._lingered:
                    _process.clear_unwatched(self._folder)
                return 0
            if self._driver == "fuse" and self._fetcher.dead:
                return self._fuse_ended()
            if self._leaving and not self._left and time.monotonic() >= self._next_try:
                self._leave()
            self._restart()
            if self._left and time.monotonic() >= self._next_try:
                log.warning("the fetcher does not finish; killing it")
                self._fetcher.kill()

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self._link.fileno(), self._wake[0]):
            poll.register(fd, select.POLLIN)
        for child in (self._fetcher, self._front):
            if child is not None and not child.dead:
                poll.register(child.pidfd, select.POLLIN)
        waits = [child.wait_seconds for child in (self._fetcher, self._front) if child is not None and child.dead]
        if self._leaving:
            waits.append(max(0.0, self._next_try - time.monotonic()))
        poll.poll(int(min(waits) * 1000) + 1 if waits else 10_000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 64)

    def _heed(self, note: Note) -> None:
        assert self._fetcher is not None and self._shared is not None
        if note.do == "started":
            self._fetcher.succeeded()
            self._shared.counts[Count.DOOMED] = 0
        elif note.do == "complete":
            self._finish_front()
        elif note.do == "leave":
            self._leaving = True
            self._leave(_LEAVE_SECONDS)
        elif note.do == "stay":
            self._leaving = self._left
            self._lingered = False
            self._link.send(Note("left" if self._left else "staying"))

    def _restart(self) -> None:
        assert self._fetcher is not None and self._shared is not None
        counts = self._shared.counts
        front = self._front
        if front is not None and front.dead and not self._left:
            if counts[Count.FRONT_READY] == counts[Count.FRONT_STARTS]:
                front.succeeded()
            if front.due:
                log.warning("the keeper ended (%s); starting another", front.ending)
                self._start_front()
            elif front.failures >= _HOPELESS and self._group is not None:
                keeper.deny_all(self._shared, self._group, min(1.0, front.wait_seconds))
        if self._fetcher.dead and not self._left and self._fetcher.due:
            log.warning("the fetcher ended (%s); starting another", self._fetcher.ending)
            if self._fetcher.failures >= _HOPELESS and not counts[Count.DOOMED]:
                log.error("no fetcher stays alive: reads of missing blocks fail until one does")
                counts[Count.DOOMED] = 1
            self._start_fetcher()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _leave(self, patience: float = 0.0) -> None:
        """All targets are gone, or a signal said to end. With fanotify that waits until nobody uses the data file:
        a mount that was detached while in use would read zeros without us."""
        if self._left:
            return
        until = time.monotonic() + patience
        if self._group is not None:
            while in_use(self._data_fd):
                if time.monotonic() >= until:
                    if self._next_try == 0.0 or patience:
                        log.warning("tree %s is still in use; its server stays until that ends", self._folder.name)
                        self._link.send(Note("busy"))
                        self._lingered = True
                    self._next_try = time.monotonic() + _RETRY_SECONDS
                    return
                time.sleep(0.01)
            self._drop_front()
        self._left = True
        self._next_try = time.monotonic() + _FINISH_SECONDS
        self._link.send(Note("left"))

    def _drop_front(self) -> None:
        """Nobody has the data file open, so nobody waits for an answer either."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(BootseerError):
                group.unmark(self._data_fd)
        if self._front is not None:
            self._front.end(0.0)
            self._front = None
        if group is not None:
            group.close()

    def _finish_front(self) -> None:
        """Every block is in the data file and on the disk: the kernel needs nobody any more."""
        if self._group is None or self._shared is None:
            return
        try:
            self._group.unmark(self._data_fd)
        except BootseerError as exc:
            log.warning("the mark cannot be removed, the keeper stays: %s", exc)
            return
        front, self._front = self._front, None
        if front is not None:
            front.end(5.0, signal.SIGTERM)  # it answers what waits first
        # What it did not answer the kernel allows when the last descriptor closes, and now that is right.
        self._group.close()
        self._group = None
        self._driver = self._shared.driver = "local"
        self._shared.counts[Count.FRONT_PID] = 0
        self._link.send(Note("local"))
        log.info("tree %s is complete: no front any more", self._folder.name)

    def _fuse_ended(self) -> int:
        assert self._fetcher is not None
        if not self._left and self._fetcher.code:
            log.error("the fetcher of tree %s ended (%s)", self._folder.name, self._fetcher.ending)
            return 70
        return 0

    def _write_pid(self) -> None:
        (self._folder / standby.PID).write_text(f"{os.getpid()} {os.getpgid(0)}\n")


class _Failed(BootseerError):
    """What kept the fetcher from starting, with its own exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]


def _protect() -> None:
    """The kernel should end another process first when memory runs out; best effort."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-900")
